"""Where the time of a step goes on each stage: a rank's shares of a step, and what all ranks' shares say together.

The span of a schedule runs from the first computation of any stage to the last one. A stage computes (forward,
backward) or is idle in it: before its first and after its last computation (the pipeline fills and drains), and
between them, when it waits for an activation or a gradient, or sends. The bubble fraction of a stage is its idle part
of the span, that of the pipeline the mean over stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from lightning_pp.runtime.events import StepRecord
from lightning_pp.schedule import Costs, Kind, Op, build, simulate

__all__: list[str] = []

#: what the simulator is given for a computation that took no time at all
_SHORTEST = 1e-9

_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.RECV_F: "activation_wait",
    Kind.RECV_B: "gradient_wait",
    Kind.SEND_F: "send",
    Kind.SEND_B: "send",
}

_AFTERWARDS = ("reduce", "optimizer", "share")


@dataclass(frozen=True, slots=True)
class Shares:
    """The times of one rank in one step, in seconds.

    Attributes:
        begin: When its first computation began, on its own clock.
        end: When its last one ended.
        forward: Spent in forward passes.
        backward: Spent in backward passes.
        activation_wait: Waited for activations, between its first and its last computation.
        gradient_wait: Waited for gradients, between them.
        send: Spent in sends, between them.
        reduce: Gradients over shared parameters and replicas.
        optimizer: The optimizer's step.
        share: Losses and logs go to all ranks; one that is done early waits here for the others.
        other: Everything else outside of the schedule: the batch is cut and planned, hooks.
        microbatches: How many there were.
    """

    begin: float
    end: float
    forward: float
    backward: float
    activation_wait: float
    gradient_wait: float
    send: float
    reduce: float
    optimizer: float
    share: float
    other: float
    microbatches: float

    @classmethod
    def of(cls, record: StepRecord) -> Shares:
        """Add up a record."""
        events = record.events
        computed = [index for index, event in enumerate(events) if isinstance(event.what, Op) and event.what.is_compute]
        first, last = computed[0], computed[-1]
        seconds = dict.fromkeys([*_NAMES.values(), *_AFTERWARDS, "other"], 0.0)
        for index, event in enumerate(events):
            if not isinstance(event.what, Op):
                name = event.what if event.what in _AFTERWARDS else "other"
                seconds[name] += event.seconds
            elif first <= index <= last:
                seconds[_NAMES[event.what.kind]] += event.seconds
        microbatches = sum(isinstance(event.what, Op) and event.what.kind is Kind.F for event in events)
        return cls(begin=events[first].start, end=events[last].stop, microbatches=float(microbatches), **seconds)

    @property
    def compute(self) -> float:
        """Spent in forward and backward passes."""
        return self.forward + self.backward

    def numbers(self) -> list[float]:
        """All fields, to be sent."""
        return list(astuple(self))


#: how many numbers :meth:`Shares.numbers` gives
NUM_NUMBERS = len(fields(Shares))

#: what is logged of a stage as it was measured, with ``_seconds`` behind it
_MEASURED = (*dict.fromkeys(_NAMES.values()), *_AFTERWARDS, "other")


def span_of(pipeline: Sequence[Shares], one_clock: bool) -> float:
    """The seconds from the first to the last computation of one pipeline.

    Args:
        pipeline: By stage.
        one_clock: Whether all stages' clocks agree. Where they do not, it is the longest span of a single stage:
            that of the first stage, which begins first, and ends last where gradients reach it.
    """
    if one_clock:
        return max(shares.end for shares in pipeline) - min(shares.begin for shares in pipeline)
    return max(shares.end - shares.begin for shares in pipeline)


def summary(pipelines: Sequence[Sequence[Shares]], schedule: str, one_clock: bool) -> dict[str, float]:
    """What is logged of a step.

    Args:
        pipelines: By replica and stage.
        schedule: As :func:`lightning_pp.schedule.build` takes it.
        one_clock: Whether the clocks of a pipeline's stages agree.
    """
    num_stages = len(pipelines[0])
    microbatches = max(round(pipeline[0].microbatches) for pipeline in pipelines)
    spans = [span_of(pipeline, one_clock) for pipeline in pipelines]
    values: dict[str, float] = {}
    for stage in range(num_stages):
        values |= _stage(stage, [pipeline[stage] for pipeline in pipelines], spans)
    bubbles = [values[f"pipeline/stage{stage}/bubble_fraction"] for stage in range(num_stages)]
    return {
        "pipeline/bubble_fraction": sum(bubbles) / num_stages,
        "pipeline/closed_form_bubble_fraction": closed_form(num_stages, microbatches),
        "pipeline/simulated_bubble_fraction": simulated(schedule, microbatches, means_of(pipelines)),
        "pipeline/span_seconds": sum(spans) / len(spans),
        **values,
    }


def _stage(stage: int, replicas: Sequence[Shares], spans: Sequence[float]) -> dict[str, float]:
    """One stage's values: means over replicas."""

    def mean(numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers)

    pairs = list(zip(replicas, spans, strict=True))
    found = {f"{name}_seconds": mean([getattr(shares, name) for shares in replicas]) for name in _MEASURED}
    found["fill_drain_seconds"] = mean([span - (shares.end - shares.begin) for shares, span in pairs])
    found["bubble_fraction"] = mean([max(0.0, 1 - shares.compute / span) if span else 0.0 for shares, span in pairs])
    return {f"pipeline/stage{stage}/{name}": value for name, value in found.items()}


def means_of(pipelines: Sequence[Sequence[Shares]]) -> dict[str, list[float]]:
    """The mean seconds of one ``"forward"`` and one ``"backward"`` of each stage, over micro-batches and replicas."""
    by_stage = list(zip(*pipelines, strict=True))
    return {
        name: [sum(getattr(s, name) / s.microbatches for s in replicas) / len(replicas) for replicas in by_stage]
        for name in ("forward", "backward")
    }


def closed_form(num_stages: int, microbatches: int) -> float:
    """The bubble of equal stages under 1F1B and GPipe: (P - 1) / (M + P - 1).

    >>> round(closed_form(4, 4), 4)
    0.4286
    """
    return (num_stages - 1) / (microbatches + num_stages - 1)


def simulated(schedule: str, microbatches: int, means: Mapping[str, Sequence[float]]) -> float:
    """The bubble that the schedule alone has, where computations take what they take and messages nothing.

    Args:
        schedule: As :func:`lightning_pp.schedule.build` takes it.
        microbatches: How many.
        means: ``"forward"`` and ``"backward"``: seconds per micro-batch, by stage.

    >>> round(simulated("1f1b", 4, {"forward": [1, 1, 1, 1], "backward": [2, 2, 2, 2]}), 4)
    0.4286
    """
    costs = {name: [max(seconds, _SHORTEST) for seconds in numbers] for name, numbers in means.items()}
    timeline = simulate(build(schedule, len(costs["forward"]), microbatches), Costs(**costs))  # type: ignore[arg-type]
    return max(0.0, timeline.bubble_fraction)
