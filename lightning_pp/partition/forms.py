"""What layers consist of: those of one form differ in the values of tensors and of plain attributes alone.

A form holds all that code in the layer can find out about it through its attributes, so that layers of one form do the
same with the same arguments, unless they look at plain attributes that differ (see
:mod:`lightning_pp.partition.reads`) or at something outside of themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition.switch import Switch, plain_class

__all__: list[str] = []

#: the kinds of attribute that may differ between layers of one form
PLAIN = frozenset({type(None), bool, int, float, str})

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
_CONTAINERS = (list, tuple, set, frozenset, dict)
#: entries of longer containers, and of containers deeper than this, are not compared
_LONG, _DEEP = 100, 4

#: a module inside a layer, by its path, and the name of one of its attributes
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Form:
    """What one layer consists of.

    Attributes:
        key: Equal for layers of one form.
        plain: The values of its plain attributes.
    """

    key: object
    plain: Mapping[Place, Any]

    def differs(self, other: Form) -> set[Place]:
        """Where plain attributes have other values in a layer of the same form."""
        return {place for place, value in self.plain.items() if not _is_same(value, other.plain[place])}


class _NoFormError(Exception):
    """A layer holds something that says too little about what it does."""


def forms_of(layers: Mapping[str, nn.Module]) -> dict[str, Form]:
    """The forms of layers; those that hold something special, or share something with another layer, have none."""
    owners = Counter(held for layer in layers.values() for held in {id(held) for held in _held(layer)})
    shared = {held for held, number in owners.items() if number > 1}
    forms = {}
    for name, layer in layers.items():
        if shared.isdisjoint(id(held) for held in _held(layer)):
            plain: dict[Place, Any] = {}
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


def _form(module: nn.Module, path: str, plain: dict[Place, Any], seen: dict[int, int]) -> object:
    """The form of ``module``, whose plain attributes are added to ``plain``."""
    if id(module) in seen:
        return seen[id(module)]
    seen[id(module)] = len(seen)
    attributes = vars(module)
    if any(attributes[name] for name in _HOOKS) or not _is_open(type(module)):
        raise _NoFormError
    entries: list[object] = []
    for name, value in attributes.items():
        if type(value) in PLAIN:
            plain[path, name] = value
            entries.append(name)
        elif name not in _KNOWN and name not in _IDLE and type(value) is not Switch:
            entries.append((name, value_key(value)))
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
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise _NoFormError
    number = seen.setdefault(id(tensor), len(seen))
    return number, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def value_key(value: Any, depth: int = 0) -> object:
    """Equal for plain values that are equal, and containers of such; for anything else only where it is the same."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in _CONTAINERS and len(value) <= _LONG and depth < _DEEP:
        if kind is dict:
            return kind, tuple((value_key(key), value_key(item, depth + 1)) for key, item in value.items())
        items = (value_key(item, depth + 1) for item in value)
        return kind, tuple(items) if kind in (list, tuple) else frozenset(items)
    return "is", id(value)


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
