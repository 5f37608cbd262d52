"""From plain numbers to stages: what each holds, how long a step takes, how much of it is idle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_pp.partition import plan as partition
from lightning_pp.planning import ticks
from lightning_pp.planning.work import Work
from lightning_pp.schedule import Costs, build, in_flight, placement_of, simulate

__all__: list[str] = []

#: more computations than this are simulated for all ranks together, where the schedule is known well enough
_MANY = 40_000

#: seconds that the simulator is given for a stage that takes no time at all
_SHORTEST = 1e-9


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
        bytes_per_second: Between two stages; None for messages whose size costs nothing.
        latency: Seconds that every message takes besides.
    """

    stages: int
    schedule: str = "1f1b"
    split: Sequence[str] | None = None
    balance: str = "flops"
    layers: Sequence[str] = ()
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    latency: float = 0.0


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
        returns: Bytes of one micro-batch that go back to it, as gradients.
        weights: Bytes of parameters and buffers.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        saved: Bytes that one micro-batch saves for its backward, parameters excluded.
        messages: Bytes that it received beyond those, which stay until its backward.
        recomputed: Bytes of the layer that saves most of all that are run again in the backward; one layer at a time.
        in_flight: Most micro-batches held at once.
        batch: Bytes of the batch, which every stage holds.
        bubble: Part of the step in which it computes nothing.
        forward_seconds: Of one mean micro-batch; None where nothing was timed.
        backward_seconds: The same.
    """

    first: str
    last: str
    calls: int
    parameters: int
    flops: float
    receives: int
    returns: int
    weights: int
    gradients: int
    optimizer: int
    saved: int
    messages: int
    recomputed: int
    in_flight: int
    batch: int
    bubble: float
    forward_seconds: float | None
    backward_seconds: float | None

    @property
    def activations(self) -> int:
        """Bytes held for backward at the peak: all micro-batches in flight, messages included."""
        return self.in_flight * (self.saved + self.messages)

    @property
    def total(self) -> int:
        """All bytes at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.recomputed + self.batch


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
    costs = _Costs.of(work, options, bounds)
    step = _step(options, work.num_microbatches, costs)
    stages = _stages(work, bounds, step, costs)
    ideal = work.num_microbatches * (sum(costs.forward) + sum(costs.backward))
    return Forecast(
        schedule=options.schedule,
        microbatches=work.num_microbatches,
        bounds=bounds,
        stages=stages,
        seconds=step.makespan * costs.seconds_each if costs.seconds_each else None,
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


@dataclass(frozen=True, slots=True)
class _Costs:
    """Times of one mean micro-batch by stage, in seconds or in FLOPs of one device.

    Attributes:
        forward: Of forwards.
        backward: Of backwards.
        received: Bytes from the stage before.
        returned: Bytes back to it.
        seconds_each: Seconds of one unit of time; None where that is not known.
        is_timed: Whether they were timed.
    """

    forward: list[float]
    backward: list[float]
    received: list[int]
    returned: list[int]
    seconds_each: float | None
    is_timed: bool

    @classmethod
    def of(cls, work: Work, options: Options, bounds: tuple[int, ...]) -> _Costs:
        """Add up the calls of each stage."""
        forward, backward, least = work.forward, work.backward, 1.0
        speed = options.flops_per_second
        if work.passes is not None:
            forward, backward = [one.forward for one in work.passes], [one.backward for one in work.passes]
            speed, least = 1.0, _SHORTEST
        spans = list(pairwise(bounds))
        cuts = [work.trace.live(bound) for bound in bounds[1:-1]]
        return cls(
            [max(sum(forward[start:stop]) * work.mean_size, least) for start, stop in spans],
            [max(sum(backward[start:stop]) * work.mean_size, least) for start, stop in spans],
            [0, *(_bytes(work, cut) for cut in cuts)],
            [0, *(_bytes(work, work.returned.intersection(cut)) for cut in cuts)],
            1 / speed if speed else None,
            work.passes is not None,
        )


def _bytes(work: Work, outputs: Iterable[tuple[int, int]]) -> int:
    return sum(work.trace.calls[call].leaves[leaf].num_bytes for call, leaf in outputs)


def _stages(work: Work, bounds: tuple[int, ...], step: _Step, costs: _Costs) -> tuple[StageForecast, ...]:
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
        seconds = (costs.forward[stage], costs.backward[stage]) if costs.is_timed else (None, None)
        stages.append(
            StageForecast(
                calls[0].layer, calls[-1].layer, len(calls), parameters, flops, costs.received[stage],
                costs.returned[stage], weights, gradients, optimizer, saved, messages,
                max(work.recomputed[start:stop]), step.in_flight[stage], work.batch_bytes, step.bubbles[stage],
                *seconds,
            )
        )  # fmt: skip
    return tuple(stages)


def _held_for_backward(work: Work, start: int, stop: int, is_last: bool) -> tuple[int, int]:
    """Bytes saved by one micro-batch, and bytes of the inputs and outputs that are not among them."""
    saved: dict[int, int] = {}
    for place in work.saved[start : stop + is_last]:
        saved.update(place)
    messages = {  # what is handed on goes as soon as it is sent
        work.outputs[output]: work.trace.calls[output[0]].leaves[output[1]].num_bytes
        for output in (work.trace.live(start) if start else ())
        if work.outputs[output] not in saved
    }
    return sum(saved.values()), sum(messages.values())


@dataclass(frozen=True, slots=True)
class _Step:
    """Times in the unit of the costs."""

    makespan: float
    bubbles: list[float]
    in_flight: list[int]


def _transfers(options: Options, sizes: Sequence[int], seconds_each: float | None) -> list[float]:
    """What messages of these sizes take, in the unit of the costs; where nothing is sent, nothing."""
    if seconds_each is None:
        return [0.0] * len(sizes)
    per_byte = 1 / options.bytes_per_second if options.bytes_per_second else 0.0
    return [(options.latency + size * per_byte) / seconds_each if size else 0.0 for size in sizes]


def _step(options: Options, num_mbs: int, costs: _Costs) -> _Step:
    num = options.stages
    there, back = (_transfers(options, sizes, costs.seconds_each) for sizes in (costs.received, costs.returned))
    if 2 * num * num_mbs > _MANY and options.schedule in ticks.KNOWN:
        makespan = ticks.makespan(options.schedule, num_mbs, costs.forward, costs.backward, there, back)
        held = ticks.depths(options.schedule, num, num_mbs)
    else:
        schedule = build(options.schedule, num, num_mbs)
        if len(placement_of(schedule)) != num:
            raise ValueError(f"{options.schedule!r} has {len(placement_of(schedule))} stages on {num} ranks: a plan has"
                             " one stage per rank")  # fmt: skip
        pairs = {}
        for stage in range(1, num):
            pairs[stage - 1, stage], pairs[stage, stage - 1] = there[stage], back[stage]
        makespan = simulate(schedule, Costs(costs.forward, costs.backward, transfer=pairs)).makespan
        held = list(in_flight(schedule).values())
    work = [one + two for one, two in zip(costs.forward, costs.backward, strict=True)]
    return _Step(makespan, [1 - num_mbs * own / makespan for own in work], held)
