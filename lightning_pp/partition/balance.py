"""Where to cut a row of layer calls so that the slowest stage is as fast as possible.

Exact dynamic programming over contiguous cuts: first the smallest possible cost of the largest stage, then, among the
cuts that reach it, the one with the fewest bytes crossing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__: list[str] = []

#: ``(stage, start, stop) -> cost``
StageCost = Callable[[int, int, int], float]

#: relative slack within which two stage costs count as equal
_SLACK = 1e-9


def balanced_cut(num_calls: int, num_stages: int, stage_cost: StageCost, crossing: Sequence[float]) -> tuple[int, ...]:
    """Cut ``num_calls`` calls into ``num_stages`` runs of at least one call each.

    Args:
        num_calls: Number of layer calls, at least ``num_stages``.
        num_stages: Number of stages.
        stage_cost: ``(stage, start, stop) -> cost`` of running calls ``start..stop-1`` as that stage, in any one unit.
            A run inside another one must not cost more than it.
        crossing: ``crossing[c]``: bytes that cross a cut in front of call ``c`` (length ``num_calls``).

    Returns:
        ``num_stages + 1`` call numbers, from 0 to ``num_calls``.

    Example:
        >>> costs = [4.0, 1.0, 1.0, 1.0, 1.0]
        >>> balanced_cut(5, 2, lambda stage, start, stop: sum(costs[start:stop]), [0] * 5)
        (0, 1, 5)
    """
    limit = _smallest_max(num_calls, num_stages, stage_cost) * (1 + _SLACK)
    return _fewest_bytes(num_calls, num_stages, stage_cost, crossing, limit)


def _stops(num_calls: int, num_stages: int, stage: int) -> range:
    """Where ``stage`` may end, so that the stages before and after it get a call each."""
    return range(stage + 1, num_calls - (num_stages - stage - 1) + 1)


def _smallest_max(num_calls: int, num_stages: int, stage_cost: StageCost) -> float:
    best = [math.inf] * (num_calls + 1)
    best[0] = 0.0
    for stage in range(num_stages):
        row = [math.inf] * (num_calls + 1)
        for stop in _stops(num_calls, num_stages, stage):
            smallest = math.inf
            for start in range(stop - 1, stage - 1, -1):
                here = stage_cost(stage, start, stop)
                if here >= smallest:
                    break  # a longer run costs no less
                smallest = min(smallest, max(best[start], here))
            row[stop] = smallest
        best = row
    return best[num_calls]


def _fewest_bytes(
    num_calls: int, num_stages: int, stage_cost: StageCost, crossing: Sequence[float], limit: float
) -> tuple[int, ...]:
    best = [math.inf] * (num_calls + 1)
    best[0] = 0.0
    starts: list[list[int]] = []
    for stage in range(num_stages):
        row, start_of = [math.inf] * (num_calls + 1), [0] * (num_calls + 1)
        for stop in _stops(num_calls, num_stages, stage):
            for start in range(stop - 1, stage - 1, -1):
                if stage_cost(stage, start, stop) > limit:
                    break
                total = best[start] + (crossing[start] if start else 0.0)
                if total <= row[stop] and total < math.inf:
                    row[stop], start_of[stop] = total, start
        best = row
        starts.append(start_of)
    bounds = [num_calls]
    for start_of in reversed(starts):
        bounds.append(start_of[bounds[-1]])
    return tuple(reversed(bounds))
