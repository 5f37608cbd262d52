"""Shows one step of all ranks: a trace to look into, and a picture to look at."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_pp.callbacks import png
from lightning_pp.callbacks.clocks import offsets
from lightning_pp.callbacks.trace_file import Row, to_picture, to_trace
from lightning_pp.launch import failure
from lightning_pp.runtime.comm import Clock, job_store, losing_peers
from lightning_pp.runtime.events import Recorder, StepRecord
from lightning_pp.schedule.svg import to_svg
from lightning_pp.strategy import PipelineStrategy

__all__: list[str] = []

_FORMATS = ("json", "svg", "png")
#: how long a device is waited for, seconds
_PATIENCE = 60.0


class PipelineTimeline(Callback):
    """Writes what all ranks did in one training batch, on one clock.

    Rank 0 writes ``pipeline_step{n}.json``, a trace for https://ui.perfetto.dev and ``chrome://tracing`` in which ops
    are called as in ``2F3`` (stage 2, forward, micro-batch 3), and ``pipeline_step{n}.svg``, a picture with a row for
    each stage: above the step as measured, below it what the schedule alone would take with each stage's mean times.
    No other batch is recorded, or slowed down.

    Args:
        dirpath: Folder for the files. Default: the Trainer's ``log_dir``, or ``default_root_dir`` where it has none.
        step: Number of the batch, from 0, counted over all epochs. The first one takes longer than the others.
        formats: Any of ``"json"``, ``"svg"`` and ``"png"``, which needs matplotlib.

    Attributes:
        paths: The files of the last fit, on all ranks; empty while there are none.

    Raises:
        ValueError: ``step`` is below 0, or a format is none of those, or matplotlib is missing.
        TypeError: ``step`` is not an int, or ``formats`` is a single name.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[PipelineTimeline(step=20)])  # doctest: +SKIP
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        step: int = 10,
        formats: Sequence[str] = ("json", "svg"),
    ) -> None:
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step={step!r}: allowed is an int of at least 0, the number of a batch.")
        if step < 0:
            raise ValueError(f"step={step}: allowed is an int of at least 0, the number of a batch.")
        if isinstance(formats, str):
            raise TypeError(f"formats={formats!r}: give a list, [{formats!r}].")
        if not formats or not set(formats) <= set(_FORMATS):
            raise ValueError(f"formats={formats!r}: allowed are some of {', '.join(map(repr, _FORMATS))}.")
        if "png" in formats and not png.is_available():
            raise ValueError(f"formats={formats!r}: {png.MISSING}.")
        self.paths: list[Path] = []
        self._dirpath = dirpath
        self._step = step
        self._formats = tuple(dict.fromkeys(formats))
        self._recorder: Recorder | None = None
        self._record: StepRecord | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise MisconfigurationException(
                f"PipelineTimeline shows pipelines, but the Trainer's strategy is {type(trainer.strategy).__name__}:"
                " use Trainer(strategy=PipelineStrategy(...)), or leave the callback out."
            )
        self.paths = []
        self._recorder = self._record = None  # of a fit that has failed

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self._step:
            self._record = None
            self._recorder = _strategy(trainer).pipeline.record(self._listen)
            _catch_up(Clock(trainer.strategy.root_device))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is None:
            return
        strategy = _strategy(trainer)
        rows = _gather(strategy, self._wait(self._recorder))
        strategy.pipeline.stop_recording(self._listen)
        self._recorder = self._record = None
        folder = Path(self._dirpath or trainer.log_dir or trainer.default_root_dir)  # asks all ranks
        if rows is None:
            return
        paths = [folder / f"pipeline_step{self._step}.{ending}" for ending in self._formats]
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                _write(path, rows, self._step)
        self.paths = paths
        rank_zero_info(f"PipelineTimeline wrote {', '.join(map(str, paths))}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.paths:
            rank_zero_warn(
                f"PipelineTimeline has written nothing: batch {self._step} has not been trained on. There were"
                f" {trainer.fit_loop.total_batch_idx + 1} batches, which count from 0: give a step that is among them."
            )

    def _listen(self, record: StepRecord) -> None:
        if self._recorder is not None and record.number == self._step:
            self._record = record

    def _wait(self, recorder: Recorder) -> StepRecord | None:
        """The step, as soon as the device has passed its end."""
        deadline = time.monotonic() + _PATIENCE
        recorder.end()
        while self._record is None and time.monotonic() < deadline:
            time.sleep(0.001)
            recorder.end()
        return self._record


def _catch_up(clock: Clock) -> None:
    """Wait for the device: when it lags behind its host as the batch begins, its times are early by that."""
    mark, deadline = clock.mark(), time.monotonic() + _PATIENCE
    while not clock.has_passed(mark) and time.monotonic() < deadline:
        time.sleep(0.0005)


def _strategy(trainer: Trainer) -> PipelineStrategy:
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy


def _gather(strategy: PipelineStrategy, record: StepRecord | None) -> list[Row] | None:
    """All ranks' steps on rank 0's clock, by pipeline and stage, for rank 0; for the others none.

    Returns:
        None, on all ranks, where a rank has no record.
    """
    size = strategy.world_size
    records, ahead = [record], [0.0]
    if size > 1:
        group = strategy.groups.everyone
        records *= size
        with failure.explained(job_store()), losing_peers():
            dist.gather_object(record, records if strategy.is_global_zero else None, dst=0, group=group)
            ahead = offsets(group)
    rows = []
    replicas = strategy.data_parallel_size  # rank = stage * replicas + replica
    for rank, (other, seconds) in enumerate(zip(records, ahead, strict=False)):
        if other is not None:
            events = tuple(replace(e, start=e.start - seconds, stop=e.stop - seconds) for e in other.events)
            rows.append(Row(rank, rank // replicas, rank % replicas, events))
    if not strategy.broadcast(len(rows) == size):
        return None
    return sorted(rows, key=lambda row: (row.replica, row.stage))


def _write(path: Path, rows: Sequence[Row], number: int) -> None:
    if path.suffix == ".json":
        path.write_text(to_trace(rows, number), encoding="utf-8")
    elif path.suffix == ".svg":
        path.write_text(to_svg(to_picture(rows, number)), encoding="utf-8")
    else:
        png.write_png(to_picture(rows, number), path)
