"""Channels: one per directed edge, messages in the order of the program, receives posted ahead, sends in flight.

A message is the list of tensors that crosses one cut for one micro-batch. Both ends know from the batch whether its
shapes are new; only then a header travels in front of it. So in the steady state nothing but data moves.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pp.runtime.comm import Peer, PeerLost, Pending
from lightning_pp.runtime.window import WINDOW

__all__: list[str] = []

#: receives posted ahead of the one being waited for
DEPTH = 2
#: seconds of waiting in which there is time for other things
_IDLE = 1e-4

_DTYPES = {
    str(dtype): dtype
    for dtype in {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
}


@dataclass(frozen=True, slots=True)
class Spec:
    """What one tensor of a message is.

    Attributes:
        shape: Its sizes.
        dtype: Its type.
        requires_grad: Whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """The spec of ``tensor``."""
        return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def fits(self, tensor: Tensor) -> bool:
        """Whether this is what ``tensor`` is."""
        return tensor.shape == self.shape and tensor.dtype is self.dtype and tensor.requires_grad is self.requires_grad


Specs = tuple[Spec, ...]
Message = tuple[int, int]
"""``(receiving stage, micro-batch)``."""
Known = Callable[[Message], "Specs | None"]
"""What is known of a message's specs by now."""
Learn = Callable[[Message, Specs], None]
"""Told the specs that came as a header with a message."""


@dataclass(frozen=True, slots=True)
class Notes:
    """Small numbers that some messages bring with them in host memory.

    Attributes:
        messages: Those that have one.
        size: How many there are with one of them, whose specs are known; 0 for none.
        read: Told them, in the order of the messages and before any that follows is looked at.
    """

    messages: Collection[Message]
    size: Callable[[Message], int]
    read: Callable[[Message, list[int]], None]


NO_NOTES = Notes((), lambda message: 0, lambda message, note: None)


def gradient_specs(specs: Specs) -> Specs:
    """What the gradients of a message look like."""
    return tuple(Spec(spec.shape, spec.dtype, False) for spec in specs if spec.requires_grad)


@dataclass(frozen=True, slots=True)
class Label:
    """How an end of a channel speaks of it in errors.

    Attributes:
        carries: ``"activation"`` or ``"gradient"``.
        other: Global rank of the other end.
    """

    carries: str = "message"
    other: int = -1


class Sender:
    """The sending end of an edge.

    Attributes:
        window: Messages that may be under way before the oldest is waited for (see :mod:`.window`).
    """

    def __init__(self, peer: Peer, header_peer: Peer, label: Label | None = None) -> None:
        self.window = WINDOW
        self._peer = peer
        self._header_peer = header_peer
        self._label = label or Label()
        self._under_way: deque[tuple[Message, list[Pending]]] = deque()

    def send(
        self,
        message: Message,
        tensors: Sequence[Tensor],
        header: Specs | None = None,
        note: Sequence[int] | None = None,
    ) -> None:
        """Start to send one message, behind a header where its specs are news; returns before it has arrived."""
        parts = [] if header is None else self._send_header(header)
        if note is not None:
            parts.append(self._header_peer.send(torch.tensor(note, dtype=torch.uint8)))
        for tensor in tensors:
            if tensor.numel():
                parts.append(self._peer.send(tensor))
        if not parts:
            return
        under_way = self._under_way
        under_way.append((message, parts))
        if self._peer.tells_when_done:
            while under_way and all(part.is_done() for part in under_way[0][1]):
                self._wait()
        while len(under_way) > self.window:
            self._wait()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._under_way:
            self._wait()

    def _send_header(self, specs: Specs) -> list[Pending]:
        text = json.dumps([[spec.shape, str(spec.dtype), spec.requires_grad] for spec in specs]).encode()
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        length = torch.tensor([body.numel()], dtype=torch.int64)
        return [self._header_peer.send(length), self._header_peer.send(body)]

    def _wait(self) -> None:
        """Wait for the oldest message."""
        message, parts = self._under_way.popleft()
        start = time.monotonic()
        try:
            for part in parts:
                part.wait()
        except PeerLost as error:
            label, waited = self._label, time.monotonic() - start
            raise PeerLost(
                f"waited {waited:.1f} s for rank {label.other} to take the {label.carries} of micro-batch {message[1]}:"
                f" {error}"
            ) from error


class Intake:
    """What the receivers of one rank share.

    Attributes:
        buffers: Messages that are posted or have come early, at present.
        buffers_peak: Most that there were at once.
    """

    __slots__ = ("_receivers", "buffers", "buffers_peak")

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self.buffers = 0
        self.buffers_peak = 0
        self._receivers = receivers
        for receiver in receivers:
            receiver.intake = self

    def close(self) -> None:
        """Let go of the receivers; what was counted stays."""
        self._receivers = ()

    def post_ahead(self) -> None:
        """Let all post their next receives, as far as nothing has to be waited for."""
        for receiver in self._receivers:
            receiver.post_ahead()


