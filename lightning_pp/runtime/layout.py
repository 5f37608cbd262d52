"""What one stage does in a step of one signature: which layer calls it answers, which it computes, what it hands on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.partition.calls import Argument, Call, Trace, plain_value, stand_in_for
from lightning_pp.partition.plan import Segment
from lightning_pp.runtime.again import recomputed
from lightning_pp.runtime.reruns import ChangedStepError

__all__: list[str] = []

Output = tuple[int, int]
"""``(layer call, leaf of its output)``."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a stage goes about one layer call; all that is the same for every micro-batch.

    Attributes:
        layer: The layer's name.
        call: What the plan knows of the call.
        draws: Whether the layer draws random numbers.
        answer: The whole answer of an earlier layer of which nothing is needed; None where it takes more than that.
        received: The received tensor that is the whole answer of an earlier layer; None where there is none.
        is_recomputed: Whether the layer's activations are dropped and computed again.
        given: Those leaves of the output that are handed on.
        whole: The one tensor that is all of the output and is handed on; None where it is not that simple.
    """

    layer: str
    call: Call
    draws: bool
    answer: Tensor | None
    received: Output | None
    is_recomputed: bool
    given: tuple[int, ...]
    whole: Output | None


class Layout:
    """What one stage does in a step of one signature, prepared once.

    Args:
        trace: The step.
        segment: The stage's part of it.
        device: Where placeholders live.
        checkpointed: Names of layers whose activations are recomputed in the backward pass.
        absent: ``(dict, key)`` of parameters and buffers that glue touches and this process does not hold.
        trains: Whether the step computes gradients.

    Attributes:
        make_frame: What answers the layer calls of the next run; None for the ordinary frame.
    """

    def __init__(
        self,
        trace: Trace,
        segment: Segment,
        device: torch.device,
        checkpointed: frozenset[str] = frozenset(),
        absent: Sequence[tuple[dict[str, Any], str]] = (),
        trains: bool = False,
    ) -> None:
        self.trains = trains
        self.make_frame: Callable[[Layout, Any, list[Tensor]], Any] | None = None
        self.stand_ins = [(held, key, stand_in_for(held[key], device)) for held, key in absent]
        self.drawing = frozenset(call.layer for call in trace.calls if call.draws)
        self.own = frozenset(call.layer for call in trace.calls[segment.start : segment.stop])
        self.calls = trace.calls
        self.start = segment.start
        self.stop = segment.stop
        self.takes = segment.takes
        self.gives = segment.gives
        self.is_idle = segment.start == segment.stop < len(trace.calls) or (
            segment.start == segment.stop and bool(segment.gives)
        )
        self.checkpointed = checkpointed
        self._device = device
        self.placeholders = [self._placeholders(call) for call in self.calls[: self.start]]
        self.orders = [_tensor_order(call) for call in self.calls]
        self.rewritten = [_rewritten(call) for call in self.calls]
        self.ways = [self._way(index) for index in range(self.stop)]
        earlier = {call.layer for call in self.calls[: self.start]}
        counts = Counter(call.layer for call in self.calls[: self.stop])
        #: layers of which a checkpoint that calls them again may mean a call of an earlier stage, or another one
        self.repeated = frozenset(layer for layer in earlier if counts[layer] > 1) if trains else frozenset()

    def recomputing(self, layer: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """``compute``, with its activations dropped and computed again in the backward pass where that is wanted."""
        if layer not in self.checkpointed or not torch.is_grad_enabled():
            return compute
        return recomputed(compute)

    def stand_in(self) -> list[Tensor | None]:
        """Let glue use what this process does not hold; returns what :meth:`put_back` takes."""
        absent = [held[key] for held, key, _ in self.stand_ins]
        for held, key, stand_in in self.stand_ins:
            held[key] = stand_in
        return absent

    def put_back(self, absent: Sequence[Tensor | None]) -> None:
        """End what :meth:`stand_in` has begun."""
        for (held, key, _), tensor in zip(self.stand_ins, absent, strict=True):
            held[key] = tensor

    def call_of(self, layer: str) -> int:
        """The call of a layer that is called once, by an earlier stage."""
        return next(index for index, call in enumerate(self.calls) if call.layer == layer)

    def _way(self, index: int) -> Way:
        call = self.calls[index]
        takes = {leaf for taken, leaf in self.takes if taken == index}
        given = tuple(leaf for given, leaf in sorted(self.gives) if given == index)
        is_tensor = isinstance(call.structure, tree.Slot) and not call.writes
        is_kept = is_tensor and not call.leaves[0].written
        is_earlier = index < self.start
        return Way(
            call.layer,
            call,
            call.draws,
            answer=self.placeholders[index][0] if is_earlier and is_tensor and not takes else None,
            received=(index, 0) if is_earlier and is_kept and takes else None,
            is_recomputed=call.layer in self.checkpointed,
            given=given,
            whole=(index, 0) if is_kept and given == (0,) else None,
        )

    def placeholder(self, call: int, leaf: int) -> Tensor:
        """What stands for a layer output that nobody needs: as good as a real one for glue that only passes it on."""
        shared = self.placeholders[call][leaf]
        if shared is not None:
            return shared
        spec = self.calls[call].leaves[leaf]
        fresh = torch.full(spec.shape, plain_value(spec.dtype), dtype=spec.dtype, device=self._device)
        return self._like_computed(
            fresh, self.calls[call].layer
        ).clone()  # no leaf, so that it bears being written into

    def _placeholders(self, call: Call) -> list[Tensor | None]:
        """Shared tensors without memory; None where the step writes into them and needs real ones."""
        found: list[Tensor | None] = []
        for leaf in call.leaves[: len(call.leaves) - len(call.writes)]:
            value = torch.full((), plain_value(leaf.dtype), dtype=leaf.dtype, device=self._device)
            found.append(None if leaf.written else self._like_computed(value.expand(leaf.shape), call.layer))
        return found

    def _like_computed(self, tensor: Tensor, layer: str) -> Tensor:
        """Hooks and reentrant gradient checkpoints of the user ask for tensors that require gradients.

        None ever gets one, unless the step has come to use what its plan says nobody needs.
        """
        if self.trains and tensor.is_floating_point():
            tensor.requires_grad_().register_hook(partial(_refuse_use, layer))  # type: ignore[no-untyped-call]
        return tensor


def _refuse_use(layer: str, grad: Tensor | None) -> None:
    if grad is None:  # from a reentrant checkpoint on the way, through which nothing depended on it
        return
    raise ChangedStepError(
        f"The loss depends on the output of layer {layer!r} through code between the layers that did not use it when"
        " the step was planned. That code may depend on the shapes and plain values of the batch, but not on the epoch,"
        " the number of the step or of the batch, on counters, or on random numbers: use the value every time,"
        " multiplied by a factor that may be zero."
    )


def _tensor_order(call: Call) -> list[int | None]:
    """For each tensor of the layer's real output, its number in ``call.leaves``; None for a passed-through argument."""
    order: list[int | None] = []
    for leaf in tree.leaves(call.structure):
        if isinstance(leaf, tree.Slot):
            order.append(leaf.index)
        elif isinstance(leaf, Argument) and leaf.is_tensor:
            order.append(None)
    return order


def _rewritten(call: Call) -> list[tuple[int, int]]:
    """``(leaf of the call, leaf of its arguments)`` for each argument that the layer writes into."""
    return list(enumerate(call.writes, start=len(call.leaves) - len(call.writes)))
