"""Ranks as processes of their own, which nobody ends but they themselves: what they print, and when they are gone.

They are forked from a server as in ``tests.launch``, but an exception ends them as it ends a script: by Python's
exception hook, with an exit code.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.disk import enter
from tests.launch import _CONTEXT, free_port

#: the file in which a rank says at what time it does what is to end the job
_PLANTED = "LIGHTNING_PP_TEST_PLANTED"


@dataclass
class Ended:
    """How a job has ended.

    Attributes:
        codes: Exit codes, by rank; None for one that had to be killed.
        output: What all ranks have printed, in order.
        seconds: From what was planted until the last process was gone.
    """

    codes: list[int | None]
    output: str
    seconds: float

    @property
    def tracebacks(self) -> int:
        """How many of the ranks have printed a traceback."""
        chained = ("The above exception was the direct cause", "During handling of", "Original Traceback (most")
        return self.output.count("Traceback (most recent call last)") - sum(map(self.output.count, chained))


def plant() -> None:
    """Say that the fault comes now; the first one counts."""
    path = Path(os.environ[_PLANTED])
    if not path.exists():
        path.write_text(str(time.monotonic()))


@dataclass
class Job:
    """What :func:`run_jobs` is to run.

    Attributes:
        folder: Empty; for the output.
        function: What a script does.
        size: Number of ranks.
        args: Of ``function``.
        timeout: Seconds after which ranks that are left are killed.
        everywhere: Signal to send to all ranks as soon as something has been planted, as a terminal does.
        disk: The process whose file systems the ranks see; None for those that everybody sees.
    """

    folder: Path
    function: Callable[..., Any]
    size: int
    args: tuple[Any, ...]
    timeout: float = 60
    everywhere: Any = None
    disk: int | None = None

    def __post_init__(self) -> None:
        self.output, self.planted = self.folder / "output.txt", self.folder / "planted.txt"
        self.processes: list[Any] = []

    def start(self) -> None:
        """Start all ranks."""
        self.output.touch()
        given = free_port(), str(self.output), str(self.planted), self.disk, self.function, self.args
        for rank in range(self.size):
            self.processes.append(_CONTEXT.Process(target=_main, args=(rank, self.size, *given)))
            self.processes[-1].start()
        self.deadline = time.monotonic() + self.timeout

    def ended(self) -> Ended | None:
        """How it has ended, as soon as it has."""
        if any(process.is_alive() for process in self.processes) and time.monotonic() < self.deadline:
            if self.everywhere is not None and self.planted.exists():
                for process in self.processes:
                    os.kill(process.pid or 0, self.everywhere)
                self.everywhere = None
            return None
        end = time.monotonic()
        codes = [process.exitcode for process in self.processes]
        self.kill()
        begin = float(self.planted.read_text()) if self.planted.exists() else end
        return Ended(codes, self.output.read_text(errors="replace"), end - begin)

    def kill(self) -> None:
        """End what is left of it."""
        for process in self.processes:
            process.kill()
            process.join()


def run_jobs(jobs: Mapping[str, Job], at_once: int = 1) -> dict[str, Ended]:
    """Run all ``jobs``, some of them at once: most of their time is spent waiting."""
    waiting, running = dict(jobs), dict[str, Job]()
    found: dict[str, Ended] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = next(iter(waiting))
                running[name] = waiting.pop(name)
                running[name].start()
            time.sleep(0.02)
            found |= {name: ended for name, job in running.items() if (ended := job.ended()) is not None}
            running = {name: job for name, job in running.items() if name not in found}
    finally:
        for job in running.values():
            job.kill()
    return found


def _main(
    rank: int,
    size: int,
    port: int,
    output: str,
    planted: str,
    disk: int | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if disk is not None:
        enter(disk)
    import torch

    torch.set_num_threads(1)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server's processes ignore it
    os.environ.update({_PLANTED: planted, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update(WORLD_SIZE=str(size), NODE_RANK="0", LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    code = 0
    try:
        function(*args)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # workers of loaders
        child.kill()
    os._exit(code)
