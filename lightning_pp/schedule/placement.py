"""Which rank runs which stage: a placement is a tuple, stage -> rank.

The three shapes are those of the literature: one stage per rank (GPipe, Huang et al., 2019), stages going
round the ranks (interleaved, Narayanan et al., 2021, section 2.2) and down and up again (ZB-V, Qi et al.,
2023, section 6). A rank's stages are called its chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .op import Op

__all__: list[str] = []


def linear(num_ranks: int) -> tuple[int, ...]:
    """One stage per rank.

    >>> linear(4)
    (0, 1, 2, 3)
    """
    return looped(num_ranks, 1)


def looped(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """``num_chunks`` stages per rank; after the last rank the next stage is on rank 0 again.

    >>> looped(4, 2)
    (0, 1, 2, 3, 0, 1, 2, 3)
    """
    at_least_one(num_ranks=num_ranks, num_chunks=num_chunks)
    return tuple(range(num_ranks)) * num_chunks


def v(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """``num_chunks`` stages per rank; at either end the way turns round, so neighbours there share a rank.

    >>> v(4, 2)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    at_least_one(num_ranks=num_ranks, num_chunks=num_chunks)
    down = tuple(range(num_ranks))
    return tuple(rank for chunk in range(num_chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


def placement_of(schedule: Mapping[int, Sequence[Op]]) -> tuple[int, ...]:
    """Reads the placement off a schedule.

    Raises:
        ValueError: If ranks are not 0, 1, ... with at least one op each, a stage sits on two ranks, or a
            stage is missing.
    """
    if not schedule or set(schedule) != set(range(len(schedule))):
        raise ValueError(f"a schedule has ranks 0, 1, 2, ... without gaps; got {sorted(schedule)[:16]}")
    rank_of: dict[int, int] = {}
    for rank in range(len(schedule)):
        stages = {op.stage for op in schedule[rank]}
        if not stages:
            raise ValueError(f"rank {rank} of {len(schedule)} has no ops: give it at least one stage")
        for stage in sorted(stages):
            if rank_of.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on rank {rank_of[stage]} and on rank {rank}; it belongs on one")
    for expected, stage in enumerate(sorted(rank_of)):
        if stage != expected:
            raise ValueError(f"no rank runs stage {expected}, but rank {rank_of[stage]} runs stage {stage}")
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def at_least_one(**sizes: int) -> None:
    """Checks that sizes are whole numbers of at least 1.

    Raises:
        ValueError: Naming the first that is not.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
