"""Runs a function in several processes that know each other, as a launcher would have started them.

Processes are forked from a server that has imported torch and Lightning and done nothing else, so that a test of four
ranks starts in a fraction of a second. Every run has a hard limit, after which its processes are killed: a hang is a
failure.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_pp", "tests.preloaded"])
#: whoever asks the system for any port, as Gloo does for each connection, gets one above these
_PORTS = range(10_000, 30_000)
_NEXT = itertools.count(random.SystemRandom().randrange(len(_PORTS)))  # other tests may run beside these


@dataclass
class Failed:
    """A rank's exception, as text."""

    text: str


def free_port() -> int:
    """A port that nothing listens on, and that nobody is given by chance before it is used."""
    while True:
        port = _PORTS[next(_NEXT) % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank; returns the results by rank, all of which must succeed."""
    results = try_ranks(function, world_size, *args, timeout=timeout, **kwargs)
    failures = [f"--- rank {rank}\n{result.text}" for rank, result in enumerate(results) if isinstance(result, Failed)]
    assert not failures, "\n".join(failures)
    return results


def try_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Any]:
    """Like :func:`run_ranks`, with :class:`Failed` in place of a result where a rank raised or died."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        target = (theirs, rank, world_size, port, timeout, function, args, kwargs)
        processes.append(_CONTEXT.Process(target=_rank_main, args=target))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return _collect(pipes, processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: list[Any] = [Failed("did not finish in time and was killed")] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                results[rank] = Failed(f"died with exit code {processes[rank].exitcode}")
    return results


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    import torch

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(1.0, timeout - 3), exit=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world_size),
        NODE_RANK="0",
        LOCAL_RANK=str(rank),
        OMP_NUM_THREADS="1",  # or Lightning's launcher would choose another number of threads
    )
    try:
        result = function(*args, **kwargs)
    except BaseException:
        result = Failed(traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(pickle.dumps(result))  # by value: the process does not live long enough to share memory
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # workers of loaders
        child.kill()
    os._exit(0)
