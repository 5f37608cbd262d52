"""A rank's lowered program made ready to run: all that does not depend on the batch is looked up here, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pp.runtime.channel import Receiver, Sender
from lightning_pp.runtime.window import windows
from lightning_pp.schedule import Edge, Kind, Lowered, Op, edge_of, message_of

__all__: list[str] = []

Key = tuple[int, int]
"""``(stage, micro-batch)``."""

_TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})


@dataclass(frozen=True, slots=True)
class Task:
    """One op with what it touches.

    Attributes:
        op: The op.
        key: Its stage and micro-batch.
        message: What a transfer is called on its channel: ``(receiving stage, micro-batch)``.
        sender: The channel of a send.
        receiver: The channel of a receive.
        neighbour: Who takes the result of a computation, if a stage of this same rank does.
        is_last: Whether this is the last backward of its rank.
    """

    op: Op
    key: Key
    message: Key
    sender: Sender | None = None
    receiver: Receiver | None = None
    neighbour: Key | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does for one schedule.

    Attributes:
        tasks: In order.
        windows: ``(sender, how many messages may be under way)``.
        incoming: ``(receiver, kind of its edge, its messages in order)``.
        first_gradients: The first message of gradients over each cut that this rank has an end of.
    """

    tasks: tuple[Task, ...]
    windows: tuple[tuple[Sender, int], ...]
    incoming: tuple[tuple[Receiver, Kind, tuple[Key, ...]], ...]
    first_gradients: frozenset[Key]


def prepare(
    lowered: Lowered,
    rank: int,
    placement: Sequence[int],
    senders: Mapping[Edge, Sender],
    receivers: Mapping[Edge, Receiver],
) -> Program:
    """Make ``rank``'s program ready.

    Raises:
        ValueError: The schedule splits backwards into I and W.
    """
    check_executable(lowered)
    tasks = []
    backwards = [index for index, op in enumerate(lowered.programs[rank]) if op.kind is Kind.B]
    for index, op in enumerate(lowered.programs[rank]):
        if op.kind in _TRANSFERS:
            edge = edge_of(op, placement)
            sender = senders[edge] if op.kind in _SENDS else None
            receiver = None if op.kind in _SENDS else receivers[edge]
            tasks.append(Task(op, (op.stage, op.mb), message_of(op), sender, receiver))
        else:
            key = (op.stage, op.mb)
            is_last = backwards[-1:] == [index]
            tasks.append(Task(op, key, key, neighbour=_neighbour(op, placement), is_last=is_last))
    needed = windows(lowered)
    outgoing = tuple((senders[edge], needed[edge]) for edge in lowered.edges if edge.source == rank)
    incoming = tuple(
        (receivers[edge], edge.kind, messages) for edge, messages in lowered.edges.items() if edge.target == rank
    )
    return Program(tuple(tasks), outgoing, incoming, _first_gradients(lowered, rank))


def _first_gradients(lowered: Lowered, rank: int) -> frozenset[Key]:
    first: dict[int, Key] = {}
    for edge, messages in lowered.edges.items():
        if edge.kind is Kind.B and rank in (edge.source, edge.target):
            for message in messages:
                first.setdefault(message[0], message)
    return frozenset(first.values())


def check_executable(lowered: Lowered) -> None:
    """Refuse what cannot be executed yet.

    Raises:
        ValueError: The schedule splits backwards into I and W.
    """
    for rank, program in lowered.programs.items():
        split = next((op for op in program if op.kind in (Kind.I, Kind.W)), None)
        if split is not None:
            raise ValueError(
                f"The schedule splits the backward of stage {split.stage} ({split} on rank {rank}). Split backwards"
                " (I and W) can be drawn and simulated, but not executed in this version: use B in their place."
            )


def _neighbour(op: Op, placement: Sequence[int]) -> Key | None:
    other = op.stage + (1 if op.kind is Kind.F else -1)
    is_here = 0 <= other < len(placement) and placement[other] == placement[op.stage]
    return (other, op.mb) if is_here else None
