"""Draws schedules as text, and says what a reader would count in the drawing.

The grid is the one of the literature: a row per rank, a column per tick, as in figure 4 of "Efficient
Large-Scale Language Model Training on GPU Clusters" (Narayanan et al., 2021). CSV files are in ``csvfile``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .op import Kind, Op, has_backward
from .placement import placement_of
from .simulate import Costs, simulate

__all__: list[str] = []

UNIT_COSTS = Costs(forward=1.0, backward=1.0)
"""Every op takes one tick and messages none: what is drawn unless costs are given."""

_FUZZ = 1e-6
_FINEST = 8


def ticks(schedule: Mapping[int, Sequence[Op]], costs: Costs | None = None) -> dict[int, list[Op | None]]:
    """Cuts a simulated step into ticks.

    A tick is the largest time of which all op costs are multiples; where that would be less than an eighth of
    the cheapest op, it is the cheapest op, and starts and costs are rounded down.

    Args:
        schedule: Rank -> computations.
        costs: What ops and messages take. Default: each op one tick, messages nothing.

    Returns:
        Rank -> for each tick the op that runs in it, or None; all lists have one length.

    Raises:
        ValueError: If ``check`` refuses the schedule.
    """
    timeline = simulate(schedule, costs or UNIT_COSTS)
    tick = _tick([span.end - span.start for span in timeline.spans])
    rows: dict[int, list[Op | None]] = {rank: [] for rank in range(timeline.num_ranks)}
    for span in timeline.spans:
        row = rows[span.rank]
        row += [None] * (math.floor(span.start / tick + _FUZZ) - len(row))
        row += [span.op] * math.floor((span.end - span.start) / tick + _FUZZ)
    num_ticks = max(map(len, rows.values()))
    return {rank: row + [None] * (num_ticks - len(row)) for rank, row in rows.items()}


def _tick(costs: Sequence[float]) -> float:
    cheapest = min(costs)
    ratios = {Fraction(cost / cheapest).limit_denominator(_FINEST) for cost in costs}
    parts = math.lcm(*(ratio.denominator for ratio in ratios))
    return cheapest / parts if parts <= _FINEST else cheapest


def grid(schedule: Mapping[int, Sequence[Op]], costs: Costs | None = None, columns: int | None = None) -> str:
    """Draws a schedule, a row per rank and a column per tick (see ``ticks``).

    A cell is the kind and the micro-batch, ``F3``, or the whole op, ``2F3``, where a rank has several stages.
    ``.`` is an idle tick, ``-`` goes on with the op to its left.

    Args:
        schedule: Rank -> computations.
        costs: What ops and messages take. Default: each op one tick, messages nothing.
        columns: Most columns of a line; a longer grid goes on below, after an empty line. Default: as long as it is.

    >>> from lightning_pp.schedule import one_f_one_b
    >>> print(grid(one_f_one_b(2, 2)))
    tick     0  1  2  3  4  5
    rank 0 | F0 F1 .  B0 .  B1
    rank 1 | .  F0 B0 F1 B1 .

    Raises:
        ValueError: If ``check`` refuses the schedule.
    """
    rows = ticks(schedule, costs)
    full_names = len(placement_of(schedule)) > len(rows)
    num_ticks = len(rows[0])
    names = {op: str(op) if full_names else f"{op.kind.value}{op.mb}" for ops in schedule.values() for op in ops}
    width = 1 + max(len(str(num_ticks - 1)), *map(len, names.values()))
    label = len(f"rank {len(rows) - 1} |")
    table = [("tick".ljust(label), [f" {tick}".ljust(width) for tick in range(num_ticks)])]
    for rank, row in rows.items():
        cells = [_cell(op, row[tick - 1] if tick else None, names, width) for tick, op in enumerate(row)]
        table.append((f"rank {rank}".ljust(label - 1) + "|", cells))
    per_band = num_ticks if columns is None else max(1, (columns - label) // width)
    return "\n\n".join(
        "\n".join((head + "".join(cells[at : at + per_band])).rstrip() for head, cells in table)
        for at in range(0, num_ticks, per_band)
    )


def _cell(op: Op | None, before: Op | None, names: Mapping[Op, str], width: int) -> str:
    if op is None:
        return " .".ljust(width)
    return "-" * width if op == before else f" {names[op]}".ljust(width)


@dataclass(frozen=True, slots=True)
class Phases:
    """How many ops of a rank belong to each part of its program; the three add up to its length."""

    warm_up: int
    """Forwards before the first forward that a backward follows."""
    steady: int
    """Ops from there to the last such backward: one forward, one backward in turn in 1F1B."""
    cooldown: int
    """Ops after it: the backwards that are left."""


def phases(schedule: Mapping[int, Sequence[Op]]) -> dict[int, Phases]:
    """Counts the warm-up, steady and cooldown ops of every rank.

    A schedule without backward is steady throughout.

    >>> from lightning_pp.schedule import one_f_one_b
    >>> phases(one_f_one_b(4, 6))[1]
    Phases(warm_up=2, steady=8, cooldown=2)
    """
    return {rank: _phases(ops) for rank, ops in sorted(schedule.items())}


def _phases(ops: Sequence[Op]) -> Phases:
    forward = [op.kind is Kind.F for op in ops]
    pairs = [at for at in range(len(ops) - 1) if forward[at] and not forward[at + 1]]
    if not pairs:
        return Phases(0, len(ops), 0)
    return Phases(pairs[0], pairs[-1] + 2 - pairs[0], len(ops) - pairs[-1] - 2)


def held(
    schedule: Mapping[int, Sequence[Op]], rank: int, costs: Costs | None = None
) -> list[frozenset[tuple[int, int]]]:
    """Says whose activations a rank holds, tick by tick.

    An activation is held from the first tick of its F to the last tick of its B (or W), both included; the
    largest set is as large as ``in_flight`` says. A schedule without backward holds nothing.

    Args:
        schedule: Rank -> computations.
        rank: The rank to look at.
        costs: What ops and messages take. Default: each op one tick, messages nothing.

    Returns:
        For each tick of the grid, the (stage, micro-batch) pairs held during it.

    Raises:
        ValueError: If there is no such rank, or ``check`` refuses the schedule.
    """
    rows = ticks(schedule, costs)
    if rank not in rows:
        raise ValueError(f"there is no rank {rank}: the schedule has ranks 0 to {len(rows) - 1}")
    holding: set[tuple[int, int]] = set()
    sets: list[frozenset[tuple[int, int]]] = []
    row = rows[rank] if has_backward(schedule) else [None] * len(rows[rank])
    for op, following in zip(row, [*row[1:], None], strict=True):
        if op is not None and op.kind is Kind.F:
            holding.add((op.stage, op.mb))
        sets.append(frozenset(holding))
        if op is not None and op.kind in (Kind.B, Kind.W) and following != op:
            holding.discard((op.stage, op.mb))
    return sets
