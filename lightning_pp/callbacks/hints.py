"""Which setting would make the bubble smaller, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_pp.arguments import Arguments
from lightning_pp.callbacks.shares import simulated
from lightning_pp.schedule import named

__all__: list[str] = []

#: how much longer than the mean the slowest stage may take
_UNEQUAL = 1.2

#: the bubble from which on more micro-batches are proposed
_LARGE = 0.2

#: what a proposal must gain
_GAIN = 0.05


def hint(
    values: Mapping[str, float], means: Mapping[str, Sequence[float]], arguments: Arguments, microbatches: int
) -> str | None:
    """What to try; None where nothing stands out.

    Args:
        values: What was measured, by log key.
        means: ``"forward"`` and ``"backward"``: seconds per micro-batch, by stage.
        arguments: Of the strategy.
        microbatches: How many the step had.
    """
    times = [f + b for f, b in zip(means["forward"], means["backward"], strict=True)]
    mean = sum(times) / len(times)
    if not mean or len(times) == 1 or values["pipeline/bubble_fraction"] < _GAIN:
        return None
    slowest = max(range(len(times)), key=times.__getitem__)
    if times[slowest] >= _UNEQUAL * mean:
        return _balance(slowest, times[slowest] / mean, arguments)
    return _more_microbatches(values["pipeline/bubble_fraction"], means, arguments, microbatches)


def _balance(stage: int, ratio: float, arguments: Arguments) -> str:
    start = f"stage {stage} takes {ratio:.1f} times the mean of all stages, and the others wait for it:"
    if arguments.split is not None:
        return f"{start} move layers away from it in split=..., or leave `split` out and set balance='time'."
    if arguments.balance != "time":
        return f"{start} balance='time' cuts by what layers take on this device, split=[...] as you say."
    return f"{start} split=[...] moves the cuts by hand, and `layers` allows cuts inside of larger blocks."


def _more_microbatches(
    bubble: float, means: Mapping[str, Sequence[float]], arguments: Arguments, microbatches: int
) -> str | None:
    more = max(4 * len(means["forward"]), 2 * microbatches)
    is_named = named(arguments.schedule) is not None
    if bubble < _LARGE or not is_named:
        return None
    now, then = (simulated(arguments.schedule, count, means) for count in (microbatches, more))
    if now - then < _GAIN:
        return None
    is_set = microbatches >= arguments.num_microbatches(len(means["forward"]))
    setting = f"microbatches={more}" if is_set else f"a batch of {more} samples or more, cut into {more} micro-batches,"
    return (
        f"the bubble is {bubble:.0%} with {microbatches} micro-batches, of which the schedule explains {now:.0%}:"
        f" {setting} would make that {then:.0%}."
    )
