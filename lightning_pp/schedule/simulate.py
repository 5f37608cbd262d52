"""Predicts when each op of a schedule runs, for given costs: step time and bubble before any step is run.

Two ways of moving messages are modelled. Overlapped: a message leaves when its op ends, travels while both
ranks compute, and messages of one edge follow one another. Waited: a rank posts all messages between two
computations together and computes on when they are through, which is how blocking pipelines exchange with
``batch_isend_irecv``. The bubble is the one of "Efficient Large-Scale Language Model Training on GPU
Clusters" (Narayanan et al., 2021, section 2.2), as a fraction of the whole step. Nothing here is random:
equal input gives equal output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .check import in_flight
from .lower import Edge, Lowered, edge_of, lower, message_of
from .op import Kind, Op
from .placement import placement_of

__all__: list[str] = []


@dataclass(frozen=True)
class Costs:
    """What ops and messages take, in any one unit (seconds, or multiples of a forward).

    A cost is one number for all stages or a sequence with one number per stage.

    >>> Costs(forward=[1, 3]).of(Op.parse("1F0")), Costs(input=1, weight=0.5).of(Op.parse("0B0"))
    (3, 1.5)
    """

    forward: float | Sequence[float] = 1.0
    """Time of F."""
    backward: float | Sequence[float] | None = None
    """Time of B. Default: ``input`` plus ``weight``."""
    input: float | Sequence[float] = 1.0
    """Time of I, the gradient of a stage's input."""
    weight: float | Sequence[float] = 1.0
    """Time of W, the gradients of a stage's weights."""
    transfer: float | Mapping[tuple[int, int], float] = 0.0
    """Time of a message, one number or (source stage, target stage) -> number. Pairs left out cost nothing;
    activations use (s, s + 1), gradients (s + 1, s). Stages of one rank exchange nothing."""
    overlap: bool = True
    """Whether messages travel while ranks compute; False: both ends wait for each
    transfer. Then a rank also waits for its neighbour to get there, so that a schedule with extra
    micro-batches in flight is slow or deadlocks."""

    def of(self, op: Op) -> float:
        """Returns what an op costs; the only place where that is decided.

        Raises:
            ValueError: If a cost has no entry for the op's stage, or is not a finite number above 0 (for a
                message: of at least 0).
        """
        if op.kind is Kind.B and self.backward is None:
            return self.of(Op(op.stage, Kind.I, op.mb)) + self.of(Op(op.stage, Kind.W, op.mb))
        if not op.is_compute:
            return self._transfer(op)
        name = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input", Kind.W: "weight"}[op.kind]
        given = getattr(self, name)
        if isinstance(given, Sequence) and op.stage >= len(given):
            raise ValueError(f"costs: {name} has {len(given)} entries, but there is a stage {op.stage}: one per stage")
        cost: float = given[op.stage] if isinstance(given, Sequence) else given
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"costs: {name} of stage {op.stage} must be a finite number above 0, got {cost}")
        return cost

    def _transfer(self, op: Op) -> float:
        step = 1 if op.kind in (Kind.SEND_F, Kind.RECV_B) else -1
        sends = op.kind in (Kind.SEND_F, Kind.SEND_B)
        pair = (op.stage, op.stage + step) if sends else (op.stage + step, op.stage)
        cost = self.transfer.get(pair, 0.0) if isinstance(self.transfer, Mapping) else self.transfer
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs: transfer {pair[0]}->{pair[1]} must be a finite number of at least 0, got {cost}")
        return cost


@dataclass(frozen=True, slots=True)
class Span:
    """When one computation runs."""

    op: Op
    """The computation."""
    rank: int
    """The rank that runs it."""
    start: float
    """Start, in the unit of the costs, from 0 for the start of the step."""
    end: float
    """End."""


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    spans: tuple[Span, ...]
    """All computations, by rank and then by time."""
    num_ranks: int
    """Number of ranks."""
    makespan: float
    """Time from the first start to the last end, messages included, in the unit of the costs."""
    idle: dict[int, float]
    """Rank -> time in which it computes nothing."""
    in_flight: dict[int, int]
    """Rank -> the most micro-batches it holds at once (see ``in_flight``)."""

    @property
    def bubble_fractions(self) -> dict[int, float]:
        """Rank -> the part of the step in which it computes nothing, from 0 to 1."""
        return {rank: idle / self.makespan for rank, idle in self.idle.items()}

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which nothing is computed, from 0 to 1."""
        return sum(self.idle.values()) / (self.makespan * self.num_ranks)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Returns the spans of one rank, in time order."""
        return tuple(span for span in self.spans if span.rank == rank)


