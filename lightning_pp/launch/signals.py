"""Signals that stop or requeue a job: all processes act on them together, between two batches.

Lightning's handlers communicate from wherever a signal finds the process, and Ctrl-C raises there. In a pipeline that
may be the middle of a step, where other stages wait for a transfer and cannot run a handler of their own, so that all
would wait for ever, or stop at different places and leave no checkpoint. The handlers here only take note; after each
batch the processes tell each other what they have noted.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.launch import failure
from lightning_pp.runtime.comm import job_store, losing_peers

__all__: list[str] = []

_STOP, _REQUEUE, _INTERRUPT = 0, 1, 2


def install(trainer: Trainer, group: Any) -> None:
    """Let the processes of ``group`` (host memory) act together on signals that reach any of them during this run."""
    callbacks = compat.callbacks(trainer)
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, (AgreedSignals, failure.LeavesNote))]
    callbacks.insert(0, failure.LeavesNote())
    callbacks.append(AgreedSignals(trainer, group))  # after the others, so that what is saved has seen the batch


class AgreedSignals(Callback):
    """Takes note of signals and acts on them one batch later, on all processes at the same place."""

    def __init__(self, trainer: Trainer, group: Any) -> None:
        self._group = group
        self._noted = [0, 0, 0]
        self._under_way: tuple[Any, Tensor] | None = None
        self._is_global_zero = trainer.is_global_zero
        self._wants_interrupt = self._handles_interrupt = False
        self._actions = compat.SignalActions(trainer)
        self._actions.replace_handlers(self._note_stop, self._note_requeue)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)
            self._handles_interrupt = True

    def _note_stop(self, signum: int) -> None:
        if not self._noted[_STOP]:
            self._actions.tell_children(signum)
        self._noted[_STOP] = int(signum)

    def _note_requeue(self, signum: int) -> None:
        self._noted[_REQUEUE] = int(signum)

    def _note_interrupt(self, signum: int, _: Any) -> None:
        self._release_interrupt()  # the next one raises where it finds the process
        self._noted[_INTERRUPT] = signum
        self._wants_interrupt = True
        if self._is_global_zero:
            os.write(2, b"\nStopping after this batch, on all ranks together. Press Ctrl-C again to stop at once.\n")

    def _release_interrupt(self) -> None:
        if self._handles_interrupt:
            self._handles_interrupt = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _agree(self, *_: Any, **__: Any) -> None:
        noted, self._noted = self._noted, [0, 0, 0]
        signums = torch.tensor(noted)
        # nobody waits here: the answer is read after the next batch, when it has long arrived
        work = dist.all_reduce(signums, dist.ReduceOp.MAX, group=self._group, async_op=True)
        earlier, self._under_way = self._under_way, (work, signums)
        if earlier is not None:
            stop, requeue, interrupt = _answer(*earlier)
            if requeue:
                self._actions.requeue(requeue)
            if stop:
                self._actions.stop()
            if interrupt:
                self._wants_interrupt = False
                raise KeyboardInterrupt

    @override
    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._wants_interrupt = False
        self._release_interrupt()

    @override
    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self._under_way is not None and dist.is_initialized():
            _answer(*self._under_way)
        self._under_way = None
        self._release_interrupt()
        if self._wants_interrupt:  # there was no batch any more
            self._wants_interrupt = False
            signal.raise_signal(signal.SIGINT)

    on_train_batch_end = _agree
    on_validation_batch_end = _agree
    on_test_batch_end = _agree
    on_predict_batch_end = _agree


def _answer(work: Any, signums: Tensor) -> list[int]:
    with failure.explained(job_store()), losing_peers():
        work.wait()
    return [int(signum) for signum in signums]
