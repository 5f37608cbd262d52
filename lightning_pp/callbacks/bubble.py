"""Measures how much of a step each stage is idle, and why."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.callbacks import hints
from lightning_pp.callbacks.interval import check_interval, interval
from lightning_pp.callbacks.shares import NUM_NUMBERS, Shares, means_of, summary
from lightning_pp.launch import failure
from lightning_pp.runtime.comm import job_store, losing_peers
from lightning_pp.runtime.events import Recorder, StepRecord
from lightning_pp.strategy import PipelineStrategy

__all__: list[str] = []

#: how long the end of training waits for a device to finish the step that is measured
_PATIENCE = 10.0

#: the measurement from which on hints are given: the first one has what happens only once
_SETTLED = 2


#: after how many batches a step that some rank does not have is given up
_GIVES_UP = 8


@dataclass(slots=True)
class _Wanted:
    """A batch that is measured, the optimizer step that it belongs to, and what this rank has recorded of it."""

    number: int
    step: int
    record: StepRecord | None = None


class BubbleMonitor(Callback):
    """Logs where the time of a step goes on each stage, and how much of it is bubble.

    Every n-th optimizer step, the last batch of the step is measured on all ranks, and rank 0 logs it to all loggers of
    the Trainer: the bubble fraction of each stage and of the pipeline, beside what the schedule alone would have, and
    the seconds that each stage has spent (``docs/callbacks.md`` lists the keys). With several pipelines side by side a
    stage's values are means over them.

    Args:
        every_n_steps: How often; None takes the Trainer's ``log_every_n_steps``.

    Attributes:
        last: What was measured last, by log key; equal on all ranks, empty before the first measurement.

    Raises:
        ValueError: ``every_n_steps`` is below 1.
        TypeError: It is not an int.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[BubbleMonitor(every_n_steps=10)])  # doctest: +SKIP
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        check_interval(every_n_steps)
        self.last: dict[str, float] = {}
        self._every_n_steps = every_n_steps
        self._recorder: Recorder | None = None
        self._wanted: deque[_Wanted] = deque()
        self._measured = 0
        self._has_hinted = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise MisconfigurationException(
                f"BubbleMonitor measures pipelines, but the Trainer's strategy is {type(trainer.strategy).__name__}:"
                " use Trainer(strategy=PipelineStrategy(...)), or leave the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wanted.clear()
        self._measured = 0
        self._recorder = _strategy(trainer).pipeline.record(self._listen)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        every = interval(trainer, self._every_n_steps)
        if every and (trainer.global_step + 1) % every == 0 and compat.is_window_end(trainer):
            self._wanted.append(_Wanted(trainer.fit_loop.total_batch_idx, trainer.global_step))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._recorder is not None
        self._recorder.end()
        now = trainer.fit_loop.total_batch_idx
        # a GPU passes the end of a step after the host has: it is asked when the next one is under way
        while self._wanted and (self._wanted[0].number < now or _is_exact(trainer)):
            if not self._measure(trainer) and self._wanted[0].number > now - _GIVES_UP:
                return
            self._wanted.popleft()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._recorder is not None
        deadline = time.monotonic() + _PATIENCE
        while any(wanted.record is None for wanted in self._wanted) and time.monotonic() < deadline:
            self._recorder.end()
            time.sleep(0.001)
        while self._wanted:
            self._measure(trainer)
            self._wanted.popleft()

    def _listen(self, record: StepRecord) -> None:
        for wanted in self._wanted:
            if wanted.number == record.number:
                wanted.record = record

    def _measure(self, trainer: Trainer) -> bool:
        """Bring all ranks' times of the oldest wanted step together and log them; False where a rank lacks its own."""
        strategy, wanted = _strategy(trainer), self._wanted[0]
        pipelines = _gather(strategy, Shares.of(wanted.record) if wanted.record is not None else None)
        if pipelines is None:
            return False
        self._measured += 1
        self.last = summary(pipelines, strategy.pipeline.schedule, _is_exact(trainer))
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(dict(self.last), step=wanted.step)
        if self._measured >= _SETTLED and not self._has_hinted:
            hint = hints.hint(self.last, means_of(pipelines), strategy.arguments, round(pipelines[0][0].microbatches))
            self._has_hinted = hint is not None
            if hint is not None:
                rank_zero_info(f"BubbleMonitor: {hint}")
        return True


def _strategy(trainer: Trainer) -> PipelineStrategy:
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy


def _is_exact(trainer: Trainer) -> bool:
    """Whether times are known at once and on one clock: computed by the CPUs of one machine."""
    return trainer.strategy.root_device.type == "cpu" and trainer.num_nodes == 1


def _gather(strategy: PipelineStrategy, own: Shares | None) -> list[list[Shares]] | None:
    """All ranks' times, by replica and stage; None, on all ranks, where one of them has none."""
    numbers = own.numbers() if own is not None else [float("nan")] * NUM_NUMBERS
    row = torch.tensor(numbers, dtype=torch.float64)
    rows = [row]
    if strategy.world_size > 1:
        rows = [torch.empty_like(row) for _ in range(strategy.world_size)]
        with failure.explained(job_store()), losing_peers():
            dist.all_gather(rows, row, group=strategy.groups.everyone)
    if any(bool(other.isnan().any()) for other in rows):
        return None
    shares = [Shares(*other.tolist()) for other in rows]
    size = strategy.data_parallel_size  # rank = stage * size + replica
    return [shares[replica::size] for replica in range(size)]
