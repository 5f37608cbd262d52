"""Adds the messages to a schedule and fixes their order: what a rank executes is a lowered program.

A schedule says only what is computed. Where neighbouring stages sit on different ranks, their results travel
on one channel per direction and kind, so that activations and gradients never wait for each other, and on
each channel in one order that both ends read off the same data. Separating schedules from communication
follows "Zero Bubble Pipeline Parallelism" (Qi et al., 2023, section 4) and torch's ``_add_send_recv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .check import check
from .op import Kind, Op, has_backward
from .placement import placement_of

__all__: list[str] = []

Message = tuple[int, int]
"""A message on a known edge: (receiving stage, micro-batch)."""


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """One channel: all messages of one kind from one rank to another."""

    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    kind: Kind
    """``F`` for activations, ``B`` for gradients."""

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.source}->{self.target}"


@dataclass(frozen=True)
class Lowered:
    """A schedule with its messages."""

    programs: dict[int, tuple[Op, ...]]
    """Rank -> everything it does, in order: computations, sends, receives."""
    edges: dict[Edge, tuple[Message, ...]]
    """Edge -> its messages in sending order, each named by (receiving stage, micro-batch)."""


def lower(schedule: Mapping[int, Sequence[Op]]) -> Lowered:
    """Adds sends and receives to a schedule, after checking it.

    A result is sent right after the op that made it and received right before the op that needs it; nothing
    is sent between stages of one rank. A schedule without backward is lowered for evaluation.

    >>> F0, B0, F1, B1 = (Op.parse(text) for text in ("0F0", "0B0", "1F0", "1B0"))
    >>> print(*lower({0: [F0, B0], 1: [F1, B1]}).programs[0])
    0F0 0SEND_F0 0RECV_B0 0B0

    Raises:
        ValueError: If ``check`` refuses the schedule.
    """
    check(schedule, forward_only=not has_backward(schedule))
    placement = placement_of(schedule)
    programs: dict[int, tuple[Op, ...]] = {}
    for rank in range(len(schedule)):
        program: list[Op] = []
        for op in schedule[rank]:
            before, after = _messages(op, placement)
            program += [message for message in (before, op, after) if message is not None]
        programs[rank] = tuple(program)
    return Lowered(programs, _edges(programs, placement))


def _edges(programs: Mapping[int, Sequence[Op]], placement: Sequence[int]) -> dict[Edge, tuple[Message, ...]]:
    """Reads the order of every edge off the sends."""
    orders: dict[Edge, list[Message]] = {}
    order_of: dict[tuple[Kind, int], list[Message]] = {}  # the same lists by (kind, sending stage): quicker to find
    for program in programs.values():
        for op in program:
            if op.kind is not Kind.SEND_F and op.kind is not Kind.SEND_B:
                continue
            if (op.kind, op.stage) not in order_of:
                order_of[op.kind, op.stage] = orders.setdefault(edge_of(op, placement), [])
            order_of[op.kind, op.stage].append(message_of(op))
    return {edge: tuple(orders[edge]) for edge in sorted(orders)}


def _messages(op: Op, placement: Sequence[int]) -> tuple[Op | None, Op | None]:
    """Returns the receive before an op and the send after it, None where there is none."""
    if op.kind is Kind.W:
        return None, None
    towards_end = op.kind is Kind.F
    receive, send = (Kind.RECV_F, Kind.SEND_F) if towards_end else (Kind.RECV_B, Kind.SEND_B)
    step = 1 if towards_end else -1
    before = Op(op.stage, receive, op.mb) if _remote(op.stage, op.stage - step, placement) else None
    after = Op(op.stage, send, op.mb) if _remote(op.stage, op.stage + step, placement) else None
    return before, after


def _remote(stage: int, neighbour: int, placement: Sequence[int]) -> bool:
    return 0 <= neighbour < len(placement) and placement[neighbour] != placement[stage]


def message_of(op: Op) -> Message:
    """Names the message that a send or a receive moves: (receiving stage, micro-batch).

    >>> message_of(Op.parse("2SEND_F3")) == message_of(Op.parse("3RECV_F3")) == (3, 3)
    True
    """
    if op.kind is Kind.SEND_F:
        return op.stage + 1, op.mb
    return op.stage - (op.kind is Kind.SEND_B), op.mb


def edge_of(op: Op, placement: Sequence[int]) -> Edge:
    """Returns the edge that a send or a receive uses.

    >>> print(edge_of(Op.parse("2SEND_B3"), (0, 1, 2, 3)))
    B:2->1
    """
    here = placement[op.stage]
    if op.kind is Kind.SEND_F:
        return Edge(here, placement[op.stage + 1], Kind.F)
    if op.kind is Kind.RECV_F:
        return Edge(placement[op.stage - 1], here, Kind.F)
    if op.kind is Kind.SEND_B:
        return Edge(here, placement[op.stage - 1], Kind.B)
    assert op.kind is Kind.RECV_B, f"{op} is not a message"
    return Edge(placement[op.stage + 1], here, Kind.B)


def max_held(lowered: Lowered) -> dict[Edge, int]:
    """Counts, per edge, the most messages its receiver has to hold at once.

    Messages arrive in the order in which they are sent. A receiver that wants them in that order holds one,
    the one it is about to use; one that wants a later message first has to keep those that come before it.

    Returns:
        Edge -> number of messages, at least 1. It is 1 everywhere for the schedules of this package.
    """
    sent = {(edge.kind, message): i for edge, order in lowered.edges.items() for i, message in enumerate(order)}
    edge_by_message = {(edge.kind, message): edge for edge, order in lowered.edges.items() for message in order}
    arrived, used, peak = (dict.fromkeys(lowered.edges, 0) for _ in range(3))
    for program in lowered.programs.values():
        for op in program:
            if op.kind not in (Kind.RECV_F, Kind.RECV_B):
                continue
            key = (Kind.F if op.kind is Kind.RECV_F else Kind.B, message_of(op))
            edge = edge_by_message[key]
            arrived[edge] = max(arrived[edge], sent[key] + 1)
            peak[edge] = max(peak[edge], arrived[edge] - used[edge])
            used[edge] += 1
    return peak
