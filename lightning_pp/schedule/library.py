"""The schedules of the package, each a function from sizes to ``{rank: [Op, ...]}``.

Sources: GPipe (Huang et al., 2019, figure 2c); 1F1B (Narayanan et al., "PipeDream", 2019, section 3.2, and
"Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2, where it is flushed). The
pictures show 4 ranks and 6 micro-batches with every op taking one tick; ``.`` is idle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from .check import check
from .csvfile import read_csv
from .op import Kind, Op, Schedule
from .placement import at_least_one

__all__: list[str] = []

AUTO = "auto_1f1b"
"""1F1B whose extra micro-batches in flight are chosen in a run, from measured times."""


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches.

        tick     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        rank 0 | F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  B0 B1 B2 B3 B4 B5
        rank 1 | .  F0 F1 F2 F3 F4 F5 .  .  .  .  B0 B1 B2 B3 B4 B5 .
        rank 2 | .  .  F0 F1 F2 F3 F4 F5 .  .  B0 B1 B2 B3 B4 B5 .  .
        rank 3 | .  .  .  F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5 .  .  .

    Every rank holds all M micro-batches at its peak. Bubble: (P-1)/(M+P-1), with P ranks.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return {
        rank: [Op(rank, kind, mb) for kind in (Kind.F, Kind.B) for mb in range(num_microbatches)]
        for rank in range(num_ranks)
    }


def one_f_one_b(num_ranks: int, num_microbatches: int, extra_in_flight: Sequence[int] | None = None) -> Schedule:
    """Rank k of P: P-k-1 warm-up forwards, then forward and backward in turn, then the other backwards.

        tick     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
        rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
        rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .

    Rank k holds exactly min(M, P-k) micro-batches at its peak. Bubble: (P-1)/(M+P-1), as GPipe.

    Args:
        num_ranks: P, the number of ranks, one stage each.
        num_microbatches: M, the number of micro-batches; any number from 1 on, less than P too.
        extra_in_flight: For each rank, how many more micro-batches it may hold, by as many more warm-up
            forwards; M is still the most. One extra on every rank before a slow link hides that link's
            transfers. Default: none.

    Raises:
        ValueError: If a size is below 1, or ``extra_in_flight`` has the wrong length, a negative entry, or
            lets a rank hold more than the rank before it, which could not feed it.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    extra = [0] * num_ranks if extra_in_flight is None else list(extra_in_flight)
    if len(extra) != num_ranks or any(number < 0 for number in extra):
        raise ValueError(f"extra_in_flight needs {num_ranks} numbers of at least 0, one per rank; got {extra}")
    depths = [min(num_microbatches, num_ranks - rank + extra[rank]) for rank in range(num_ranks)]
    for rank in range(1, num_ranks):
        if depths[rank] > depths[rank - 1]:
            raise ValueError(
                f"extra_in_flight={extra} lets rank {rank} hold {depths[rank]} micro-batches, but "
                f"rank {rank - 1} only {depths[rank - 1]}: it would wait forever. "
                f"Give rank {rank - 1} at least {extra[rank] - 1}"
            )
    return _alternating(depths, num_microbatches)


def eager_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with 2(P-k)-1 micro-batches in flight on rank k, so that transfers hide behind computation.

        tick     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        rank 0 | F0 F1 F2 F3 F4 F5 .  B0 .  B1 .  B2 .  B3 .  B4 .  B5
        rank 1 | .  F0 F1 F2 F3 F4 B0 F5 B1 .  B2 .  B3 .  B4 .  B5 .
        rank 2 | .  .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .  .
        rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .

    In 1F1B a micro-batch goes down and up again without slack, so each transfer delays the rank that waits
    for it, however asynchronous it is. Here every rank has one more forward per link to run meanwhile. Rank k
    holds exactly min(M, 2(P-k)-1) micro-batches at its peak. Bubble without transfers: (P-1)/(M+P-1), as
    1F1B.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return one_f_one_b(num_ranks, num_microbatches, [num_ranks - rank - 1 for rank in range(num_ranks)])


