"""The package's own schedules simulated for many ranks at once: the result of ``simulate``, in seconds for thousands.

In unit time each computation of these schedules has a tick of its own that can be written down, and depends on earlier
ticks only. So all ranks are advanced together, tick by tick, with the true costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

__all__: list[str] = []

KNOWN = ("gpipe", "1f1b", "eager_1f1b")


def depths(schedule: str, num_ranks: int, num_microbatches: int) -> list[int]:
    """The most micro-batches that each rank holds at once."""
    by_rank = {
        "gpipe": [num_microbatches] * num_ranks,
        "1f1b": [num_ranks - rank for rank in range(num_ranks)],
        "eager_1f1b": [2 * (num_ranks - rank) - 1 for rank in range(num_ranks)],
    }
    return [min(num_microbatches, most) for most in by_rank[schedule]]


def makespan(
    schedule: str,
    num_microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    transfer_back: Sequence[float] | None = None,
) -> float:
    """The time from the first start to the last end.

    Args:
        schedule: One of ``KNOWN``.
        num_microbatches: M.
        forward: Time of a forward, by rank.
        backward: Time of a backward, by rank.
        transfer: Time of an activation from rank k - 1 to rank k, by k; the first entry is not used.
        transfer_back: Time of a gradient from rank k to rank k - 1, by k; None for that of an activation.
    """
    num_ranks = len(forward)
    ranks = numpy.arange(num_ranks)
    costs = numpy.array(forward), numpy.array(backward)
    links = [numpy.array([*times, 0.0]) for times in (transfer, transfer if transfer_back is None else transfer_back)]
    # what comes from the rank before lies under the rank's own number, what comes from the one behind under one more
    arrival = numpy.zeros((2, num_ranks + 1, num_microbatches))
    free = numpy.zeros((2, num_ranks + 1))
    now = numpy.zeros(num_ranks)
    last = 2 * (num_microbatches + num_ranks - 1)
    for tick in range(last):
        for kind, found in enumerate(_microbatches(schedule, tick, num_microbatches, ranks)):
            at = ranks[found >= 0]
            mbs = found[at]
            source, target = at + kind, at + 1 - kind
            now[at] = numpy.maximum(now[at], arrival[kind, source, mbs]) + costs[kind][at]
            travel = numpy.maximum(now[at], free[kind, target]) + links[kind][target]
            arrival[kind, target, mbs] = free[kind, target] = travel
    return float(now.max())


def _microbatches(schedule: str, tick: int, number: int, ranks: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """For each rank the micro-batch whose forward, and the one whose backward, has this tick; -1 for none."""
    num_ranks = len(ranks)
    if schedule == "gpipe":
        forward = tick - ranks
        backward = tick - (number + num_ranks - 1) - (num_ranks - 1 - ranks)
        return _valid(forward, number), _valid(backward, number)
    depth = num_ranks - ranks if schedule == "1f1b" else 2 * (num_ranks - ranks) - 1
    since = tick - (2 * num_ranks - 1 - ranks)  # since the rank's first backward, which come at every other tick
    backward = numpy.where(since % 2 == 0, since // 2, -1)
    warm_up = numpy.where(tick - ranks < depth, tick - ranks, -1)
    steady = numpy.where((since % 2 == 1) & (since > 0), (since - 1) // 2 + depth, -1)
    forward = numpy.maximum(warm_up, steady)
    return _valid(forward, number), _valid(backward, number)


def _valid(mbs: numpy.ndarray, number: int) -> numpy.ndarray:
    return numpy.where((mbs >= 0) & (mbs < number), mbs, -1)
