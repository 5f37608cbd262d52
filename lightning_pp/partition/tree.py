"""Any nested value as a flat list of tensors plus a recipe to build it again.

``torch.utils._pytree`` is the only registry of containers that torch and libraries such as transformers share (a
``ModelOutput`` registers itself there), so it does the work. Two kinds it leaves whole are opened here: dataclass
instances and mappings that nobody registered (``BatchEncoding`` is a ``UserDict``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__: list[str] = []

#: what has nothing inside, and needs no look into a registry
_ATOMS = frozenset({type(None), bool, int, float, str})


class Marker:
    """Stands for something inside a structure: a leaf, though it may be a dataclass."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Slot(Marker):
    """Marks the place of tensor number ``index`` inside a structure."""

    index: int


def flatten(value: object) -> tuple[list[Tensor], object]:
    """Take the tensors out of ``value``.

    Returns:
        The tensors in order, and the same structure with a :class:`Slot` where each stood.

    Example:
        >>> import torch
        >>> tensors, structure = flatten({"x": torch.ones(2), "flag": None})
        >>> len(tensors), structure
        (1, {'x': Slot(index=0), 'flag': None})
    """
    if isinstance(value, Tensor):
        return [value], Slot(0)
    tensors: list[Tensor] = []

    def put(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return Slot(len(tensors) - 1)
        return leaf

    structure = map_leaves(put, value)
    return tensors, structure


def unflatten(tensors: list[Tensor], structure: object) -> Any:
    """Put ``tensors`` back where :func:`flatten` found them; containers are new objects each time."""
    if isinstance(structure, Slot):
        return tensors[structure.index]
    return map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, structure)


def leaves(value: Any) -> list[Any]:
    """All leaves of ``value``, tensors and others, in the order of :func:`flatten`."""
    if isinstance(value, Tensor):
        return [value]
    kind = type(value)
    if kind is tuple or kind is list:
        return [leaf for item in value for leaf in leaves(item)]
    if kind is dict:
        return [leaf for item in value.values() for leaf in leaves(item)]
    if kind in _ATOMS:
        return [value]
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value, is_leaf=_is_packed):
        inside = _inside(leaf)
        if inside is None:
            found.append(leaf)
        else:
            for item in inside:
                found += leaves(item)
    return found


def _inside(leaf: Any) -> Iterable[Any] | None:
    """What is in a container that torch takes for a leaf; None for a leaf."""
    if _is_packed(leaf):
        return leaf  # type: ignore[no-any-return]
    if _is_dataclass(leaf):
        return [getattr(leaf, name) for name in _field_names(leaf)]
    return leaf.values() if isinstance(leaf, Mapping) else None


def tensors_of(value: object) -> list[Tensor]:
    """The tensors inside ``value``, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def is_leaf(value: object) -> bool:
    """Whether there is nothing inside ``value`` to take apart."""
    found = leaves(value)
    return len(found) == 1 and found[0] is value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to every leaf and rebuild the containers with their own types."""
    kind = type(value)
    if kind is tuple:  # most containers are plain ones, and this runs for every micro-batch
        return tuple([map_leaves(function, item) for item in value])
    if kind is list:
        return [map_leaves(function, item) for item in value]
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()}
    if kind in _ATOMS or isinstance(value, (Tensor, Marker)):
        return function(value)

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if _is_dataclass(leaf):
            return _map_dataclass(function, leaf)
        if isinstance(leaf, Mapping):
            return _map_mapping(function, leaf)
        if _is_packed(leaf):  # its own __new__ bears nothing but tensors
            return tuple.__new__(PackedSequence, [map_leaves(function, item) for item in leaf])
        return function(leaf)

    return pytree.tree_map(visit, value, is_leaf=_is_packed)


def _is_packed(leaf: object) -> bool:
    return isinstance(leaf, PackedSequence)


def _is_dataclass(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, Marker))


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _map_dataclass(function: Callable[[Any], Any], value: Any) -> Any:
    new = copy.copy(value)
    for name in _field_names(value):
        # a frozen dataclass refuses setattr, and its copy is ours alone
        object.__setattr__(new, name, map_leaves(function, getattr(value, name)))
    return new


def _map_mapping(function: Callable[[Any], Any], value: Any) -> Any:
    items = {key: map_leaves(function, item) for key, item in value.items()}
    try:
        new = copy.copy(value)
        for key, item in items.items():
            new[key] = item
    except TypeError:  # a read-only mapping: the plain dict carries the same keys
        return items
    return new
