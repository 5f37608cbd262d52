"""What comes back over the cuts of one batch: the gradients of what crossed them, or word that there are none.

Code behind a cut may detach what crossed it, for good or every other time. The plain run then has no gradient above the
cut, which is not the same as zeros: an optimizer leaves alone what has none, and lets weights decay and momentum go on
where it is zero. Only the backward pass itself knows, so a *note* in host memory, posted ahead like any other message,
goes with the first gradients of each batch over each cut. Where it says that all are there, nothing but gradients moves
for the rest of the batch: what one micro-batch then lacks is zeros, beside gradients that others have. Otherwise each
message that follows has a header, and only the gradients that are there travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from lightning_pp.runtime.channel import Message, Notes, Spec, Specs
from lightning_pp.runtime.job import SignaturePlan

__all__: list[str] = []

_Root = TypeVar("_Root")

#: travels in place of a gradient that is not there: no tensor of whole truth values has one
_NONE = Spec((0,), torch.bool, False)


@dataclass(slots=True)
class Outgoing:
    """One message of gradients, for :meth:`.Sender.send`."""

    tensors: list[Tensor]
    header: Specs | None
    note: list[int] | None


class Returns:
    """One batch's gradients over all cuts of this rank, at either end.

    Args:
        plans: One per micro-batch.
        firsts: The first message over each cut.
    """

    def __init__(self, plans: Sequence[SignaturePlan], firsts: frozenset[Message]) -> None:
        self._plans = plans
        self._firsts = firsts
        self._lacking: dict[int, bool] = {}
        self._came: dict[Message, list[int]] = {}

    @property
    def notes(self) -> Notes:
        """For the receivers of gradients."""
        return Notes(self._firsts, self._note_size, self._read)

    def known(self, message: Message) -> Specs | None:
        """What is known of a message by now: nothing before its activation was sent, or where it has a header."""
        stage, mb = message
        specs = self._plans[mb].gradients.get(stage)
        is_sure = message in self._firsts or not specs or self._lacking.get(stage) is False
        return specs if is_sure else None

    def learn(self, message: Message, specs: Specs) -> None:
        """A header holds for its own message alone."""

    def outgoing(self, message: Message, received: Sequence[Tensor], gradients: list[Tensor | None]) -> Outgoing:
        """Make a message of ``gradients``, those of what was ``received``."""
        stage, note = message[0], None
        if message not in self._firsts and not self._lacking[stage] and are_there(gradients):
            return Outgoing(gradients, None, None)
        if message in self._firsts:
            note = [int(gradient is not None) for gradient in gradients]
            self._lacking[stage] = not all(note)
        elif gradients and self._lacking[stage]:
            there = [torch.empty(0, dtype=torch.bool) if gradient is None else gradient for gradient in gradients]
            return Outgoing(there, tuple(_NONE if g.dtype is torch.bool else _spec(g) for g in there), None)
        whole = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(received, gradients, strict=True)
        ]
        return Outgoing(whole, None, note or None)

    def incoming(self, message: Message, tensors: list[Tensor]) -> list[Tensor | None]:
        """The gradients that have come, None where there is none."""
        if message not in self._firsts and not self._lacking.get(message[0]):
            return [*tensors]
        note = self._came.pop(message, None) or [tensor.dtype is not torch.bool for tensor in tensors]
        return [tensor if is_there else None for tensor, is_there in zip(tensors, note, strict=True)]

    def _note_size(self, message: Message) -> int:
        return len(self._plans[message[1]].gradients[message[0]])

    def _read(self, message: Message, note: list[int]) -> None:
        self._came[message] = note
        self._lacking[message[0]] = not all(note)


def are_there(gradients: list[Tensor | None]) -> TypeGuard[list[Tensor]]:
    """Whether none is lacking."""
    for gradient in gradients:  # noqa: SIM110 - for every message, in half the time of a generator
        if gradient is None:
            return False
    return True


def there(roots: list[_Root], gradients: list[Tensor | None]) -> tuple[list[_Root], list[Tensor]]:
    """Those of ``roots`` for which a gradient has come, and the gradients."""
    if are_there(gradients):
        return roots, gradients
    pairs = [(root, grad) for root, grad in zip(roots, gradients, strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]


def _spec(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.dtype, False)
