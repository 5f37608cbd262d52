"""One rank's failure, told to the others: a note in the job's store that a rank reads when its peer is gone."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from lightning_pp.runtime.comm import PeerLost
from lightning_pp.runtime.engine import PipelineError

__all__: list[str] = []

_KEY = "lightning_pp/failure"
#: how long a rank that lost its peer looks for the reason, seconds
_PATIENCE = 3.0
#: how long the process that holds the store waits for the others to have looked, seconds
_LINGER = 1.5


def reset(store: Any, rank: int, group: Any) -> None:
    """Forget the failure of an earlier run of the same job."""
    if rank == 0:
        store.delete_key(_KEY)
        for other in range(dist.get_world_size()):
            store.delete_key(f"{_KEY}/left/{other}")
    dist.barrier(group=group)


@contextmanager
def explained(store: Any) -> Iterator[None]:
    """Where a peer was lost, say why, if the failing rank has said so."""
    try:
        yield
    except (PipelineError, PeerLost) as error:
        if not is_lost_peer(error):
            raise
        note = read_note(store)
        if note is None:
            raise
        raise PipelineError(f"{error}\nThe pipeline was stopped by {note}") from error


def leave_note(store: Any, rank: int, error: BaseException) -> None:
    """Write what failed here, unless another rank's failure came first."""
    if is_lost_peer(error):
        return
    text = f"rank {rank}: {''.join(traceback.format_exception_only(type(error), error)).strip()}"
    with suppress(RuntimeError, ValueError):  # the store may be gone with the process that held it
        store.compare_set(_KEY, "", text)


def read_note(store: Any) -> str | None:
    """What failed first, if anyone said so; waits a little for it."""
    deadline = time.monotonic() + _PATIENCE
    with suppress(RuntimeError, ValueError):
        while time.monotonic() < deadline:
            if store.check([_KEY]):
                return bytes(store.get(_KEY)).decode()
            time.sleep(0.05)
    return None


def part(store: Any, rank: int, size: int) -> None:
    """Say that this rank has read what it wanted; the process that holds the store waits a little for all others."""
    with suppress(RuntimeError, ValueError):
        store.set(f"{_KEY}/left/{rank}", "")
        deadline = time.monotonic() + _LINGER
        keys = [f"{_KEY}/left/{other}" for other in range(size)]
        while rank == 0 and time.monotonic() < deadline and not store.check(keys):
            time.sleep(0.05)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether ``error`` says only that another process is gone."""
    while error is not None:
        if isinstance(error, PeerLost):
            return True
        error = error.__cause__
    return False
