"""From plain numbers to stages: what each holds, how long a step takes, how much of it is idle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_pp.partition import plan as partition
from lightning_pp.planning import ticks
from lightning_pp.planning.work import Work
from lightning_pp.schedule import Costs, build, in_flight, placement_of, simulate

__all__: list[str] = []

#: more computations than this are simulated for all ranks together, where the schedule is known well enough
_MANY = 40_000


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for.

    Attributes:
        stages: P.
        schedule: A name, or a CSV file.
        split: Names of the layers that begin stages 1, 2, ...; None balances.
        balance: What is balanced.
        layers: Names of all layers, for ``split``.
        flops_per_second: Of a device; None gives times in multiples of the work of one device.
        bytes_per_second: Between two stages; None for messages that take no time.
    """

    stages: int
    schedule: str = "1f1b"
    split: Sequence[str] | None = None
    balance: str = "flops"
    layers: Sequence[str] = ()
    flops_per_second: float | None = None
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage.

    Attributes:
        first: Its first layer.
        last: Its last layer.
        calls: Number of layer calls.
        parameters: Number of parameters it holds.
        flops: Of the forward and backward of one micro-batch.
        receives: Bytes of one micro-batch that come from the stage before.
        weights: Bytes of parameters and buffers.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        saved: Bytes that one micro-batch saves for its backward, parameters excluded.
        messages: Bytes of its inputs and outputs beyond those, which stay until its backward.
        in_flight: Most micro-batches held at once.
        batch: Bytes of the batch, which every stage holds.
        bubble: Part of the step in which it computes nothing.
    """

    first: str
    last: str
    calls: int
    parameters: int
    flops: float
    receives: int
    weights: int
    gradients: int
    optimizer: int
    saved: int
    messages: int
    in_flight: int
    batch: int
    bubble: float

    @property
    def activations(self) -> int:
        """Bytes held for backward at the peak: all micro-batches in flight, messages included."""
        return self.in_flight * (self.saved + self.messages)

    @property
    def total(self) -> int:
        """All bytes at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.batch


@dataclass(frozen=True, slots=True)
class Forecast:
    """One way of running the model.

    Attributes:
        schedule: The schedule.
        microbatches: M.
        bounds: The cut, as layer call numbers.
        stages: Its stages.
        seconds: Of one step, forward and backward; None where the speed of a device is not known.
        speedup: How much faster than one device that is never idle.
        bubble: Part of all stages' time in which nothing is computed.
    """

    schedule: str
    microbatches: int
    bounds: tuple[int, ...]
    stages: tuple[StageForecast, ...]
    seconds: float | None
    speedup: float
    bubble: float

    @property
    def peak(self) -> int:
        """Bytes of the stage that needs most."""
        return max(stage.total for stage in self.stages)


def forecast(work: Work, options: Options) -> Forecast:
    """Cut the model, and say what comes of it.

    Raises:
        ValueError: It cannot be cut so, or the schedule does not fit.
    """
    bounds = _cut(work, options)
    spans = list(pairwise(bounds))
    num_mbs = work.num_microbatches
    forward = [max(sum(work.forward[start:stop]) * work.mean_size, 1.0) for start, stop in spans]
    backward = [max(sum(work.backward[start:stop]) * work.mean_size, 1.0) for start, stop in spans]
    received = [0, *(work.trace.bytes_at(bound) for bound in bounds[1:-1])]
    step = _step(options, num_mbs, forward, backward, received)
    stages = _stages(work, bounds, step.in_flight, step.bubbles, received)
    ideal = num_mbs * (sum(forward) + sum(backward))
    return Forecast(
        schedule=options.schedule,
        microbatches=num_mbs,
        bounds=bounds,
        stages=stages,
        seconds=step.makespan / options.flops_per_second if options.flops_per_second else None,
        speedup=ideal / step.makespan,
        bubble=1 - ideal / (step.makespan * len(stages)),
    )


