"""What layers take on a device, timed one after another: only one of them is in memory at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition import tree
from lightning_pp.partition.calls import plain_value
from lightning_pp.partition.cost import time_passes

__all__: list[str] = []

#: seconds for each layer: the quickest of many runs says what it takes on a device that is busy now and then
_AT_LEAST = 0.1


@dataclass(frozen=True, slots=True)
class _Spec(tree.Marker):
    """What a tensor was."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def real(self, device: torch.device) -> Tensor:
        value = torch.full(self.shape, plain_value(self.dtype), dtype=self.dtype, device=device)
        return value.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of one call of a layer.

    Attributes:
        forward: Of its forward.
        backward: Of its backward.
    """

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a layer that is to be timed, when tensors are real again.

    Attributes:
        name: The layer's name.
        args: What it was called with, tensors described only.
        kwargs: The same.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        """Describe a call."""
        return cls(name, *tree.map_leaves(_described, (args, kwargs)))


@dataclass(frozen=True, slots=True)
class Timer:
    """Times layers.

    Attributes:
        device: Where.
        context: The precision of the step there.
    """

    device: torch.device
    context: Callable[[], AbstractContextManager[Any]]

    def passes(self, layer: nn.Module, asked: Asked) -> Passes:
        """Time one call: an empty copy of ``layer`` on made-up values.

        Raises:
            ValueError: The layer does not run so.
        """
        try:
            args, kwargs = tree.map_leaves(self._real, (asked.args, asked.kwargs))
            with self.context():
                times = time_passes(_apart(layer, self.device), args, kwargs, self.device, _AT_LEAST)
        except Exception as error:
            raise ValueError(
                f"layer {asked.name!r} cannot be timed by itself on {self.device.type}"
                f" ({type(error).__name__}: {' '.join(str(error).split())}): plan with another --balance"
            ) from error
        return Passes(*map(min, zip(*times, strict=True)))  # whatever else runs here only makes it slower

    def _real(self, leaf: Any) -> Any:
        return leaf.real(self.device) if isinstance(leaf, _Spec) else leaf


def _described(leaf: Any) -> Any:
    return _Spec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _apart(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose plain tensors are real; its parameters and buffers are made so by who times it."""
    own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for tensor in tree.tensors_of(dict(module.__dict__)):
            if id(tensor) not in own and (tensor.is_meta or not tensor.is_leaf):
                memo[id(tensor)] = torch.full(
                    tensor.shape, plain_value(tensor.dtype), dtype=tensor.dtype, device=device
                )
    return copy.deepcopy(layer, memo)
