"""What a rank did when in one step: the ops of its program, and what follows them, each from the end of the one before.

Off, it costs nothing. On, it takes one look at the clock per op. On a GPU the clock is the stream's: marks are events
that the device passes, and their times are read when the device has passed them, a step later; nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_pp.runtime.comm import Clock, Mark
from lightning_pp.schedule import Kind, Op

__all__: list[str] = []

#: steps that are kept until somebody reads them
_KEPT = 4

#: kinds of ops in which a rank waits for another
WAITS = frozenset({Kind.RECV_F, Kind.RECV_B, Kind.SEND_F, Kind.SEND_B})


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a rank.

    Attributes:
        what: An op (a receive is the time for which its message was waited for), or ``"prepare"`` (the batch is cut
            and planned), ``"reduce"`` (gradients over stages that share a parameter, and over replicas), ``"share"``
            (losses and logs go to all ranks), ``"hooks"`` (Lightning's and the user's, zero_grad included) or
            ``"optimizer"``.
        start: Seconds on this process's clock (see :class:`Clock`).
        stop: Seconds.
    """

    what: Op | str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        number: Of the batch, as ``trainer.fit_loop.total_batch_idx`` counts them.
        events: In order, without gaps: each begins where the one before has ended.
    """

    number: int
    events: tuple[Event, ...]

    @property
    def start(self) -> float:
        """Seconds on this process's clock."""
        return self.events[0].start

    @property
    def stop(self) -> float:
        """Seconds."""
        return self.events[-1].stop


class Recorder:
    """Records the steps of one rank.

    Args:
        clock: Of the device on which the rank computes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._number = 0
        self._open: list[tuple[Op | str, Mark]] | None = None
        self._done: deque[tuple[int, Sequence[tuple[Op | str, Mark]]]] = deque(maxlen=_KEPT)
        self._listeners: list[Callable[[StepRecord], None]] = []

    def subscribe(self, listener: Callable[[StepRecord], None]) -> None:
        """Let ``listener`` have every step."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[StepRecord], None]) -> bool:
        """Let ``listener`` have no more steps; returns whether anybody else listens."""
        self._listeners.remove(listener)
        return bool(self._listeners)

    def begin(self, number: int) -> None:
        """A step begins; one that was not ended is forgotten."""
        self._number = number
        self._open = [("begin", self._clock.mark())]

    def forget(self) -> None:
        """The step that has begun is not for the listeners."""
        self._open = None

    def mark(self, what: Op | str) -> None:
        """``what`` has ended; it began when what was marked before had ended."""
        if self._open is not None:
            self._open.append((what, self._clock.mark()))

    def end(self) -> None:
        """The step is over; those that the device has passed go to the listeners. May be called more than once."""
        if self._open is not None and len(self._open) > 1:
            self._done.append((self._number, self._open))
        self._open = None
        while self._done and self._clock.has_passed(self._done[0][1][-1][1]):
            record = self._read(*self._done.popleft())
            for listener in self._listeners:
                listener(record)

    def _read(self, number: int, marks: Sequence[tuple[Op | str, Mark]]) -> StepRecord:
        times = self._clock.seconds([mark for _, mark in marks])
        events = [Event(what, start, stop) for (what, _), start, stop in zip(marks[1:], times, times[1:], strict=False)]
        return StepRecord(number, tuple(events))