def _cut(work: Work, options: Options) -> tuple[int, ...]:
    trace, number = work.trace, len(work.trace.calls)
    if options.stages > number:
        raise ValueError(f"{options.stages} stages, but the step calls only {number} layers: use at most {number}")
    if options.split is not None:
        if len(options.split) != options.stages - 1:
            raise ValueError(f"--split names {len(options.split)} layers, but {options.stages} stages need"
                             f" {options.stages - 1}: those that begin stages 1, 2, ...")  # fmt: skip
        return partition.cut_by_names(trace, options.split, options.layers)
    if options.stages == 1:
        return (0, number)
    saved = [float(call.saved_bytes) for call in trace.calls]
    memory = (saved, work.num_microbatches) if options.balance == "memory" else None
    return partition.cut_by_balance(trace, options.stages, work.costs, memory)


def _stages(
    work: Work, bounds: tuple[int, ...], held: Sequence[int], bubbles: Sequence[float], received: Sequence[int]
) -> tuple[StageForecast, ...]:
    num_stages = len(bounds) - 1
    sums = [[0, 0, 0, 0] for _ in range(num_stages)]
    for tensor in work.held:
        places = {min(bisect_right(bounds, place) - 1, num_stages - 1) for place in tensor.places}
        for stage in places or range(num_stages):
            for which, size in enumerate((tensor.elements, tensor.weight, tensor.gradient, tensor.state)):
                sums[stage][which] += size
    stages = []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        saved, messages = _held_for_backward(work, start, stop, stage == num_stages - 1)
        calls = work.trace.calls[start:stop]
        parameters, weights, gradients, optimizer = sums[stage]
        flops = sum(work.forward[start:stop]) + sum(work.backward[start:stop])
        stages.append(
            StageForecast(
                calls[0].layer, calls[-1].layer, len(calls), parameters, flops, received[stage],
                weights, gradients, optimizer, saved, messages, held[stage], work.batch_bytes, bubbles[stage],
            )
        )  # fmt: skip
    return tuple(stages)


def _held_for_backward(work: Work, start: int, stop: int, is_last: bool) -> tuple[int, int]:
    """Bytes saved by one micro-batch, and bytes of the inputs and outputs that are not among them."""
    saved: dict[int, int] = {}
    for place in work.saved[start : stop + is_last]:
        saved.update(place)
    live = set(work.trace.live(start) if start else ()) | set(() if is_last else work.trace.live(stop))
    messages = {
        work.outputs[output]: work.trace.calls[output[0]].leaves[output[1]].num_bytes
        for output in live
        if work.outputs[output] not in saved
    }
    return sum(saved.values()), sum(messages.values())


@dataclass(frozen=True, slots=True)
class _Step:
    """Times in FLOPs of one device."""

    makespan: float
    bubbles: list[float]
    in_flight: list[int]


def _step(
    options: Options, num_mbs: int, forward: list[float], backward: list[float], received: Sequence[int]
) -> _Step:
    num = options.stages
    per_byte = 0.0
    if options.flops_per_second and options.bytes_per_second:
        per_byte = options.flops_per_second / options.bytes_per_second
    transfer = [size * per_byte for size in received]
    work = [one + two for one, two in zip(forward, backward, strict=True)]
    if 2 * num * num_mbs > _MANY and options.schedule in ticks.KNOWN:
        makespan = ticks.makespan(options.schedule, num_mbs, forward, backward, transfer)
        held = ticks.depths(options.schedule, num, num_mbs)
    else:
        schedule = build(options.schedule, num, num_mbs)
        if len(placement_of(schedule)) != num:
            raise ValueError(f"{options.schedule!r} has {len(placement_of(schedule))} stages on {num} ranks: a plan has"
                             " one stage per rank")  # fmt: skip
        pairs = {}
        for stage in range(1, num):
            pairs[stage - 1, stage] = pairs[stage, stage - 1] = transfer[stage]
        makespan = simulate(schedule, Costs(forward=forward, backward=backward, transfer=pairs)).makespan
        held = list(in_flight(schedule).values())
    return _Step(makespan, [1 - num_mbs * own / makespan for own in work], held)
