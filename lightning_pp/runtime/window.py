"""How many messages may be under way on each edge, so that bounded sends cannot stop a schedule that could run.

A send is complete when the other end has posted the receive (Gloo and NCCL both meet there), so an edge on which the
sender waits for its oldest message once more than ``window`` are under way is a bounded buffer. Where one rank's
program sends many messages before it takes any, and its neighbour's waits to be taken from, small buffers deadlock
although the schedule is right: a rank that runs all its forwards first, beside one that alternates, is enough. No
constant suffices for every schedule, so the program is run on paper with bounded edges, and where it stops, the
smallest full window grows by one ("Bounded Scheduling of Process Networks", Parks 1995, section 4.2).

The paper run lets a receiver take a message only when its program wants it. A real one posts receives ahead, which
only makes room earlier; and a network of ranks that run fixed programs never stops for having more room. So what runs
to its end on paper does so in fact, whatever anything costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pp.schedule import Edge, Kind, Lowered, message_of

__all__: list[str] = []

#: the window of an edge that needs no more
WINDOW = 4

_SENDS = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}
_RECEIVES = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}


def windows(lowered: Lowered, at_least: int = WINDOW) -> dict[Edge, int]:
    """The smallest windows, of ``at_least`` messages, with which ``lowered`` runs to its end.

    Example:
        >>> from lightning_pp.schedule import lower, one_f_one_b
        >>> {str(edge): window for edge, window in windows(lower(one_f_one_b(2, 8)), at_least=1).items()}
        {'F:0->1': 1, 'B:1->0': 1}
    """
    network = _Network(lowered, at_least)
    while not network.advance():
        network.widen()
    return network.window


class _Network:
    """All ranks side by side, each as far as it can go."""

    def __init__(self, lowered: Lowered, at_least: int) -> None:
        self.window = dict.fromkeys(lowered.edges, at_least)
        self._sent = dict.fromkeys(lowered.edges, 0)
        self._taken = dict.fromkeys(lowered.edges, 0)
        self._ranks = {rank: self._run(steps) for rank, steps in _transfers(lowered).items()}
        self._full: dict[int, Edge | None] = dict.fromkeys(self._ranks)

    def advance(self) -> bool:
        """Let every rank run until none can; returns whether all are through."""
        moved = True
        while moved:
            before = sum(self._sent.values()) + sum(self._taken.values())
            finished = []
            for rank, run in self._ranks.items():
                try:
                    self._full[rank] = next(run)
                except StopIteration:
                    finished.append(rank)
            for rank in finished:
                del self._ranks[rank], self._full[rank]
            moved = bool(finished) or before != sum(self._sent.values()) + sum(self._taken.values())
        return not self._ranks

    def widen(self) -> None:
        """Make room on the smallest edge that holds a rank up."""
        full = [edge for edge in self._full.values() if edge is not None]
        assert full, "a checked schedule got stuck without a full edge"
        self.window[min(full, key=lambda edge: (self.window[edge], edge))] += 1

    def _run(self, steps: list[tuple[Edge, int, bool]]) -> Iterator[Edge | None]:
        """One rank; yields when it cannot go on: the full edge, or None for a message that has not been sent."""
        for edge, position, is_send in steps:
            if is_send:
                self._sent[edge] += 1
                while self._sent[edge] - self._taken[edge] > self.window[edge]:
                    yield edge
            else:
                while self._sent[edge] <= position:
                    yield None
                self._taken[edge] = max(self._taken[edge], position + 1)


def _transfers(lowered: Lowered) -> dict[int, list[tuple[Edge, int, bool]]]:
    """Rank -> its sends and receives as ``(edge, place in the edge's order, is it a send)``."""
    places = {
        (edge.kind, message): (edge, place)
        for edge, messages in lowered.edges.items()
        for place, message in enumerate(messages)
    }
    found: dict[int, list[tuple[Edge, int, bool]]] = {}
    for rank, program in lowered.programs.items():
        steps = found[rank] = []
        for op in program:
            kind = _SENDS.get(op.kind) or _RECEIVES.get(op.kind)
            if kind is not None:
                steps.append((*places[kind, message_of(op)], op.kind in _SENDS))
    return found
