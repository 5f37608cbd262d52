"""Channels: one per directed edge, messages in the order of the program, receives posted ahead, sends in flight.

A message is the list of tensors that crosses one cut for one micro-batch. Both ends know from the batch whether its
shapes are new; only then a header travels in front of it. So in the steady state nothing but data moves.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pp.runtime.comm import Peer, Pending

__all__: list[str] = []

#: receives posted ahead of the one being waited for
DEPTH = 2
#: sends that may be under way before the oldest is waited for
WINDOW = 4

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

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to transfer."""
        return 0 in self.shape


Specs = tuple[Spec, ...]


def gradient_specs(specs: Specs) -> Specs:
    """What the gradients of a message look like."""
    return tuple(Spec(spec.shape, spec.dtype, False) for spec in specs if spec.requires_grad)


class Sender:
    """The sending end of an edge."""

    def __init__(self, peer: Peer, header_peer: Peer) -> None:
        self._peer = peer
        self._header_peer = header_peer
        self._under_way: deque[Pending] = deque()

    def send_header(self, specs: Specs) -> None:
        """Tell the other end what the next message looks like."""
        text = json.dumps([[spec.shape, str(spec.dtype), spec.requires_grad] for spec in specs]).encode()
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._keep(self._header_peer.send(torch.tensor([body.numel()], dtype=torch.int64)))
        self._keep(self._header_peer.send(body))

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to send one message; returns before it has arrived."""
        for tensor in tensors:
            if tensor.numel():
                self._keep(self._peer.send(tensor))

    def _keep(self, pending: Pending) -> None:
        under_way = self._under_way
        under_way.append(pending)
        while under_way and (len(under_way) > WINDOW or under_way[0].is_done()):
            under_way.popleft().wait()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._under_way:
            self._under_way.popleft().wait()


class Receiver:
    """The receiving end of an edge."""

    def __init__(self, peer: Peer, header_peer: Peer) -> None:
        self._peer = peer
        self._header_peer = header_peer
        self._expected: deque[tuple[Any, Callable[[], Specs | None]]] = deque()
        self._posted: deque[tuple[Any, list[Pending | Tensor]]] = deque()
        self._early: dict[Any, list[Pending | Tensor]] = {}
        self._device = peer._device

    def expect(self, messages: Sequence[tuple[Any, Callable[[], Specs | None]]]) -> None:
        """Say what will come, in order: ``(key, what is known of its specs by then)``; starts to receive ahead."""
        self._expected.extend(messages)
        self._post(DEPTH)

    def take(self, key: Any, learn: Callable[[Specs], None]) -> list[Tensor]:
        """Wait for the message ``key``; ``learn`` is told the specs where a header came with it."""
        while key not in self._early:
            if not self._posted:
                self._post(1, learn)
            first, parts = self._posted.popleft()
            self._early[first] = parts
        parts = self._early.pop(key)
        tensors = [part if isinstance(part, Tensor) else part.wait() for part in parts]
        self._post(DEPTH)
        return tensors  # type: ignore[return-value]

    @property
    def num_waiting(self) -> int:
        """Messages that are posted or have come early: the buffers this edge holds."""
        return len(self._posted) + len(self._early)

    def _post(self, depth: int, learn: Callable[[Specs], None] | None = None) -> None:
        while self._expected and len(self._posted) < depth:
            key, known = self._expected[0]
            specs = known()
            if specs is None:
                if learn is None:
                    return
                specs = self._receive_header()
                learn(specs)
            self._expected.popleft()
            self._posted.append((key, [self._start(spec) for spec in specs]))

    def _start(self, spec: Spec) -> Pending | Tensor:
        if spec.is_empty:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return self._peer.receive(spec.shape, spec.dtype)

    def _receive_header(self) -> Specs:
        length = self._header_peer.receive((1,), torch.int64).wait()
        assert length is not None
        body = self._header_peer.receive((int(length.item()),), torch.uint8).wait()
        assert body is not None
        entries = json.loads(bytes(body.tolist()))
        return tuple(Spec(tuple(shape), _DTYPES[dtype], grad) for shape, dtype, grad in entries)
