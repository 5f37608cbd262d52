"""One rank's failure, told to the others: a note in the job's store that a rank reads when its peer is gone."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pp.launch import printing
from lightning_pp.runtime.comm import PeerLost, job_store
from lightning_pp.runtime.engine import PipelineError

__all__: list[str] = []

_KEY = "lightning_pp/failure"
#: there as soon as any rank has failed, be it only because of another
_OVER = "lightning_pp/failure/over"
#: what libraries say when a process is gone, or does not answer
_LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out", "connection refused")
_SUSPICION = "lightning_pp/failure/suspicion"
#: how long a rank that lost its peer looks for the reason, seconds
_PATIENCE = 3.0
#: how long the process that holds the store waits for the others to have looked, seconds
_LINGER = 1.5


class FollowingError(RuntimeError):
    """Says what another rank's failure means for this one, which has not failed itself."""


def reset(store: Any, rank: int, group: Any) -> None:
    """Forget the failure of an earlier run of the same job."""
    if rank == 0:
        for key in (_KEY, _OVER, _SUSPICION):
            store.delete_key(key)
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
        raise PipelineError(f"{error}\n{printing.STOPPED_BY}{note}") from error


def leave_note(store: Any, rank: int, error: BaseException) -> None:
    """Write what failed here, unless another rank's failure came first; ``error`` is told whose it was then."""
    first = None
    is_lost = is_lost_peer(error)
    with suppress(RuntimeError, ValueError):  # the store may be gone with the process that held it
        store.set(_OVER, "")
        if is_lost:
            if "timed out" in _chained_text(error).lower() and store.check([_SUSPICION]):
                leave_text(store, bytes(store.get(_SUSPICION)).decode())
            first = read_note(store, patience=0.0)
        else:
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            first = leave_text(store, f"rank {rank}: {text}")
            if first == f"rank {rank}: {text}" or first.partition(": ")[2] != text:
                first = None  # what all ranks say at once need not be printed by all, but anything else by each
    printing.shorten(error, rank, first, is_lost)


class LeavesNote(Callback):
    """Leaves the note before other callbacks take their time over a failure, as checkpoints do."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if dist.is_initialized():
            leave_note(job_store(), trainer.global_rank, exception)


def leave_text(store: Any, text: str) -> str:
    """Write a note, unless there is one; returns the one that came first."""
    return bytes(store.compare_set(_KEY, "", text)).decode()


def leave_suspicion(store: Any, text: str) -> None:
    """Say what seems to keep all others; a note of failure as soon as one of them has lost patience."""
    store.set(_SUSPICION, text)


def is_over(store: Any) -> bool:
    """Whether any rank has failed, for whatever reason."""
    return bool(store.check([_OVER]) or store.check([_KEY]))


def _chained_text(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return " ".join(texts)


def read_note(store: Any, patience: float = _PATIENCE) -> str | None:
    """What failed first, if anyone said so; waits a little for it."""
    deadline = time.monotonic() + patience
    with suppress(RuntimeError, ValueError):
        while True:
            if store.check([_KEY]):
                return bytes(store.get(_KEY)).decode()
            if time.monotonic() >= deadline:
                return None
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
    """Whether ``error`` says only that another process has failed, is gone, or does not answer."""
    while error is not None:
        if isinstance(error, (PeerLost, FollowingError)) or _is_lost_connection(error):
            return True
        error = error.__cause__
    return False


def _is_lost_connection(error: BaseException) -> bool:
    """The same where nobody has called it so: Lightning, a metric or the user's code waited."""
    frame = error.__traceback__
    if frame is None or not isinstance(error, RuntimeError):
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    text = str(error).lower()
    return "distributed" in frame.tb_frame.f_code.co_filename and any(word in text for word in _LOST)
