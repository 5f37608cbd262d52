"""One stage's run of the user's step: earlier layers are answered, own ones compute, the next stage's first ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.partition.calls import LEFT_OUT, Call, rebuild
from lightning_pp.partition.switch import Switchboard
from lightning_pp.runtime import rng
from lightning_pp.runtime.layout import Layout, Output, Way
from lightning_pp.runtime.reruns import ChangedStepError, Regions, Rerun

__all__: list[str] = []


class StageEnd(BaseException):
    """Leaves the user's step where the next stage begins; a BaseException so that ``except Exception`` lets it by."""


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
        if index >= layout.stop:
            if index < len(layout.calls) and layout.calls[index].layer == name:
                raise StageEnd
            raise self._changed(name)
        way = layout.ways[index]
        if way.layer != name:
            raise self._changed(name)
        self._cursor = index + 1
        if self.regions is not None:
            self.regions.note(index)
        seed = rng.layer_seed() if way.draws else None
        if index < layout.start:
            if way.received is not None:
                answer = self.values[way.received]
            elif way.answer is not None:
                answer = way.answer
            else:
                return self._answer(index, way.call, args, kwargs)
            # a reentrant checkpoint makes what leaves it its own; Stage.backward answers when it runs again
            return answer.detach() if layout.trains and not torch.is_grad_enabled() else answer
        self.current = name
        result = self._compute(way, seed, compute, args, kwargs)
        self.current = None
        if way.whole is not None and type(result) is Tensor:
            self.values[way.whole] = result
        elif way.given:
            result = self._capture(index, way, args, kwargs, result)
        return result

    def end(self, result: object) -> None:
        """Say that the step has returned; complains about layers that it left out."""
        if self._cursor < self._layout.stop:
            error = self._changed(None)
            is_none = result is None and self._layout.trains
            raise ChangedStepError(f"{error} {LEFT_OUT}") if is_none else error

    def _compute(
        self, way: Way, seed: int | None, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if way.is_recomputed:
            compute = self._layout.recomputing(way.layer, compute)
        board = self._board
        board.handler = None  # a layer's own layers are its own
        try:
            if seed is None:
                return compute(*args, **kwargs)
            return rng.seeded(seed, compute, args, kwargs)
        finally:
            board.handler = self

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
            tensors = [tensor.detach() for tensor in tensors]  # as in __call__
        if isinstance(call.structure, tree.Slot) and not call.writes:
            return tensors[0]
        inputs = tree.leaves((args, kwargs))
        for leaf, position in self._layout.rewritten[index]:
            value = self.values.get((index, leaf))
            if value is not None:
                inputs[position].copy_(value)
        return rebuild(call.structure, tensors, inputs)

    def _capture(self, index: int, way: Way, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        call = way.call
        tensors, structure = tree.flatten(result)
        order = self._layout.orders[index]
        if len(tensors) != len(order):
            raise ChangedStepError(
                f"layer {call.layer!r} returned {len(tensors)} tensors where it was planned to return {len(order)}."
            )
        positions = {leaf: position for position, leaf in enumerate(order) if leaf is not None}
        rewritten = dict(self._layout.rewritten[index])
        inputs = tree.leaves((args, kwargs)) if rewritten else []
        for leaf in way.given:
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
        self.frame = frame = (layout.make_frame or Frame)(layout, board, received)
        result = None
        if not layout.is_idle:
            absent = layout.stand_in() if layout.stand_ins else ()
            before, board.handler = board.handler, frame
            try:
                result = step()
                frame.end(result)
            except StageEnd:
                pass
            finally:
                board.handler = before
                if absent:
                    layout.put_back(absent)
        values = frame.values
        gives = [values[output] for output in layout.gives]
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
        absent = layout.stand_in() if layout.stand_ins else ()
        regions = self._regions.pop(id(received), None) if layout.repeated else None
        before, board.handler = board.handler, Rerun(layout, received, regions)
        try:
            torch.autograd.backward(roots, grads)
        finally:
            board.handler = before
            if absent:
                layout.put_back(absent)
