"""The fewest stages that fit into a device, and enough micro-batches for a small bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_pp.planning.forecast import Forecast
from lightning_pp.planning.report import size
from lightning_pp.planning.work import Work

__all__: list[str] = []

#: ``(stages, microbatches, schedule) -> forecast``
Ask = Callable[[int, int, str], Forecast]

#: more micro-batches are not wanted once the bubble is as small as this
_SMALL_BUBBLE = 0.1
_MOST_PER_STAGE = 16


def choose(
    ask: Ask,
    work: Work,
    schedules: Sequence[str],
    memory: float,
    stages: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
    devices: int | None = None,
) -> tuple[list[Forecast], Forecast]:
    """Recommend how to run a model.

    Args:
        ask: Forecasts.
        work: A step of it.
        schedules: To choose from.
        memory: Bytes of a device.
        stages: Numbers of stages to choose from; None for all that there may be.
        microbatches: Numbers of micro-batches to choose from; None for multiples of the stages.
        devices: A number that the stages must divide.

    Returns:
        What was considered for the number of stages taken, and which one to take.

    Raises:
        ValueError: Nothing fits.
    """
    static = sum(tensor.weight + tensor.gradient + tensor.state for tensor in work.held)
    least: Forecast | None = None
    for number in stages or _stages(len(work.trace.calls), devices):
        if not stages and static / number > memory:
            continue
        counts = microbatches or _microbatches(number, work.batch_size)
        found = _considered(lambda mbs, p=number: [ask(p, mbs, name) for name in schedules], counts, memory)  # type: ignore[misc]
        fitting = [one for one in found if one.peak <= memory]
        if fitting:
            return found, _best(fitting)
        least = min([*found, *([least] if least else [])], key=lambda one: one.peak)
    if least is None:
        raise ValueError(
            f"weights, gradients and optimizer take {size(static)}, which no number of stages that the model's layers"
            f" and --devices allow brings down to {size(memory)} each"
        )
    raise ValueError(
        f"nothing fits in {size(memory)}: the least is {size(least.peak)}, with {len(least.stages)} stages,"
        f" {least.microbatches} micro-batches and schedule {least.schedule}; use smaller layers or samples, or"
        " another precision"
    )


def _considered(ask: Callable[[int], list[Forecast]], counts: Sequence[int], memory: float) -> list[Forecast]:
    """Forecasts for growing numbers of micro-batches until one is good; only the last, where that does not fit."""
    last = ask(counts[-1])
    if all(one.peak > memory for one in last):
        return last
    found: list[Forecast] = []
    for number in counts[:-1]:
        new = ask(number)
        found += new
        if any(_is_good(one, memory) for one in new):
            return found
    return found + last


def _is_good(one: Forecast, memory: float) -> bool:
    return one.peak <= memory and one.bubble <= _SMALL_BUBBLE


def _best(fitting: Sequence[Forecast]) -> Forecast:
    """The fewest micro-batches with a small bubble, or the smallest bubble; then the fastest, then the smallest."""
    small = [one for one in fitting if one.bubble <= _SMALL_BUBBLE]
    if small:
        fewest = min(one.microbatches for one in small)
        fitting = [one for one in small if one.microbatches == fewest]
    return min(fitting, key=lambda one: (round(one.bubble, 6), one.peak))


def _stages(most: int, devices: int | None) -> Iterator[int]:
    if devices is not None:
        yield from (number for number in range(1, min(most, devices) + 1) if devices % number == 0)
        return
    number = 1
    while number <= most:
        yield number
        number *= 2


def _microbatches(stages: int, batch_size: int) -> list[int]:
    """P, 2 P, 4 P, ... as far as the batch has samples, and a micro-batch for each sample."""
    factor, found = 1, []
    while factor <= _MOST_PER_STAGE and factor * stages <= batch_size:
        found.append(factor * stages)
        factor *= 2
    return found if found and found[-1] == batch_size else [*found, batch_size]
