"""Ranks that stay: starting processes is what costs, so one set of them takes one example after the other."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.launch import _CONTEXT, Failed, free_port


class WarmRanks:
    """Some ranks that know each other, as a launcher would have started them, and wait for work.

    Args:
        world_size: How many.
        timeout: Seconds after which an example that has not ended counts as hanging.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` gives on every rank, :class:`Failed` where it raises; those ranks are started anew.

        Raises:
            AssertionError: A rank has not come to an end.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        try:
            results = self._collect(time.monotonic() + self._timeout)
        except BaseException:
            self.close()
            raise
        if any(isinstance(result, Failed) for result in results):
            self.close()
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        port = free_port()
        for rank in range(self._world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=True)
            process = _CONTEXT.Process(target=_work, args=(theirs, rank, self._world_size, port))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(self._world_size), strict=True))
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), timeout=max(0.0, left))
            assert ready, f"ranks {sorted(waiting.values())} of {self._world_size} hang; the others gave {results}"
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(5)
                    results[rank] = Failed(f"died with exit code {self._processes[rank].exitcode}")
        return [results[rank] for rank in range(self._world_size)]


@contextlib.contextmanager
def warm_ranks(sizes: range, timeout: float) -> Iterator[dict[int, WarmRanks]]:
    """Ranks of every size; none is started before it is used, and none is left."""
    pools = {size: WarmRanks(size, timeout) for size in sizes}
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def _work(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    os.environ.update(address, NODE_RANK="0", LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            sent = pipe.recv_bytes()
            try:
                function, args = pickle.loads(sent)
                result = function(*args)
            except BaseException:
                result = Failed(traceback.format_exc())
            pipe.send_bytes(pickle.dumps(result))
    os._exit(0)
