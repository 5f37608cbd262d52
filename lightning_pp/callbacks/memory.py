"""Measures what each stage holds for its backward passes, and foretells it for other settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.callbacks.forecast import Growth, peak_of, sizes_of
from lightning_pp.callbacks.interval import check_interval, interval
from lightning_pp.launch import failure
from lightning_pp.partition import tree
from lightning_pp.runtime import microbatch
from lightning_pp.runtime.comm import job_store, losing_peers
from lightning_pp.runtime.held import HeldBytes
from lightning_pp.schedule import build
from lightning_pp.strategy import PipelineStrategy

__all__: list[str] = []

_UNKNOWN = math.nan


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What one rank has measured; NaN where it cannot know."""

    activation_peak_bytes: float
    in_flight_peak: float
    buffers_peak: float
    allocated_peak_bytes: float
    reserved_peak_bytes: float
    per_microbatch: float
    per_sample: float
    num_samples: float


#: those that are logged, in this order
_LOGGED = (
    "activation_peak_bytes", "in_flight_peak", "buffers_peak", "allocated_peak_bytes", "reserved_peak_bytes",
)  # fmt: skip


class ActivationMemoryMonitor(Callback):
    """Logs how many bytes each stage holds for its backward passes.

    Every n-th optimizer step, the last batch of the step is measured on all ranks, and rank 0 logs it to all loggers of
    the Trainer. ``pipeline/stage{k}/activation_peak_bytes`` is the most that tensors saved for a backward took at once:
    what autograd has saved and what the stage before has sent, each storage once, without parameters, buffers and the
    batch itself. ``pipeline/stage{k}/in_flight_peak`` is the number of micro-batches held at once, and
    ``pipeline/stage{k}/buffers_peak`` that of messages posted or waiting. On a GPU, ``allocated_peak_bytes`` and
    ``reserved_peak_bytes`` of the stage are those of ``torch.cuda`` since its last reset. With several pipelines side
    by side a stage's values are the largest of them.

    Args:
        every_n_steps: How often; None takes the Trainer's ``log_every_n_steps``.

    Attributes:
        last: What was measured last, by log key; equal on all ranks, empty before the first measurement.

    Raises:
        ValueError: ``every_n_steps`` is below 1.
        TypeError: It is not an int.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ActivationMemoryMonitor(every_n_steps=10)])  # doctest: +SKIP
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        check_interval(every_n_steps)
        self.last: dict[str, float] = {}
        self._every_n_steps = every_n_steps
        self._held: HeldBytes | None = None
        self._step = 0
        self._stages: list[_Numbers] = []
        self._has_warned = False

    def forecast(self, num_microbatches: int, schedule: str = "1f1b", batch_size: int | None = None) -> list[int]:
        """Activation bytes at each stage's peak, for other settings of the run that was measured.

        What a micro-batch holds is taken to grow with its number of samples, as measured; where all micro-batches had
        one size, all of it is taken to be its samples'.

        Args:
            num_microbatches: Micro-batches per batch.
            schedule: As the strategy's.
            batch_size: Samples per batch; None for as many as were measured.

        Raises:
            RuntimeError: Nothing has been measured, or what was measured does not follow from the sizes of the
                micro-batches (a tensor that all of them share, or ``split_batch`` of the user).
            ValueError: There is no such schedule.
        """
        if not self._stages:
            raise RuntimeError("There is nothing to forecast from: train until a step has been measured.")
        unknown = [position for position, stage in enumerate(self._stages) if math.isnan(stage.per_sample)]
        if unknown:
            raise RuntimeError(
                f"There is no forecast: what stage {unknown[0]} holds does not follow from its micro-batches' sizes."
            )
        found = []
        for position, stage in enumerate(self._stages):
            size = round(stage.num_samples) if batch_size is None else batch_size
            sizes = sizes_of(size, num_microbatches)
            ops = build(schedule, len(self._stages), len(sizes))[position]
            found.append(peak_of(ops, sizes, Growth(stage.per_microbatch, stage.per_sample)))
        return found

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise MisconfigurationException(
                f"ActivationMemoryMonitor measures pipelines, but the strategy is {type(trainer.strategy).__name__}:"
                " use Trainer(strategy=PipelineStrategy(...)), or leave the callback out."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine = _strategy(trainer).pipeline.engine
        if engine.held is self._held:
            engine.held = None  # somebody skipped the batch before
        self._held = None
        every = interval(trainer, self._every_n_steps)
        if not every or (trainer.global_step + 1) % every or not compat.is_window_end(trainer):
            return
        self._step = trainer.global_step
        engine.reset_peaks()
        if engine.held is None:  # a second monitor reads what the first one has counted
            apart = (*pl_module.parameters(), *pl_module.buffers(), *tree.tensors_of(batch))
            engine.held = HeldBytes(apart, trainer.strategy.root_device)
        self._held = engine.held

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._held is None:
            return
        strategy = _strategy(trainer)
        held, self._held, strategy.pipeline.engine.held = self._held, None, None
        own = _numbers(strategy, held, None if hasattr(pl_module, "split_batch") else microbatch.batch_size(batch))
        self._stages = _gather(strategy, own)
        self.last = {
            f"pipeline/stage{position}/{name}": getattr(stage, name)
            for position, stage in enumerate(self._stages)
            for name in _LOGGED
            if not math.isnan(getattr(stage, name))
        }
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(dict(self.last), step=self._step)
        if not self._has_warned and any(math.isnan(stage.activation_peak_bytes) for stage in self._stages):
            self._has_warned = True
            rank_zero_warn(
                "ActivationMemoryMonitor cannot see what is saved for backward while other hooks on saved tensors"
                " surround the training step: activation_peak_bytes is left out. Set such hooks inside of the step."
            )


def _strategy(trainer: Trainer) -> PipelineStrategy:
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy


def _numbers(strategy: PipelineStrategy, held: HeldBytes, num_samples: int | None) -> _Numbers:
    """This rank's, of the step that has just ended."""
    engine, device = strategy.pipeline.engine, strategy.root_device
    on_gpu = device.type == "cuda"
    growth = None
    if num_samples and not held.is_blind:
        growth = _growth(strategy, held, num_samples)
    return _Numbers(
        _UNKNOWN if held.is_blind else float(held.peak),
        float(engine.in_flight_peak),
        float(engine.buffers_peak),
        float(torch.cuda.max_memory_allocated(device)) if on_gpu else _UNKNOWN,
        float(torch.cuda.max_memory_reserved(device)) if on_gpu else _UNKNOWN,
        _UNKNOWN if growth is None else growth.per_microbatch,
        _UNKNOWN if growth is None else growth.per_sample,
        float(num_samples or 0),
    )


