"""Layers that gradient checkpoints of the user's call again in a backward pass, and which of their calls that is.

A checkpoint has an object of its own from its first run to its second. Layers are called in the same order in both, so
the place in that order says which call of the step is made again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_pp.partition import tree
from lightning_pp.partition.calls import rebuild
from lightning_pp.runtime import rng

if TYPE_CHECKING:
    from lightning_pp.runtime.layout import Layout

__all__: list[str] = []

_FILE = inspect.unwrap(checkpoint).__code__.co_filename


class ChangedStepError(RuntimeError):
    """A step did not do what its plan says."""


class Regions:
    """What one stage has run in checkpoints of the user's, in one micro-batch."""

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._places: dict[FrameType, int] = {}

    def note(self, call: int) -> None:
        """Layer call number ``call`` is being made."""
        for _, checkpointed, is_again in running_checkpoints():
            if is_again:
                return  # what is around it has been noted the first time
            self._calls.setdefault(checkpointed, []).append(call)

    def again(self) -> int | None:
        """Which call of the step the one under way is; None if that cannot be told."""
        running = list(running_checkpoints())
        frames = {frame for frame, _, _ in running}
        self._places = {frame: place for frame, place in self._places.items() if frame in frames}
        for frame, checkpointed, is_again in running:
            if is_again:
                place = self._places.get(frame, 0)
                self._places[frame] = place + 1
                calls = self._calls.get(checkpointed, [])
                return calls[place] if place < len(calls) else None
        return None


def running_checkpoints() -> Iterator[tuple[FrameType, Any, bool]]:
    """The gradient checkpoints that run the caller, from the inside out: frame, checkpoint, whether it runs again."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            found = _checkpoint_of(frame)
            if found is not None:
                yield frame, found, frame.f_code.co_name in ("backward", "unpack_hook")
        frame = frame.f_back


def _checkpoint_of(frame: FrameType) -> Any:
    """What torch keeps of a checkpoint that ``frame`` runs: a reentrant one's context, or another one's record."""
    name, values = frame.f_code.co_name, frame.f_locals
    if name in ("forward", "backward"):
        return values.get("ctx")
    if "gen" in values:  # suspended between what is done before the first run and after it
        return values["gen"].gi_frame.f_locals.get("new_frame")
    return values.get("frame") if name == "unpack_hook" else None


class Rerun:
    """Answers layers that are called again in a backward pass (see :data:`Handler`).

    Args:
        layout: Of the stage.
        received: What the stage before has sent.
        regions: What ran in checkpoints; None where every layer that may be called again is called once.
    """

    __slots__ = ("_layout", "_received", "_regions")

    def __init__(self, layout: Layout, received: Sequence[Tensor], regions: Regions | None) -> None:
        self._layout = layout
        self._received = received
        self._regions = regions

    def __call__(self, name: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = self._layout
        seed = rng.layer_seed() if name in layout.drawing else None
        index = self._index(name)
        if index is not None and index < layout.start:
            return self._answer(index, args, kwargs)
        compute = layout.recomputing(name, compute)  # as in the forward, whose graph is being built again
        return compute(*args, **kwargs) if seed is None else rng.seeded(seed, compute, args, kwargs)

    def _index(self, name: str) -> int | None:
        """Which call of the step it is; None for a call of this stage."""
        layout, regions = self._layout, self._regions
        index = regions.again() if regions is not None else None
        if regions is None or (index is None and name not in layout.repeated):
            return None if name in layout.own else layout.call_of(name)
        if index is None or layout.calls[index].layer != name:
            raise ChangedStepError(
                f"A gradient checkpoint calls layer {name!r} again, in another order than the first time, or by means"
                " of its own: it cannot be told which call of the step that is. Use torch.utils.checkpoint.checkpoint,"
                " or set activation_checkpointing=True instead."
            )
        regions.note(index)
        return index

    def _answer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._layout.calls[index]
        values = dict(zip(self._layout.takes, self._received, strict=False))
        tensors = []
        for leaf in range(len(self._layout.placeholders[index])):
            value = values.get((index, leaf))
            if value is not None and value.requires_grad:
                value = _apart(value)
            elif value is None:  # gets the zeros that a checkpoint sends on where nothing depended on it, so no refusal
                planned = self._layout.placeholder(index, leaf)
                value = planned.detach().requires_grad_(planned.requires_grad)
            tensors.append(value.clone() if call.leaves[leaf].written else value)
        return rebuild(call.structure, tensors, tree.leaves((args, kwargs)))


def _apart(received: Tensor) -> Tensor:
    """``received`` for code that runs again: hooks that it sets do not change the gradient, which they do elsewhere."""
    apart = received.detach().requires_grad_()
    apart.register_hook(partial(_hand_on, received))  # type: ignore[no-untyped-call]
    return apart


def _hand_on(received: Tensor, grad: Tensor) -> None:
    received.grad = grad if received.grad is None else received.grad + grad
