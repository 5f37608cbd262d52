"""What layers consist of: those of one form differ in the values of tensors and of plain attributes alone.

A form holds all that code in the layer can find out about it through its attributes, so that layers of one form do the
same with the same arguments, unless they look at plain attributes that differ (see
:mod:`lightning_pp.partition.reads`) or at something outside of themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from lightning_pp.partition.switch import Switch, plain_class

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
        if shared.isdisjoint(id(held) for held in _held(layer)):
            plain: dict[Place, object] = {}
            try:
                forms[name] = Form(_form(layer, "", plain, {}), plain)
            except _NoFormError:
                continue
    return forms


def _held(layer: nn.Module) -> Iterator[nn.Module | Tensor]:
    for module in layer.modules():
        yield module
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _form(module: nn.Module, path: str, plain: dict[Place, object], seen: dict[int, int]) -> object:
    """The form of ``module``, whose plain attributes are added to ``plain``."""
    if id(module) in seen:
        return seen[id(module)]
    seen[id(module)] = len(seen)
    attributes = vars(module)
    if any(attributes[name] for name in _HOOKS) or not _is_open(type(module)):
        raise _NoFormError
    entries: list[object] = []
    for name, value in attributes.items():
        if name in _KNOWN or name in _IDLE or type(value) is Switch:
            continue
        try:
            plain[path, name] = _value(value, 0)
            entries.append(name)
        except _NoValueError:  # any other object has to be the very same one
            entries.append((name, id(value)))
    tensors = tuple(
        (key, None if tensor is None else _tensor(tensor, seen))
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
    )
    inside = tuple(
        (name, None if child is None else _form(child, f"{path}.{name}", plain, seen))
        for name, child in module._modules.items()
    )
    return plain_class(module), len(module._parameters), frozenset(entries), tensors, inside


def _is_open(cls: type) -> bool:
    """Whether all that an instance knows lies in its ``__dict__``."""
    if issubclass(cls, torch.jit.ScriptModule):
        return False
    return not any(vars(base).get("__slots__") for base in cls.__mro__)


def _tensor(tensor: Tensor, seen: dict[int, int]) -> object:
    is_plain = tensor.is_meta or type(tensor) in (Tensor, nn.Parameter)  # what is on meta, code never sees
    if not is_plain or isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        raise _NoFormError
    number = seen.setdefault(id(tensor), len(seen))
    is_parameter = isinstance(tensor, nn.Parameter)
    return number, is_parameter, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


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
