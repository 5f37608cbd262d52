"""Proves that a schedule can run: everything once, nothing before what it needs, no deadlock.

A schedule is only lists, so a wrong one is easily written (a library once dropped micro-batch 0 from its 1F1B
lists). The proof is the direct one: run the ranks side by side, each as far as it can go, until all are
through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from .op import COMPUTE_KINDS, Kind, Op, has_backward, mark
from .placement import placement_of

__all__: list[str] = []

_Key = tuple[int, int]
_MAX_LINES = 16

_NEVER_WITH: dict[Kind, tuple[Kind, ...]] = {
    Kind.F: (Kind.F,),
    Kind.B: (Kind.B, Kind.I, Kind.W),
    Kind.I: (Kind.I, Kind.B),
    Kind.W: (Kind.W, Kind.B),
}


def check(schedule: Mapping[int, Sequence[Op]], forward_only: bool = False) -> None:
    """Raises if the schedule is not complete or cannot run to its end.

    Args:
        schedule: Rank -> computations.
        forward_only: Whether the schedule evaluates: then each stage runs F and nothing else. Otherwise each
            micro-batch of each stage needs F once, and B once or I and W once each.

    Raises:
        ValueError: Saying which op is wrong. Where the op stands in a program, the message holds that program
            with the op marked ``<-- here`` and what it waits for.
    """
    placement = placement_of(schedule)
    kinds = _kinds(schedule, forward_only)
    _check_complete(kinds, placement, forward_only)
    _Execution(schedule, placement, kinds).run()


def in_flight(schedule: Mapping[int, Sequence[Op]]) -> dict[int, int]:
    """Counts, per rank, the most micro-batches held at once for a backward that has not ended.

    A (stage, micro-batch) pair is in flight from the start of its F to the end of its B, or of its W. In a
    schedule without backward nothing is held, and every count is 0.

    Returns:
        Rank -> number of pairs. It depends on the order of the ops alone, not on what they cost.
    """
    training = has_backward(schedule)
    return {rank: _peak(ops) if training else 0 for rank, ops in sorted(schedule.items())}


def _peak(ops: Sequence[Op]) -> int:
    held = peak = 0
    for op in ops:
        held += (op.kind is Kind.F) - (op.kind in (Kind.B, Kind.W))
        peak = max(peak, held)
    return peak


def _kinds(schedule: Mapping[int, Sequence[Op]], forward_only: bool) -> dict[_Key, list[Kind]]:
    """Collects the kinds of every (stage, mb); refuses ops that have no place beside those before them."""
    kinds: dict[_Key, list[Kind]] = {}
    for rank in range(len(schedule)):
        for index, op in enumerate(schedule[rank]):
            if op.kind not in COMPUTE_KINDS:
                problem = "is a message; a schedule holds F, B, I and W only, and lower() adds the messages"
            elif op.stage < 0 or op.mb < 0:
                problem = "has a negative number; stages and micro-batches count from 0"
            elif forward_only and op.kind is not Kind.F:
                problem = "is a backward; a forward-only schedule holds F only"
            else:
                seen = kinds.setdefault((op.stage, op.mb), [])
                clash = [kind for kind in seen if kind in _NEVER_WITH[op.kind]]
                seen.append(op.kind)
                if not clash:
                    continue
                earlier = Op(op.stage, clash[0], op.mb)
                problem = f"comes after {earlier}; a stage runs F once, and B once or I and W once"
            raise ValueError(f"{op} on rank {rank} {problem}\nrank {rank}: {mark(schedule[rank], index)}")
    return kinds


def _check_complete(kinds: dict[_Key, list[Kind]], placement: Sequence[int], forward_only: bool) -> None:
    num_microbatches = 1 + max(mb for _, mb in kinds)
    if len(kinds) != num_microbatches * len(placement):
        missing = next(
            (stage, mb) for mb in range(num_microbatches) for stage in range(len(placement)) if (stage, mb) not in kinds
        )
        stage, mb = missing
        raise ValueError(
            f"stage {stage} (rank {placement[stage]}) has no op for micro-batch {mb}, but micro-batch "
            f"{num_microbatches - 1} occurs: every stage runs all of 0..{num_microbatches - 1}"
        )
    for (stage, mb), seen in sorted(kinds.items()):
        if Kind.F not in seen:
            raise ValueError(f"rank {placement[stage]} lacks {Op(stage, Kind.F, mb)}: every micro-batch needs F")
        if forward_only or Kind.B in seen or (Kind.I in seen and Kind.W in seen):
            continue
        half = Kind.W if Kind.I in seen else Kind.I if Kind.W in seen else Kind.B
        raise ValueError(
            f"rank {placement[stage]} lacks {Op(stage, half, mb)}: every micro-batch needs B, or I and W"
            + ("" if Kind.I in seen or Kind.W in seen else " (a schedule for evaluation is forward_only)")
        )


class _Execution:
    """Runs all ranks side by side without doing any work."""

    def __init__(
        self, schedule: Mapping[int, Sequence[Op]], placement: Sequence[int], kinds: dict[_Key, list[Kind]]
    ) -> None:
        self.schedule = schedule
        self.placement = placement
        self.kinds = kinds
        self.position = dict.fromkeys(schedule, 0)
        self.done: dict[Kind, set[_Key]] = {Kind.F: set(), Kind.B: set(), Kind.I: set(), Kind.W: set()}
        self.waiting: dict[tuple[Kind, _Key], int] = {}

    def run(self) -> None:
        ready = deque(range(len(self.schedule)))
        while ready:
            self._advance(ready.popleft(), ready)
        if any(self.position[rank] < len(ops) for rank, ops in self.schedule.items()):
            raise ValueError(self._report())

    def _advance(self, rank: int, ready: deque[int]) -> None:
        ops = self.schedule[rank]
        for index in range(self.position[rank], len(ops)):
            op = ops[index]
            self.position[rank] = index
            unmet = self._unmet(op)
            if unmet is not None:
                self.waiting[unmet] = rank
                return
            key = (op.stage, op.mb)
            for kind in (Kind.B, Kind.I) if op.kind is Kind.I else (op.kind,):
                self.done[kind].add(key)
                woken = self.waiting.pop((kind, key), None)
                if woken is not None:
                    ready.append(woken)
        self.position[rank] = len(ops)

    def _unmet(self, op: Op) -> tuple[Kind, _Key] | None:
        """Returns the first thing the op needs and lacks; B stands for B or I: a gradient to go on with."""
        key = (op.stage, op.mb)
        if op.kind is Kind.F:
            needs = [(Kind.F, (op.stage - 1, op.mb))] if op.stage else []
        elif op.kind is Kind.W:
            needs = [(Kind.I, key)]
        else:
            needs = [(Kind.F, key)]
            if op.stage + 1 < len(self.placement):
                needs.append((Kind.B, (op.stage + 1, op.mb)))
        return next((need for need in needs if need[1] not in self.done[need[0]]), None)

    def _wanted(self, rank: int) -> Op:
        """Returns the op the blocked rank waits for."""
        unmet = self._unmet(self.schedule[rank][self.position[rank]])
        assert unmet is not None
        kind, (stage, mb) = unmet
        if kind is Kind.B and Kind.I in self.kinds[stage, mb]:
            kind = Kind.I
        return Op(stage, kind, mb)

    def _report(self) -> str:
        blocked = [rank for rank in sorted(self.schedule) if self.position[rank] < len(self.schedule[rank])]
        rank, seen = blocked[0], set[int]()
        while rank not in seen:  # follow who waits for whom until it closes: that rank is part of the knot
            seen.add(rank)
            rank = self.placement[self._wanted(rank).stage]
        op, wanted = self.schedule[rank][self.position[rank]], self._wanted(rank)
        lines = [f"deadlock: {op} on rank {rank} waits for {wanted}, which comes later or waits itself"]
        order = [rank] + [other for other in blocked if other != rank]
        for other in order[:_MAX_LINES]:
            note = f"waits for {self._wanted(other)}"
            lines.append(f"rank {other}: {mark(self.schedule[other], self.position[other], note)}")
        if len(order) > _MAX_LINES:
            lines.append(f"... and {len(order) - _MAX_LINES} more ranks wait")
        return "\n".join(lines)
