"""Holds the gradients a step has made until Lightning asks for them, and sums those of tied parameters.

Lightning calls training_step, then zero_grad, then backward. The pipeline has run its backward passes when
training_step returns, so what it made is taken out of ``.grad`` before zero_grad and put back in ``backward``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.runtime.average import GradientAverage
from lightning_pp.runtime.comm import all_reduce, losing_peers

__all__: list[str] = []


class GradientHold:
    """The gradients of one rank's parameters between two Lightning hooks.

    Args:
        parameters: The parameters this rank owns.
        tied: ``{index into parameters: group of the stages that own it}``.
        average: Sums over replicas; None for a single one.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        tied: Mapping[int, Any],
        average: GradientAverage | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._average = average
        self._averages = False
        self._is_whole = True
        self._tied = tuple(tied)
        self._by_group: dict[Any, list[int]] = {}
        for index, group in tied.items():
            self._by_group.setdefault(group, []).append(index)
        self._before: list[Tensor | None] | None = None
        self._held: list[Tensor | None] | None = None
        self._tied_before: dict[int, Tensor | None] = {}

    def start(self, window_start: bool, keep_old: bool, averages: bool = False, is_whole: bool = True) -> None:
        """Make ``.grad`` ready for the backward passes of one batch.

        Args:
            window_start: Whether this batch is the first of an accumulation window (zero_grad follows).
            keep_old: Whether user code looks at the old gradients in zero_grad; costs their memory meanwhile.
            averages: Whether the optimizer steps after this batch, so that replicas must agree.
            is_whole: Whether ``.grad`` holds all of the window after the backward passes; otherwise replicas agree when
                it has been handed over.
        """
        self._averages = averages and self._average is not None
        self._is_whole = is_whole
        self._before = None
        if window_start:
            if keep_old:
                self._before = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
        # a tied gradient is summed once, so what it holds already must not be in the sum
        self._tied_before = {index: self._parameters[index].grad for index in self._tied}
        for index in self._tied:
            self._parameters[index].grad = None

    def backward_done(self) -> None:
        """The last backward of this rank is done: begin to sum over replicas, as other stages still compute."""
        if self._average is not None and self._averages and self._is_whole:
            self._average.start()

    def finish(self, window_start: bool, keep: bool = True) -> None:
        """Sum tied gradients over their stages; at a window's start also take everything out of ``.grad``.

        Args:
            window_start: As for :meth:`start`.
            keep: Whether what has been taken out will be handed over.
        """
        for group, indices in self._by_group.items():
            self._sum_tied(group, [index for index in indices if self._parameters[index].requires_grad])
        for index, before in self._tied_before.items():
            if not self._parameters[index].requires_grad:
                self._parameters[index].grad = before
        self._tied_before = {}
        if self._average is not None and self._averages and self._is_whole:
            self._average.finish()
        if window_start:
            self._held = [parameter.grad for parameter in self._parameters] if keep else None
            before_all = self._before or [None] * len(self._parameters)
            for parameter, old in zip(self._parameters, before_all, strict=True):
                parameter.grad = old
            self._before = None

    def _sum_tied(self, group: Any, indices: Sequence[int]) -> None:
        """Sum what the members of ``group`` have; what none of them has a gradient for keeps none."""
        if not indices:
            return
        parameters = [self._parameters[index] for index in indices]
        counts = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        with losing_peers():
            counting = group.allreduce([counts])  # is under way together with the gradients
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        for grad in grads:
            all_reduce(group, grad)
        with losing_peers():
            counting.wait()
        # a rank that has a gradient knows the answer; only one without has to look
        all_here = all(parameter.grad is not None for parameter in parameters)
        wanted = [True] * len(parameters) if all_here else (counts > 0).tolist()
        for index, parameter, grad, is_wanted in zip(indices, parameters, grads, wanted, strict=True):
            before = self._tied_before[index]
            if is_wanted:
                parameter.grad = grad if before is None else before.add_(grad)
            else:
                parameter.grad = before

    def hand_over(self) -> None:
        """Put what was held into ``.grad``, on top of what is there."""
        if self._held is not None:
            for parameter, new in zip(self._parameters, self._held, strict=True):
                if new is not None:
                    parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)
            self._held = None
        if self._average is not None and self._averages and not self._is_whole:
            self._average.start()
            self._average.finish()
        self._averages = False
