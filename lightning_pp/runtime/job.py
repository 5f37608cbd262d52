"""What the engine is given: one batch to run, and what is known of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pp.runtime.channel import Message, Specs, gradient_specs
from lightning_pp.runtime.layout import Layout
from lightning_pp.schedule import Lowered

__all__: list[str] = []


class SignaturePlan:
    """What is known of micro-batches of one signature.

    Attributes:
        layouts: One per stage of this rank.
        specs: ``{receiving stage: what crosses into it}``, learnt from the first message.
        gradients: ``{receiving stage: what the gradients of that look like}``.
    """

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        self.layouts = layouts
        self.specs: dict[int, Specs] = {}
        self.gradients: dict[int, Specs] = {}

    def learn(self, stage: int, specs: Specs) -> None:
        """Remember what crosses into ``stage``."""
        self.specs[stage] = specs
        self.gradients[stage - 1] = gradient_specs(specs)


@dataclass
class Job:
    """One batch to run.

    Attributes:
        lowered: The schedule with its messages.
        step: ``step(mb)`` runs the user's step on micro-batch ``mb`` in its contexts and returns its result.
        loss_of: Takes the loss out of a result; None for a forward-only job.
        plans: One per micro-batch.
        scales: What each micro-batch's loss is multiplied by.
        loss_scaling: Multiplies a tensor by the present scale of a loss scaler; None where there is none.
        ending: Called before this rank's last backward.
        backward_done: Called after this rank's last backward, before its last messages.
        results: What the last stage's steps returned, by micro-batch.
    """

    lowered: Lowered
    step: Callable[[int], Any]
    plans: Sequence[SignaturePlan]
    loss_of: Callable[[Any], Tensor] | None = None
    scales: Sequence[float] = ()
    loss_scaling: Callable[[Tensor], Tensor] | None = None
    ending: Callable[[], None] | None = None
    backward_done: Callable[[], None] | None = None
    results: dict[int, Any] = field(default_factory=dict)
    _root_grads: dict[Any, Sequence[Tensor]] = field(default_factory=dict)

    def known(self, message: Message) -> Specs | None:
        """What is known by now of what crosses with a message of activations."""
        return self.plans[message[1]].specs.get(message[0])

    def learn(self, message: Message, specs: Specs) -> None:
        """Remember what a header has said of a message of activations."""
        self.plans[message[1]].learn(message[0], specs)

    def root_grad(self, mb: int, loss: Tensor) -> Tensor:
        """The gradient that the backward of ``loss``, of micro-batch ``mb``, begins with.

        Raises:
            ValueError: It is not a single number.
        """
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a single number; it has shape {list(loss.shape)}.")
        key = (loss.ndim, loss.dtype, loss.device)
        found = self._root_grads.get(key)
        if found is None:
            grads = torch.tensor(self.scales, dtype=loss.dtype, device=loss.device)
            if self.loss_scaling is not None:
                grads = self.loss_scaling(grads).to(loss.dtype)
            found = self._root_grads[key] = grads.view(-1, *loss.shape).unbind()
        return found[mb]