def _alternating(depths: Sequence[int], num_microbatches: int) -> Schedule:
    """Rank k: depths[k]-1 forwards, then F B pairs, then the other backwards; depths[k] in flight."""
    schedule: Schedule = {}
    for rank, depth in enumerate(depths):
        forwards = [Op(rank, Kind.F, mb) for mb in range(num_microbatches)]
        backwards = [Op(rank, Kind.B, mb) for mb in range(num_microbatches)]
        pairs = zip(forwards[depth - 1 :], backwards, strict=False)
        steady = [op for pair in pairs for op in pair]
        schedule[rank] = forwards[: depth - 1] + steady + backwards[num_microbatches - depth + 1 :]
    return schedule


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards alone, for evaluation, under any placement.

        tick     0  1  2  3  4  5  6  7  8
        rank 0 | F0 F1 F2 F3 F4 F5 .  .  .
        rank 1 | .  F0 F1 F2 F3 F4 F5 .  .
        rank 2 | .  .  F0 F1 F2 F3 F4 F5 .
        rank 3 | .  .  .  F0 F1 F2 F3 F4 F5

    With several stages on a rank, micro-batches go in groups as large as the number of ranks: a rank runs a
    group through one of its stages, then through the next.

    Args:
        placement: Stage -> rank, as ``linear``, ``looped``, ``v`` or ``placement_of`` give it.
        num_microbatches: Number of micro-batches, at least 1.

    Raises:
        ValueError: If the ranks of the placement are not 0, 1, ... without gaps.
    """
    at_least_one(num_microbatches=num_microbatches)
    ranks = sorted(set(placement))
    if not ranks or ranks != list(range(len(ranks))):
        raise ValueError(f"a placement names ranks 0, 1, ... without gaps; got {tuple(placement)}")
    group = len(ranks)
    schedule: Schedule = {rank: [] for rank in ranks}
    # The order (group, stage, micro-batch) puts each op after what it needs, on all ranks: no deadlock.
    for first in range(0, num_microbatches, group):
        for stage, rank in enumerate(placement):
            last = min(first + group, num_microbatches)
            schedule[rank] += [Op(stage, Kind.F, mb) for mb in range(first, last)]
    return schedule


def truncate(schedule: Mapping[int, Sequence[Op]], num_microbatches: int) -> Schedule:
    """Keeps the first micro-batches of a schedule.

    What is left is valid if the schedule was, because an op only ever waits for ops of its own micro-batch.

    Raises:
        ValueError: If ``num_microbatches`` is below 1 or more than the schedule has.
    """
    at_least_one(num_microbatches=num_microbatches)
    available = 1 + max((op.mb for ops in schedule.values() for op in ops), default=-1)
    if num_microbatches > available:
        raise ValueError(
            f"the schedule has {available} micro-batches, {num_microbatches} were asked for: use at most {available}"
        )
    return {rank: [op for op in ops if op.mb < num_microbatches] for rank, ops in schedule.items()}


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "eager_1f1b": eager_1f1b}
)
"""Name -> function from (number of ranks, number of micro-batches) to the schedule."""

_EXTRA = re.compile(r"1f1b\+(\d+(?:,\d+)*)")


def named(name: str) -> Callable[[int, int], Schedule] | None:
    """The function behind a name; None for what is none.

    Besides the keys of ``SCHEDULES`` there are ``"1f1b+2,1,0,0"``, which lets rank 0 hold two micro-batches more than
    1F1B does and rank 1 one, ``"1f1b+1"``, one more on every rank that can make use of it (that is ``eager_1f1b``
    from P-1 on), and ``"auto_1f1b"``, of which nothing but the beginning is known before a run: 1F1B.

    Example:
        >>> [str(op) for op in named("1f1b+1,0")(2, 3)[0]]
        ['0F0', '0F1', '0F2', '0B0', '0B1', '0B2']
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name == AUTO:
        return one_f_one_b
    found = _EXTRA.fullmatch(name)
    if found is None:
        return None
    numbers = [int(number) for number in found[1].split(",")]

    def with_extra(num_ranks: int, num_microbatches: int) -> Schedule:
        extra = numbers
        if len(numbers) == 1:
            extra = [min(numbers[0], num_ranks - rank - 1) for rank in range(num_ranks)]
        return one_f_one_b(num_ranks, num_microbatches, extra)

    return with_extra


def build(schedule: str | os.PathLike[str], num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes a schedule from its name, or from a CSV file.

    Args:
        schedule: A name (see :func:`named`), or the path of a CSV file with one row per rank. A file may have
            more micro-batches than asked for: the first ones are kept.
        num_ranks: Number of ranks.
        num_microbatches: Number of micro-batches.

    Raises:
        ValueError: If there is no such name or file, the file is not a valid schedule, or its sizes do not
            fit.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    name = os.fspath(schedule)
    make = named(name)
    if make is not None:
        return make(num_ranks, num_microbatches)
    if not os.path.isfile(name):
        raise ValueError(f"no schedule and no file is called {name!r}: use {', '.join(SCHEDULES)} or a CSV file")
    loaded = read_csv(name)
    if len(loaded) != num_ranks:
        raise ValueError(f"{name!r} has {len(loaded)} rows, one per rank, but there are {num_ranks} ranks")
    try:
        check(loaded)
        return truncate(loaded, num_microbatches)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
