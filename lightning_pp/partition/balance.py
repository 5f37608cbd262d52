"""Where to cut a row of layer calls so that the slowest stage is as fast as possible.

Exact dynamic programming over contiguous cuts: first the smallest possible cost of the largest stage, then, among the
cuts that reach it, the one with the fewest bytes crossing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

__all__: list[str] = []

#: relative slack within which two stage costs count as equal
_SLACK = 1e-9


def balanced_cut(
    num_calls: int,
    num_stages: int,
    stage_cost: Callable[[int, int, int], float],
    crossing: Sequence[float],
) -> tuple[int, ...]:
    """Cut ``num_calls`` calls into ``num_stages`` runs of at least one call each.

    Args:
        num_calls: Number of layer calls, at least ``num_stages``.
        num_stages: Number of stages.
        stage_cost: ``(stage, start, stop) -> cost`` of running calls ``start..stop-1`` as that stage, in any one unit.
        crossing: ``crossing[c]``: bytes that cross a cut in front of call ``c`` (length ``num_calls``).

    Returns:
        ``num_stages + 1`` call numbers, from 0 to ``num_calls``.

    Example:
        >>> costs = [4.0, 1.0, 1.0, 1.0, 1.0]
        >>> balanced_cut(5, 2, lambda stage, start, stop: sum(costs[start:stop]), [0] * 5)
        (0, 1, 5)
    """
    smallest_max = _best(num_calls, num_stages, stage_cost, lambda cut: 0.0, float("inf"), by_max=True)[0]
    limit = smallest_max * (1 + _SLACK)
    return _best(num_calls, num_stages, stage_cost, lambda cut: crossing[cut], limit, by_max=False)[1]


def _best(
    num_calls: int,
    num_stages: int,
    stage_cost: Callable[[int, int, int], float],
    crossing: Callable[[int], float],
    limit: float,
    by_max: bool,
) -> tuple[float, tuple[int, ...]]:
    cost = lru_cache(maxsize=None)(stage_cost)
    infinity = float("inf")
    best: list[tuple[float, tuple[int, ...]]] = [(infinity, ())] * (num_calls + 1)
    best[0] = (0.0, (0,))
    for stage in range(num_stages):
        row: list[tuple[float, tuple[int, ...]]] = [(infinity, ())] * (num_calls + 1)
        for stop in range(stage + 1, num_calls - (num_stages - stage - 1) + 1):
            for start in range(stage, stop):
                value, cuts = best[start]
                here = cost(stage, start, stop)
                if value == infinity or here > limit:
                    continue
                total = max(value, here) if by_max else value + (crossing(start) if start else 0.0)
                if total < row[stop][0]:
                    row[stop] = (total, (*cuts, stop))
        best = row
    return best[num_calls]
