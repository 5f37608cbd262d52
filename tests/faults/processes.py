"""Ranks as processes of their own, which nobody ends but they themselves: what they print, and when they are gone.

They are forked from a server as in ``tests.launch``, but an exception ends them as it ends a script: by Python's
exception hook, with an exit code.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def run_job(
    folder: Path, function: Callable[..., Any], size: int, *args: Any, timeout: float = 60, everywhere: Any = None
) -> Ended:
    """Start ``function(*args)`` on every rank and wait until all are gone.

    Args:
        folder: Empty; for the output.
        function: What a script does.
        size: Number of ranks.
        args: Of ``function``.
        timeout: Seconds after which those that are left are killed.
        everywhere: Signal to send to all ranks as soon as something has been planted, as a terminal does.
    """
    output, planted, port = folder / "output.txt", folder / "planted.txt", free_port()
    output.touch()
    processes = [
        _CONTEXT.Process(target=_main, args=(rank, size, port, str(output), str(planted), function, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
            if everywhere is not None and planted.exists():
                for process in processes:
                    os.kill(process.pid or 0, everywhere)
                everywhere = None
        end = time.monotonic()
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    begin = float(planted.read_text()) if planted.exists() else end
    return Ended(codes, output.read_text(errors="replace"), end - begin)


def _main(
    rank: int, size: int, port: int, output: str, planted: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
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
    os._exit(code)
