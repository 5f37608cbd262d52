"""Tests that run side by side: files stay whole, and who wants to be alone is."""

import argparse
import copy
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import TESTS, beside_others, cores, wants_workers

CONFTEST = f"""
import json, os, sys, time
import pytest
sys.path.insert(0, {str(TESTS.parent)!r})
from tests.parallel import pytest_cmdline_main, pytest_collection_modifyitems, pytest_runtest_protocol

def pytest_configure(config):
    config.addinivalue_line("markers", "alone")

@pytest.fixture(autouse=True)
def noted(request):
    begin = time.monotonic()
    time.sleep(0.2)
    seen = [os.environ.get("PYTEST_XDIST_WORKER"), begin, time.monotonic()]
    request.path.with_name(request.node.name).with_suffix(".json").write_text(json.dumps(seen))
"""
MANY = """
import pytest

@pytest.mark.parametrize("number", range(8))
def test_many(number):
    pass
"""
SOME = """
import pytest

def test_some():
    pass

@pytest.mark.alone
def test_alone():
    pass
"""


def run(folder: Path, *arguments: str) -> dict[str, tuple[str | None, float, float]]:
    """Each test of a small suite: its worker, when it began, and when it ended."""
    for name, text in (("conftest", CONFTEST), ("test_many", MANY), ("test_some", SOME)):
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments, "."]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem: tuple(json.loads(path.read_text())) for path in folder.glob("*.json")}


def test_files_are_not_divided_and_nothing_runs_beside_what_is_alone(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist, to run tests side by side")
    seen = run(tmp_path, "-n2")
    assert len(seen) == 10
    many = {worker for name, (worker, *_) in seen.items() if "many" in name}
    some = {worker for name, (worker, *_) in seen.items() if "many" not in name}
    assert many | some == {"gw0", "gw1"}
    assert len(many) == len(some) == 1
    _, begin, end = seen.pop("test_alone")
    assert all(other_end <= begin or end <= other_begin for _, other_begin, other_end in seen.values())


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        (["tests"], {}, True),
        (["."], {}, True),
        (["tests/runtime", str(TESTS)], {}, True),
        (["tests/runtime"], {}, False),
        (["tests/test_parallel.py::test_x", "tests/test_links.py"], {}, False),
        (["tests"], {"usepdb": True}, False),
        (["tests"], {"trace": True}, False),
        (["tests"], {"collectonly": True}, False),
        (["tests"], {"capture": "no"}, False),
    ],
)
def test_all_tests_are_run_side_by_side_unless_somebody_looks(
    request: pytest.FixtureRequest, args: list[str], options: dict[str, Any], expected: bool
) -> None:
    config = copy.copy(request.config)
    plain = {"usepdb": False, "trace": False, "collectonly": False, "capture": "fd"}
    config.option = argparse.Namespace(**{**vars(config.option), **plain, **options})
    config.args = args
    config.invocation_params = dataclasses.replace(config.invocation_params, dir=TESTS.parent)
    assert wants_workers(config) is expected


def test_one_that_wants_to_be_alone_is_not_overtaken_and_others_meet(tmp_path: Path) -> None:
    entered: list[str] = []
    met = threading.Barrier(2)

    def enter(name: str, alone: bool = False) -> None:
        with beside_others(tmp_path, alone):
            entered.append(name)
            time.sleep(0.5)
            if name in "bc":
                met.wait(60)

    threads = [threading.Thread(target=enter, args=given) for given in (("a",), ("alone", True), ("b",), ("c",))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert entered[:2] == ["a", "alone"]
    assert sorted(entered[2:]) == ["b", "c"]


def test_there_is_at_least_one_worker() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
