"""How many more micro-batches than 1F1B each rank should hold, so that transfers hide behind computation.

In 1F1B a transfer delays the rank that waits for it, however asynchronous it is; with one more micro-batch in flight on
every rank before a link there is something to do meanwhile. More than that only costs memory. So the smallest numbers
are looked for with which the step is as short as with all that ``eager_1f1b`` holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .library import one_f_one_b
from .simulate import Costs, simulate

__all__: list[str] = []

#: what a step may take longer than the shortest, for less memory
_TOLERANCE = 0.003
#: micro-batches per rank beyond which a step only repeats itself
_ENOUGH = 4
#: ranks beyond which all get the same number: to try them one by one would take seconds
_MANY = 16


def extra_in_flight(num_ranks: int, num_microbatches: int, costs: Costs) -> list[int]:
    """The fewest extra micro-batches per rank that bring the step to its shortest, but for 0.3 %.

    Args:
        num_ranks: P, one stage each.
        num_microbatches: M.
        costs: What forwards, backwards and transfers take.

    Example:
        >>> extra_in_flight(4, 64, Costs(forward=1.0, backward=2.0))
        [0, 0, 0, 0]
        >>> slow = {(1, 2): 0.4, (2, 1): 0.4}
        >>> extra_in_flight(4, 64, Costs(forward=1.0, backward=2.0, transfer=slow))
        [1, 1, 0, 0]
    """
    number = min(num_microbatches, _ENOUGH * num_ranks)

    def step(extra: list[int]) -> float:
        return simulate(one_f_one_b(num_ranks, number, extra), costs).makespan

    def fits(before: list[int], after: list[int], number: int) -> bool:
        return step([*before, number, *after]) <= limit

    def level(most: int) -> list[int]:
        return [min(most, num_ranks - rank - 1) for rank in range(num_ranks)]

    limit = step(level(num_ranks - 1)) * (1 + _TOLERANCE)
    extra = level(_first(0, num_ranks - 1, lambda most: step(level(most)) <= limit))
    for rank in reversed(range(num_ranks if num_ranks <= _MANY else 0)):
        behind = extra[rank + 1] if rank + 1 < num_ranks else 0
        least = max(0, behind - 1)  # a rank that holds less than the next one could not feed it
        before, after = extra[:rank], extra[rank + 1 :]
        extra[rank] = _first(least, extra[rank], partial(fits, before, after))
    return extra


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number from ``low`` to ``high`` for which ``holds``, as it does for ``high`` and all above one."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
