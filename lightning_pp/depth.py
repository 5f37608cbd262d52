"""``schedule="auto_1f1b"``: how many micro-batches each rank holds is chosen in the run, from what it measures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pp.pipeline import Pipeline
from lightning_pp.runtime.comm import losing_peers
from lightning_pp.runtime.events import Recorder, StepRecord
from lightning_pp.runtime.job import Job
from lightning_pp.schedule import Costs, Kind, Op, extra_in_flight

__all__: list[str] = []

#: the training step that is measured; what happens only once, such as headers, belongs to the first
_MEASURED = 2


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of one rank.

    Attributes:
        forward: Of a micro-batch.
        backward: Of a micro-batch.
        transfer: Of a message to the next rank; None on the last one.
        microbatches: M of the step that was measured.
    """

    forward: float
    backward: float
    transfer: float | None
    microbatches: int


class DepthChooser:
    """Measures one training step and the links, and sets the schedule of the steps that follow.

    Args:
        pipeline: Whose; it begins with 1F1B.
        num_ranks: P.
        device: Where it computes.
    """

    def __init__(self, pipeline: Pipeline, num_ranks: int, device: torch.device) -> None:
        self._pipeline = pipeline
        self._num_ranks = num_ranks
        self._device = device
        self._recorder: Recorder | None = None
        self._record: StepRecord | None = None
        self._num_steps = 0
        self._is_done = num_ranks == 1
        self.job: Job | None = None

    def before_step(self) -> None:
        """A training step is about to begin, on all ranks."""
        if self._is_done:
            return
        self._num_steps += 1
        if self._num_steps == _MEASURED:
            self._recorder = self._pipeline.record(self._listen)
        elif self._recorder is not None:
            self._recorder.end()
            self._choose()

    def _listen(self, record: StepRecord) -> None:
        self._record = self._record or record

    def _choose(self) -> None:
        """Choose, if the devices of all ranks are through with the measured step."""
        group = self._pipeline.host_group
        is_ready = torch.tensor([self._record is not None and self.job is not None], dtype=torch.int32)
        with losing_peers():
            dist.all_reduce(is_ready, op=dist.ReduceOp.MIN, group=group)
        if not is_ready.item():
            return
        assert self._record is not None
        assert self.job is not None
        self._pipeline.stop_recording(self._listen)
        self._is_done = True
        transfer = self._pipeline.engine.transfer_seconds(self.job.plans[0], self._device)
        times: list[_Times] = [_times(self._record, transfer)] * self._num_ranks
        with losing_peers():
            dist.all_gather_object(times, times[0], group=group)
        # equal numbers in, equal numbers out: no rank has to tell the others
        extra = extra_in_flight(self._num_ranks, times[0].microbatches, _costs(times))
        self._pipeline.use_schedule(f"1f1b+{','.join(map(str, extra))}")
        rank_zero_info(f"schedule='auto_1f1b' goes on with {self._pipeline.schedule!r}: {_text(times)}.")


def _times(record: StepRecord, transfer: float | None) -> _Times:
    """Means over micro-batches; a rank cannot compute while it sends."""
    seconds: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for event in record.events:
        if isinstance(event.what, Op):
            seconds[event.what.kind].append(event.seconds)
    forward, backward = (
        statistics.median(seconds[kind]) + statistics.median(seconds[send] or [0.0])
        for kind, send in ((Kind.F, Kind.SEND_F), (Kind.B, Kind.SEND_B))
    )
    return _Times(forward, backward, transfer, len(seconds[Kind.F]))


def _costs(times: list[_Times]) -> Costs:
    links = {
        pair: one.transfer
        for rank, one in enumerate(times)
        if one.transfer is not None
        for pair in ((rank, rank + 1), (rank + 1, rank))
    }
    shortest = 1e-9  # a cost must be above 0
    return Costs(
        forward=[max(shortest, one.forward) for one in times],
        backward=[max(shortest, one.backward) for one in times],
        transfer=links,
    )


def _text(times: list[_Times]) -> str:
    ms = [1000 * max(column) for column in zip(*((one.forward, one.backward) for one in times), strict=True)]
    slowest = 1000 * max(one.transfer for one in times if one.transfer is not None)
    return f"a forward takes up to {ms[0]:.1f} ms, a backward {ms[1]:.1f} ms, a message {slowest:.2f} ms"