def _growth(strategy: PipelineStrategy, held: HeldBytes, num_samples: int) -> Growth | None:
    """How what a micro-batch holds grows with its samples; None where that does not give the measured peak."""
    sizes = sizes_of(num_samples, len(held.growth))
    growth = Growth.of([(sizes[mb], bytes_) for mb, bytes_ in held.growth.items()])
    ops = build(strategy.pipeline.schedule, strategy.num_stages, len(sizes))[strategy.mesh.position]
    return growth if growth is not None and peak_of(ops, sizes, growth) == held.peak else None


def _gather(strategy: PipelineStrategy, own: _Numbers) -> list[_Numbers]:
    """All stages' numbers, on all ranks."""
    row = torch.tensor(astuple(own), dtype=torch.float64)
    rows = [row]
    if strategy.world_size > 1:
        rows = [torch.empty_like(row) for _ in range(strategy.world_size)]
        with failure.explained(job_store()), losing_peers():
            dist.all_gather(rows, row, group=strategy.groups.everyone)
    numbers = [_Numbers(*row.tolist()) for row in rows]
    size = strategy.data_parallel_size  # rank = stage * size + replica
    return [_largest(numbers[first : first + size]) for first in range(0, len(numbers), size)]


def _largest(replicas: Sequence[_Numbers]) -> _Numbers:
    """Of each number the largest, and the growth of the replica that holds most."""
    peaks = [replica.activation_peak_bytes for replica in replicas]
    if any(math.isnan(peak) for peak in peaks):
        return replace(replicas[0], activation_peak_bytes=_UNKNOWN)
    most = replicas[peaks.index(max(peaks))]
    return replace(most, **{name: max(getattr(replica, name) for replica in replicas) for name in _LOGGED})
