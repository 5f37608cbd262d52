"""Starts programs as users do, several side by side, and ends all of their processes, whatever happens."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch import free_port, run_ranks
from tests.program import MARK, ROOT, train

PROGRAM = str(ROOT / "tests" / "program.py")
#: set by launchers and clusters, and inherited from whatever runs the tests
FOREIGN = ("SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "NODE_RANK", "GROUP_RANK", "PL_", "TORCHELASTIC_")


@dataclass
class Running:
    """A started program; its output goes to a file, so that nobody must read it for it to go on."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self.path.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 100) -> str:
        """The first line with ``text`` in it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for line in self.output.splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            time.sleep(0.05)
        raise AssertionError(f"no {text!r} within {timeout} s:\n{self.output}")


@contextlib.contextmanager
def started(*commands: tuple[list[str], dict[str, str]], cwd: Path | None = None) -> Iterator[list[Running]]:
    """Run commands side by side, each with its own additions to the environment; none outlives the block.

    Lightning takes any port for a script that is given none, and somebody else may be given it before it is used.
    """
    token = f"LIGHTNING_PP_TEST={os.getpid()}-{time.monotonic_ns()}"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))}
    clean |= dict([token.split("=")])
    running: list[Running] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (command, variables) in enumerate(commands):
                path = Path(folder) / f"{number}.txt"
                port = {} if any(name.startswith("SLURM_") for name in variables) else {"MASTER_PORT": str(free_port())}
                with path.open("wb") as file:
                    process = subprocess.Popen(
                        command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                        env={**clean, **port, **variables}, cwd=cwd or folder, start_new_session=True,
                    )  # fmt: skip
                running.append(Running(process, path))
            yield running
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
            kill_descendants(token)


def kill_descendants(token: str) -> None:
    """End every process that has inherited ``token``; launchers put theirs into sessions of their own."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def finish(running: list[Running], timeout: float = 100) -> list[tuple[int, str]]:
    """Exit codes and outputs; fails when the programs are not done in time."""
    deadline = time.monotonic() + timeout
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))
    outputs = "\n".join(one.output for one in running)
    assert all(one.process.poll() is not None for one in running), f"not done after {timeout} s:\n{outputs}"
    return [(one.process.returncode, one.output) for one in running]


def run(
    *commands: tuple[list[str], dict[str, str]], timeout: float = 100, cwd: Path | None = None
) -> list[tuple[int, str]]:
    """Start commands side by side and wait for them."""
    with started(*commands, cwd=cwd) as running:
        return finish(running, timeout)


def program(options: Any, *launcher: str, **variables: Any) -> tuple[list[str], dict[str, str]]:
    """``tests/program.py`` with ``options``, started by ``launcher`` (default: Python)."""
    command = [*(launcher or (sys.executable,)), PROGRAM, json.dumps(options)]
    return command, {name: str(value) for name, value in variables.items()}


def torchrun(*arguments: str) -> tuple[str, ...]:
    """The command that ``torchrun`` stands for."""
    return (sys.executable, "-m", "torch.distributed.run", *arguments)


def results(finished: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """What the programs' ranks printed, in order of rank; all must have succeeded."""
    for code, output in finished:
        assert code == 0, output
    lines = [line for _, output in finished for line in output.splitlines() if line.startswith(MARK)]
    found = [json.loads(line.removeprefix(MARK)) for line in lines]
    return sorted(found, key=lambda result: (result["rank"], len(result["losses"])))


def plain(**options: Any) -> dict[str, Any]:
    """The same program in one process without the strategy."""
    result: dict[str, Any] = run_ranks(train, 1, options)[0]
    return result


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """All ranks together hold what the plain run ended with, and each saw its losses."""
    parameters: dict[str, float] = {}
    for result in found:
        assert len(result["losses"]) == len(expected["losses"])
        pairs = list(zip(result["losses"], expected["losses"], strict=True))
        assert all(abs(ours - theirs) <= tolerance for ours, theirs in pairs), pairs
        parameters |= result["parameters"]
    assert parameters.keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        assert abs(parameters[name] - value) <= tolerance, name
