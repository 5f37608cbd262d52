"""One stage's run of the user's step: earlier layers are answered, own ones compute, the next stage's first ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.partition.calls import LEFT_OUT, Argument, Call, Trace, plain_value, rebuild, stand_in_for
from lightning_pp.partition.plan import Segment
from lightning_pp.partition.switch import Switchboard
from lightning_pp.runtime import rng
from lightning_pp.runtime.again import recomputed
from lightning_pp.runtime.reruns import ChangedStepError, Regions, Rerun

__all__: list[str] = []

Output = tuple[int, int]


class StageEnd(BaseException):
    """Leaves the user's step where the next stage begins; a BaseException so that ``except Exception`` lets it by."""


class Layout:
    """What one stage does in a step of one signature, prepared once.

    Args:
        trace: The step.
        segment: The stage's part of it.
        device: Where placeholders live.
        checkpointed: Names of layers whose activations are recomputed in the backward pass.
        absent: ``(dict, key)`` of parameters and buffers that glue touches and this process does not hold.
        trains: Whether the step computes gradients.
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
        self.answers = [self._answer(index) for index in range(self.start)]
        self.orders = [_tensor_order(call) for call in self.calls]
        given = frozenset(segment.gives)
        self.captured = [
            tuple(leaf for leaf in range(len(call.leaves)) if (index, leaf) in given)
            for index, call in enumerate(self.calls[: self.stop])
        ]
        self.rewritten = [_rewritten(call) for call in self.calls]
        self.is_plain = [
            isinstance(call.structure, tree.Slot) and given_on == (0,) and not (call.writes or call.leaves[0].written)
            for call, given_on in zip(self.calls, self.captured, strict=False)
        ]
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

    def put_back(self, absent: list[Tensor | None]) -> None:
        """End what :meth:`stand_in` has begun."""
        for (held, key, _), tensor in zip(self.stand_ins, absent, strict=True):
            held[key] = tensor

    def call_of(self, layer: str) -> int:
        """The call of a layer that is called once, by an earlier stage."""
        return next(index for index, call in enumerate(self.calls) if call.layer == layer)

    def _answer(self, index: int) -> Tensor | None:
        """The whole answer of an earlier layer of which nothing is needed; None where it takes more than that."""
        call = self.calls[index]
        is_needed = any(taken == index for taken, _ in self.takes)
        is_tensor = isinstance(call.structure, tree.Slot) and not call.writes
        return self.placeholders[index][0] if is_tensor and not is_needed else None

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


class Frame:
    """Answers the layer calls of one run of the step (see :data:`Handler`)."""

    __slots__ = ("_board", "_cursor", "_layout", "current", "regions", "values")

    def __init__(self, layout: Layout, board: Switchboard, received: list[Tensor]) -> None:
        self._layout = layout
        self._board = board
        self._cursor = 0
        self.current: str | None = None
        self.regions = Regions() if layout.repeated else None
        self.values: dict[Output, Tensor] = dict(zip(layout.takes, received, strict=True)) if received else {}

    def __call__(self, name: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, answer or end."""
        layout, index = self._layout, self._cursor
        if index >= len(layout.calls) or layout.calls[index].layer != name:
            raise self._changed(name)
        if index >= layout.stop:
            raise StageEnd
        self._cursor += 1
        if self.regions is not None:
            self.regions.note(index)
        call = layout.calls[index]
        seed = rng.layer_seed() if call.draws else None
        if index < layout.start:
            answer = layout.answers[index]
            if answer is None:
                return self._answer(index, call, args, kwargs)
            return answer.detach() if layout.trains and not torch.is_grad_enabled() else answer
        self.current = name
        result = self._compute(call, seed, compute, args, kwargs)
        self.current = None
        if layout.is_plain[index] and type(result) is Tensor:
            self.values[index, 0] = result
        elif layout.captured[index]:
            result = self._capture(index, call, args, kwargs, result)
        return result

    def end(self, result: object) -> None:
        """Say that the step has returned; complains about layers that it left out."""
        if self._cursor < self._layout.stop:
            error = self._changed(None)
            is_none = result is None and self._layout.trains
            raise ChangedStepError(f"{error} {LEFT_OUT}") if is_none else error

    def _compute(
        self, call: Call, seed: int | None, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        compute = self._layout.recomputing(call.layer, compute)
        board = self._board
        before, board.handler = board.handler, None  # a layer's own layers are its own
        try:
            if seed is None:
                return compute(*args, **kwargs)
            return rng.seeded(seed, compute, args, kwargs)
        finally:
            board.handler = before

    def _answer(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = []
        for leaf in range(len(self._layout.placeholders[index])):
            value = self.values.get((index, leaf))
            if value is not None:
                # what the user's code may write into must not be what is handed on
                tensors.append(value.clone() if call.leaves[leaf].written else value)
            else:
                tensors.append(self._layout.placeholder(index, leaf))
        if self._layout.trains and not torch.is_grad_enabled():
            # a reentrant checkpoint makes what leaves it its own; Stage.backward answers when it runs again
            tensors = [tensor.detach() for tensor in tensors]
        if isinstance(call.structure, tree.Slot) and not call.writes:
            return tensors[0]
        inputs = tree.leaves((args, kwargs))
        for leaf, position in self._layout.rewritten[index]:
            value = self.values.get((index, leaf))
            if value is not None:
                inputs[position].copy_(value)
        return rebuild(call.structure, tensors, inputs)

    def _capture(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        tensors, structure = tree.flatten(result)
        order = self._layout.orders[index]
        if len(tensors) != len(order):
            raise ChangedStepError(
                f"layer {call.layer!r} returned {len(tensors)} tensors where it was planned to return {len(order)}."
            )
        positions = {leaf: position for position, leaf in enumerate(order) if leaf is not None}
        rewritten = dict(self._layout.rewritten[index])
        inputs = tree.leaves((args, kwargs)) if rewritten else []
        for leaf in self._layout.captured[index]:
            written = call.leaves[leaf].written
            if leaf in rewritten:
                tensor = inputs[rewritten[leaf]]
                self.values[index, leaf] = tensor.clone() if written else tensor
                continue
            tensor = tensors[positions[leaf]]
            self.values[index, leaf] = tensor
            if written:
                tensors[positions[leaf]] = tensor.clone()
        return tree.unflatten(tensors, structure)

    def _changed(self, name: str | None) -> ChangedStepError:
        calls, index = self._layout.calls, self._cursor
        planned = f"{calls[index].layer!r}" if index < len(calls) else "the end of the step"
        found = f"called layer {name!r}" if name else "ended"
        return ChangedStepError(
            f"The step {found} where {planned} was planned (layer call {index}). The order of layer calls is the order"
            " of the pipeline: it may depend on the shapes and plain values of the batch, but not on values of tensors"
            " or on random numbers."
        )


class Stage:
    """Runs the user's step, and its backward, as one stage.

    Args:
        board: The model's switched layers.

    Attributes:
        frame: The run under way, for a failure's message.
    """

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._regions: dict[int, Regions] = {}
        self.frame: Frame | None = None

    def forward(self, layout: Layout, step: Callable[[], Any], received: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Run ``step`` as the stage that ``layout`` describes.

        Returns:
            What the step returned (None unless this stage reached the end), and the tensors to hand on.
        """
        board = self._board
        self.frame = frame = Frame(layout, board, received)
        result = None
        if not layout.is_idle:
            absent = layout.stand_in()
            before, board.handler = board.handler, frame
            try:
                result = step()
                frame.end(result)
            except StageEnd:
                pass
            finally:
                board.handler = before
                layout.put_back(absent)
        gives = [frame.values[output] for output in layout.gives]
        if frame.regions is not None:
            self._regions[id(received)] = frame.regions
        self.frame = None
        return result, gives

    def skip_backward(self, received: Sequence[Tensor]) -> None:
        """Forget the forward that has got ``received``."""
        self._regions.pop(id(received), None)

    def backward(
        self, layout: Layout, roots: Sequence[Any], grads: Sequence[Tensor | None], received: Sequence[Tensor] = ()
    ) -> None:
        """Run autograd from ``roots``.

        A gradient checkpoint of the user may run code again meanwhile: layers draw what they drew, those of earlier
        stages are answered with what was ``received``, the list that the forward has got, and what is not here stood
        in for, as then.
        """
        board = self._board
        absent = layout.stand_in()
        before, board.handler = board.handler, Rerun(layout, received, self._regions.pop(id(received), None))
        try:
            torch.autograd.backward(roots, grads)
        finally:
            board.handler = before
            layout.put_back(absent)


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