class Receiver:
    """The receiving end of an edge.

    To post a receive takes the host as long as a small transfer, so that is best done while it waits anyway. Where it
    waits is much the same in every batch: each message is remembered that was there already when it was wanted.

    Attributes:
        intake: What it shares with the other receivers of its rank.
    """

    def __init__(self, peer: Peer, header_peer: Peer, label: Label | None = None) -> None:
        self._peer = peer
        self._header_peer = header_peer
        self._label = label or Label()
        self._expected: deque[Message] = deque()
        self._posted: deque[tuple[Message, list[Pending | Tensor], Pending | None]] = deque()
        self._early: dict[Message, list[Pending | Tensor]] = {}
        self._prompt: set[Message] = set()
        self.intake = Intake(())
        self._known: Known = lambda message: None
        self._learn: Learn | None = None
        self._notes = NO_NOTES

    def expect(
        self, messages: Sequence[Message], known: Known, learn: Learn | None = None, notes: Notes = NO_NOTES
    ) -> None:
        """Say what will come, in order, and start to receive ahead; all that was said before has been taken.

        Args:
            messages: The messages of one batch.
            known: What is known of a message; None says that it comes with a header.
            learn: Is told what a header says; None where no message has one.
            notes: Which messages have a note.
        """
        is_through = not (self._expected or self._posted or self._early)
        assert is_through, "the batch before has not been taken"
        self._known, self._learn, self._notes = known, learn, notes
        self._expected.extend(messages)
        self._post(DEPTH, may_wait=False)

    def take(self, message: Message) -> list[Tensor]:
        """Wait for ``message`` and for no other; one more is always posted meanwhile."""
        intake = self.intake
        start = time.monotonic()
        if message not in self._prompt:  # there will be time
            intake.post_ahead()
        try:
            parts = self._next(message)
            if not self._posted and self._expected:
                self._post(1, may_wait=False)
            tensors = [part if isinstance(part, Tensor) else part.wait() for part in parts]
        except PeerLost as error:
            label, waited = self._label, time.monotonic() - start
            raise PeerLost(
                f"waited {waited:.1f} s for the {label.carries} of micro-batch {message[1]} from rank {label.other}:"
                f" {error}"
            ) from error
        intake.buffers -= 1
        if time.monotonic() - start < _IDLE:
            self._prompt.add(message)
        else:
            self._prompt.discard(message)
        return tensors

    def post_ahead(self) -> None:
        """Post the next receives, as far as nothing has to be waited for."""
        self._post(DEPTH, may_wait=False)

    def _next(self, message: Message) -> list[Pending | Tensor]:
        """Go on to ``message``; what comes before it is kept."""
        if self._early and message in self._early:
            return self._early.pop(message)
        while True:
            if not self._posted:
                self._post(1, may_wait=True)
            first, parts, note = self._posted.popleft()
            if note is not None:
                self._notes.read(first, note.wait().tolist())
            if first == message:
                return parts
            self._early[first] = parts

    def _post(self, depth: int, may_wait: bool) -> None:
        """Post receives until ``depth`` are; one whose header is yet to come only if we ``may_wait`` for that."""
        while self._expected and len(self._posted) < depth:
            message = self._expected[0]
            specs = self._known(message)
            if specs is None:
                if not may_wait:
                    return
                assert self._learn is not None, f"no header was expected with {message}"
                specs = self._receive_header()
                self._learn(message, specs)
            self._expected.popleft()
            note = self._start_note(message) if message in self._notes.messages else None
            parts: list[Pending | Tensor] = []
            for spec in specs:
                if 0 in spec.shape:  # there is nothing to transfer
                    parts.append(torch.empty(spec.shape, dtype=spec.dtype, device=self._peer.device))
                else:
                    parts.append(self._peer.receive(spec.shape, spec.dtype))
            self._posted.append((message, parts, note))
            intake = self.intake
            intake.buffers += 1
            if intake.buffers > intake.buffers_peak:
                intake.buffers_peak = intake.buffers

    def _start_note(self, message: Message) -> Pending | None:
        size = self._notes.size(message)
        return self._header_peer.receive((size,), torch.uint8) if size else None

    def _receive_header(self) -> Specs:
        length = self._header_peer.receive((1,), torch.int64).wait()
        body = self._header_peer.receive((int(length.item()),), torch.uint8).wait()
        entries = json.loads(bytes(body.tolist()))
        return tuple(Spec(tuple(shape), _DTYPES[dtype], grad) for shape, dtype, grad in entries)
