"""Layers that were not run when a shape was planned, because others do the same: compared when they run at last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.partition.calls import Argument, Call
from lightning_pp.partition.switch import Switchboard
from lightning_pp.runtime.layout import Layout
from lightning_pp.runtime.reruns import ChangedStepError
from lightning_pp.runtime.stage import Frame

__all__: list[str] = []


def compare_first(layout: Layout, not_run: Mapping[int, str]) -> None:
    """Let the first run by ``layout`` compare what its layers return with what was planned.

    Args:
        layout: Of a new shape.
        not_run: See :class:`lightning_pp.partition.calls.Trace`.
    """
    unseen = {index: other for index, other in not_run.items() if layout.start <= index < layout.stop}

    def make_frame(layout: Layout, board: Switchboard, received: list[Tensor]) -> Frame:
        return _Comparing(layout, board, received, unseen)

    if unseen:
        layout.make_frame = make_frame


class _Comparing(Frame):
    """A frame that compares; once all is compared, the layout makes ordinary ones again."""

    __slots__ = ("_unseen",)

    def __init__(self, layout: Layout, board: Switchboard, received: list[Tensor], unseen: dict[int, str]) -> None:
        super().__init__(layout, board, received)
        self._unseen = unseen

    def __call__(self, name: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, compare, answer or end."""
        index = self._cursor
        result = super().__call__(name, compute, args, kwargs)
        if index in self._unseen:
            _compare(self._layout.calls[index], self._unseen[index], result)
            del self._unseen[index]
            if not self._unseen:
                self._layout.make_frame = None
        return result


def _compare(call: Call, other: str, result: Any) -> None:
    marks = [leaf for leaf in tree.leaves(call.structure) if isinstance(leaf, tree.Slot) or _is_tensor(leaf)]
    planned = [call.leaves[mark.index] if isinstance(mark, tree.Slot) else None for mark in marks]
    found = tree.tensors_of(result)
    is_same = len(found) == len(planned) and all(
        leaf is None or (tuple(tensor.shape) == leaf.shape and tensor.dtype == leaf.dtype)
        for tensor, leaf in zip(found, planned, strict=True)
    )
    if not is_same:
        returned = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in found)
        wanted = ", ".join("an argument" if leaf is None else f"{leaf.shape} {leaf.dtype}" for leaf in planned)
        raise ChangedStepError(
            f"layer {call.layer!r} returned {returned or 'no tensor'} where {wanted or 'no tensor'} was planned: what"
            f" layer {other!r} returns, which did the same as it for all shapes of micro-batch until now, so that only"
            " that one was run to plan this shape. What a layer does may depend on its arguments and on attributes of"
            " its own (numbers, strings), as planning sees those. Keep there what tells these two apart (a number"
            " given to __init__), instead of in a global variable, a counter or the layer's place in the model."
        )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Argument) and leaf.is_tensor
