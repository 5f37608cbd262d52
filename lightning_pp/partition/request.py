"""All that a layer can find out about one call of it under fake tensors, as a value that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition.calls import CONSTANTS, Argument
from lightning_pp.partition.modes import is_watched
from lightning_pp.partition.operators import storage_key
from lightning_pp.partition.tree import Slot

__all__: list[str] = []


class _UnknownError(Exception):
    """Something that cannot be compared."""


def request_key(args: tuple[Any, ...], kwargs: dict[str, Any], needs_gradient: Callable[[Tensor], bool]) -> object:
    """Equal for calls that differ in nothing but the values of tensors.

    Args:
        args: Of the call.
        kwargs: Of the call.
        needs_gradient: Whether the layer will see a tensor as one that a gradient goes back through.

    Returns:
        None where the call is given, or made under, something that cannot be compared.
    """
    if is_watched():
        return None
    numbers: dict[tuple[str, int], int] = {}

    def tensor_key(tensor: Tensor) -> object:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise _UnknownError
        # which arguments are one tensor, and which share memory
        same = numbers.setdefault(("tensor", id(tensor)), len(numbers))
        shared = numbers.setdefault(("storage", storage_key(tensor)), len(numbers))
        where = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device
        flags = tensor.dtype, tensor.is_conj(), tensor.is_neg(), needs_gradient(tensor)
        return type(tensor), same, shared, where, flags

    try:
        return _surroundings(), _key((args, kwargs), tensor_key)
    except _UnknownError:
        return None


def _key(value: Any, tensor_key: Callable[[Tensor], object]) -> object:
    kind = type(value)
    if isinstance(value, Tensor):
        return tensor_key(value)
    if kind is tuple or kind is list:
        return kind, tuple([_key(item, tensor_key) for item in value])
    if kind is dict:
        return kind, tuple([(_key(key, tensor_key), _key(item, tensor_key)) for key, item in value.items()])
    if isinstance(value, CONSTANTS) and not isinstance(value, Slot):
        return kind, value
    raise _UnknownError


def _surroundings() -> object:
    """What code may ask torch for."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casts


def is_known(structure: object) -> bool:
    """Whether a layer's output is built of nothing that could carry more than its entries."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return all(is_known(item) for item in structure)  # type: ignore[attr-defined]
    if kind is dict:
        return all(is_known(key) and is_known(item) for key, item in structure.items())  # type: ignore[attr-defined]
    return isinstance(structure, (*CONSTANTS, Argument))