def simulate(schedule: Mapping[int, Sequence[Op]], costs: Costs | None = None) -> Timeline:
    """Runs a schedule on paper.

    Args:
        schedule: Rank -> computations.
        costs: What ops and messages take. Default: F 1, B 2, I 1, W 1, messages nothing.

    >>> from lightning_pp.schedule import one_f_one_b
    >>> timeline = simulate(one_f_one_b(4, 8))
    >>> timeline.makespan, round(timeline.bubble_fraction, 3), timeline.in_flight
    (33.0, 0.273, {0: 4, 1: 3, 2: 2, 3: 1})

    Raises:
        ValueError: If ``check`` refuses the schedule, a cost is missing or wrong, or waited messages
            (``overlap=False``) deadlock.
    """
    run = _Run(lower(schedule), placement_of(schedule), costs or Costs())
    run.run()
    makespan = max(run.now.values())
    idle = dict.fromkeys(run.now, makespan)
    for span in run.spans:
        idle[span.rank] -= span.end - span.start
    spans = tuple(sorted(run.spans, key=lambda span: (span.rank, span.start)))
    return Timeline(spans, len(run.now), makespan, idle, in_flight(schedule))


class _Run:
    """One clock per rank; a rank advances until it lacks a message, and the message's arrival wakes it.

    Ranks share nothing but messages, so the order in which they are advanced does not change any time.
    """

    def __init__(self, lowered: Lowered, placement: Sequence[int], costs: Costs) -> None:
        self.programs = lowered.programs
        self.placement = placement
        self.costs = costs
        self.spans: list[Span] = []
        self.now = dict.fromkeys(lowered.programs, 0.0)
        self.position = dict.fromkeys(lowered.programs, 0)
        self.links: dict[tuple[Kind, int], list[float]] = {}
        self.link_of_edge: dict[Edge, list[float]] = {edge: [0.0] for edge in lowered.edges}
        self.arrival: dict[tuple[bool, tuple[int, int]], float] = {}
        self.posted: dict[tuple[bool, tuple[int, int]], tuple[int, float]] = {}
        self.waiting: dict[tuple[bool, tuple[int, int]], list[int]] = {}
        self.ready = deque(lowered.programs)
        self.duration: dict[tuple[Kind, int], float] = {}

    def run(self) -> None:
        communicate = self._stream if self.costs.overlap else self._exchange
        while self.ready:
            rank = self.ready.popleft()
            program = self.programs[rank]
            while self.position[rank] < len(program):
                op = program[self.position[rank]]
                if op.is_compute:
                    self._compute(rank, op)
                elif not communicate(rank, op):
                    break
        self._assert_finished()

    def _cost(self, op: Op) -> float:
        key = (op.kind, op.stage)
        if key not in self.duration:
            self.duration[key] = self.costs.of(op)
        return self.duration[key]

    def _compute(self, rank: int, op: Op) -> None:
        start = self.now[rank]
        self.now[rank] = start + self._cost(op)
        self.spans.append(Span(op, rank, start, self.now[rank]))
        self.position[rank] += 1

    def _stream(self, rank: int, op: Op) -> bool:
        """Overlapped messages: a send costs its rank nothing, a receive waits for the arrival."""
        key = _key(op)
        if op.kind in (Kind.SEND_F, Kind.SEND_B):
            self._deliver(key, self.now[rank], op)
        elif key in self.arrival:
            self.now[rank] = max(self.now[rank], self.arrival.pop(key))
        else:
            self.waiting.setdefault(key, []).append(rank)
            return False
        self.position[rank] += 1
        return True

    def _link(self, op: Op) -> list[float]:
        """Returns a one-element list: when the op's edge is free again. All stages of an edge share it."""
        key = (op.kind, op.stage)
        if key not in self.links:
            self.links[key] = self.link_of_edge[edge_of(op, self.placement)]
        return self.links[key]

    def _deliver(self, key: tuple[bool, tuple[int, int]], time: float, op: Op) -> None:
        link = self._link(op)
        self.arrival[key] = link[0] = max(time, link[0]) + self._cost(op)
        self.ready.extend(self.waiting.pop(key, ()))

    def _exchange(self, rank: int, _: Op) -> bool:
        """Waited messages: all up to the next computation are posted together and waited for together."""
        program, first = self.programs[rank], self.position[rank]
        last = next((i for i in range(first, len(program)) if program[i].is_compute), len(program))
        group = program[first:last]
        for op in group:
            key = _key(op)
            other, time = self.posted.setdefault(key, (rank, self.now[rank]))
            if other != rank and key not in self.arrival:
                self._deliver(key, max(time, self.now[rank]), op)
        missing = [_key(op) for op in group if _key(op) not in self.arrival]
        if missing:
            self.waiting.setdefault(missing[0], []).append(rank)
            return False
        self.now[rank] = max([self.now[rank]] + [self.arrival[_key(op)] for op in group])
        self.position[rank] += len(group)
        return True

    def _assert_finished(self) -> None:
        stuck = {rank: at for rank, at in self.position.items() if at < len(self.programs[rank])}
        if not stuck:
            return
        assert not self.costs.overlap, f"a checked schedule got stuck at {stuck}"
        where = ", ".join(f"rank {rank} at {self.programs[rank][at]}" for rank, at in list(stuck.items())[:8])
        raise ValueError(f"with waited messages (overlap=False) this schedule deadlocks: {where}; use overlap=True")


def _key(op: Op) -> tuple[bool, tuple[int, int]]:
    """Names a message the same way at both ends: (is it an activation, (receiving stage, micro-batch))."""
    return op.kind in (Kind.SEND_F, Kind.RECV_F), message_of(op)
