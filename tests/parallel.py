"""Runs a file of tests beside another, one for each core, where pytest-xdist is installed; ``-n0`` runs one by one.

A file is never divided: what its tests share, such as the runs of a table, is made once. A test that is marked
``alone`` measures seconds, or its processes must be gone within some: while it runs, all other workers wait.
"""

import fcntl
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
#: a test may start four processes
MOST_WORKERS = 8


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Say how many workers there are, before xdist starts them, unless the command line does."""
    if is_worker():  # whose main module is a text that xdist sent; where there are no workers, it is pytest's
        sys.modules["__main__"].__spec__ = find_spec("pytest.__main__")
        return
    if not config.pluginmanager.hasplugin("xdist"):
        return
    option = config.option
    if option.numprocesses is None and option.dist == "no" and not option.tx and wants_workers(config):
        option.numprocesses = cores() if cores() > 1 else 0
    if option.numprocesses and option.dist == "no":
        option.dist = "loadfile"
        option.loadscopereorder = False  # they are in order: see below


def is_worker() -> bool:
    """Whether this is one of xdist's own processes."""
    return "PYTEST_XDIST_WORKER" in os.environ


def wants_workers(config: pytest.Config) -> bool:
    """For all tests; a part of them is done before workers have started, and who looks at one is in its process."""
    option = config.option
    if option.usepdb or option.trace or option.collectonly or option.capture == "no":
        return False
    return any(TESTS.is_relative_to((config.invocation_params.dir / name).resolve()) for name in config.args)


def cores() -> int:
    """How many this process may use; a container may have a part of its machine's only."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, period = limit.read_text().split()
        number = number if quota == "max" else min(number, max(1, int(quota) // int(period)))
    return min(number, MOST_WORKERS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers begin with what keeps the others waiting, while those have nothing long to do, and end with short files.

    Files of many tests come before files of few.
    """
    if not is_worker():
        return
    sizes = Counter(item.path for item in items)
    alone = {item.path for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: (item.path not in alone, -sizes[item.path]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait before the test's time begins to count."""
    if not is_worker():
        return (yield)
    with beside_others(Path(item.config.option.basetemp).parent, item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def beside_others(shared: Path, alone: bool) -> Iterator[None]:
    """Enter the room in which tests run: where ``alone``, once it is empty, and nobody enters it then.

    Who waits holds the door, so that tests which do not mind company do not overtake one that does, again and again.
    """
    with (shared / "room").open("w") as room, (shared / "door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a process that the test has left behind may have it open
