"""What layers consist of: those of one form differ in the values of tensors and of plain attributes alone.

A form holds all that code in the layer can find out about it through its attributes, so that layers of one form do the
same with the same arguments, unless they look at plain attributes that differ (see
:mod:`lightning_pp.partition.reads`) or at something outside of themselves.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition.switch import Switch, plain_class
from lightning_pp.partition.untouched import is_open

__all__: list[str] = []

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_KNOWN = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS})
#: what has no part in a call
_IDLE = frozenset(
    {
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_forward_hooks_with_kwargs",  # these name hooks that lie in the others
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    }
)
_FIXED = (Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_CONTAINERS = frozenset({list, tuple, set, frozenset, dict})
#: entries of longer containers, and of containers deeper than this, are not compared
_LONG, _DEEP = 100, 4

#: a module inside a layer, by its path, and the name of one of its attributes
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Form:
    """What one layer consists of.

    Attributes:
        key: Equal for layers of one form.
        plain: Its plain attributes (numbers, strings, and containers of such): equal where the values are.
    """

    key: object
    plain: Mapping[Place, object]

    def differs(self, other: Form) -> frozenset[Place]:
        """Where plain attributes have other values in a layer of the same form."""
        return frozenset(place for place, value in self.plain.items() if value != other.plain[place])

    def is_same(self, other: Form, places: Iterable[Place]) -> bool:
        """Whether a layer of the same form has the same values at ``places``."""
        return all(self.plain[place] == other.plain[place] for place in places)


class _NoFormError(Exception):
    """A layer holds something that says too little about what it does."""


class _NoValueError(Exception):
    """Something is no plain value."""


def forms_of(layers: Mapping[str, nn.Module]) -> dict[str, Form]:
    """The forms of layers; those that hold something special, or share something with another layer, have none."""
    owners = Counter(held for layer in layers.values() for held in {id(held) for held in _held(layer)})
    shared = {held for held, number in owners.items() if number > 1}
    forms = {}
    for name, layer in layers.items():
        form = form_of(layer) if shared.isdisjoint(id(held) for held in _held(layer)) else None
        if form is not None:
            forms[name] = form
    return forms


def form_of(layer: nn.Module, origin: Callable[[Tensor], Tensor] | None = None) -> Form | None:
    """The form of one layer; None where it holds something special.

    Args:
        layer: The layer.
        origin: Gives the tensor that another one stands for.
    """
    plain: dict[Place, object] = {}
    try:
        return Form(_Reader(plain, origin or _itself).form(layer, ""), plain)
    except _NoFormError:
        return None


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _held(layer: nn.Module) -> Iterator[nn.Module | Tensor]:
    for module in layer.modules():
        yield module
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


class _Reader:
    """Reads one layer; adds its plain attributes to ``plain``."""

    def __init__(self, plain: dict[Place, object], origin: Callable[[Tensor], Tensor]) -> None:
        self._plain = plain
        self._origin = origin
        self._seen: dict[int, int] = {}

    def form(self, module: nn.Module, path: str) -> object:
        """The key of ``module``."""
        seen = self._seen
        if id(module) in seen:
            return seen[id(module)]
        seen[id(module)] = len(seen)
        attributes = vars(module)
        if any(attributes[name] for name in _HOOKS) or not _holds_all(type(module)):
            raise _NoFormError
        entries: list[object] = []
        for name, value in attributes.items():
            if name in _KNOWN or name in _IDLE or type(value) is Switch:
                continue
            try:
                self._plain[path, name] = _value(value, 0)
                entries.append(name)
            except _NoValueError:  # any other object has to be the very same one
                if not _is_known(value):
                    raise _NoFormError from None
                entries.append((name, id(value)))
        held = [*module._parameters.items(), None, *module._buffers.items()]
        tensors = tuple([None if entry is None else (entry[0], self._tensor(entry[1])) for entry in held])
        children = module._modules.items()
        inside = tuple(
            [(name, None if child is None else self.form(child, f"{path}.{name}")) for name, child in children]
        )
        return plain_class(module), frozenset(entries), tensors, inside

    def _tensor(self, tensor: Tensor | None) -> object:
        if tensor is None:
            return None
        tensor = self._origin(tensor)
        if not (tensor.is_meta or type(tensor) in (Tensor, nn.Parameter)):  # what is on meta, code never sees
            raise _NoFormError
        is_lazy = isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
        if is_lazy or tensor.layout is not torch.strided:
            raise _NoFormError
        number = self._seen.setdefault(id(tensor), len(self._seen))
        is_parameter = isinstance(tensor, nn.Parameter)
        return number, is_parameter, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_known(value: Any) -> bool:
    """Whether :class:`lightning_pp.partition.untouched.State` would see a change of an object, if it can change."""
    return isinstance(value, (*_CONTAINERS, *_FIXED)) or is_open(value)


def _holds_all(cls: type) -> bool:
    """Whether all that an instance knows lies in its ``__dict__``."""
    if issubclass(cls, torch.jit.ScriptModule):
        return False
    return not any(vars(base).get("__slots__") for base in cls.__mro__)


def _value(value: Any, depth: int) -> object:
    """Equal for plain values that are equal, of the same type, and containers of such."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind not in _CONTAINERS or len(value) > _LONG or depth > _DEEP:
        raise _NoValueError
    if kind is dict:
        return kind, tuple([(_value(key, depth), _value(item, depth + 1)) for key, item in value.items()])
    items = [_value(item, depth + 1) for item in value]
    return kind, frozenset(items) if kind in (set, frozenset) else tuple(items)
