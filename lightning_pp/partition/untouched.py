"""A model's Python state: put back after a trace, and searched for values of layers that a step keeps."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_pp.partition.operators import storage_key
from lightning_pp.partition.provenance import Provenance
from lightning_pp.partition.random_state import preserved

__all__: list[str] = []

#: objects of these packages are not looked into (a LightningModule knows its Trainer, which knows everything)
_FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "numpy"}
_FOREIGN |= {__name__.partition(".")[0], *sys.stdlib_module_names}
#: elements of longer containers are not looked into
_LONG = 1000

_CONTAINERS = (list, dict, set, deque)
#: the kinds of dict that modules consist of
_DICTS = frozenset({dict, OrderedDict})
#: what holds nothing and never changes
_ATOMS = frozenset({type(None), bool, int, float, str})


@contextmanager
def as_if_never(model: nn.Module, provenance: Provenance) -> Iterator[None]:
    """Restore the model's Python state, written tensors, and every random state afterwards."""
    undo: list[Callable[[], None]] = [State(model), *(_flags(parameter) for parameter in model.parameters())]
    with preserved():
        try:
            yield
        finally:
            provenance.undo_writes()
            for restore in undo:
                restore()


class State:
    """The Python state of everything that ``root`` holds; called, gives it back."""

    def __init__(self, root: Any) -> None:
        self._kept = [kept for _, value in reachable(root) for kept in _restorers(value)]

    def __call__(self) -> None:
        for restore in self._kept:
            restore()

    def is_unchanged(self) -> bool:
        """Whether everything still holds what it held; False where that is not known (of generators)."""
        return all(isinstance(kept, _Content) and kept.is_there() for kept in self._kept)


def kept_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All tensors that attributes hold, with the name of the attribute, such as ``self.model.hidden``."""
    return [(path, value) for path, value in reachable(model) if isinstance(value, Tensor)]


def kept_names(model: nn.Module) -> dict[int, str]:
    """The attributes that hold tensors, by storage key."""
    return {storage_key(tensor): path for path, tensor in kept_tensors(model)}


def reachable(root: Any) -> Iterator[tuple[str, Any]]:
    """Everything that ``root`` holds, itself included, each once, with the name of the attribute that holds it.

    Numbers and strings are left out.
    """
    names = {id(module): name for name, module in root.named_modules()} if isinstance(root, nn.Module) else {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("self", root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in names:
            path = ".".join(filter(None, ("self", names[id(value)])))
        yield path, value
        if not isinstance(value, Tensor):
            waiting += _inside(path, value)


def is_store(value: Any) -> bool:
    """Whether this is an object of the user's own that knows of no module: a place to keep things, such as a cache."""
    if not is_open(value):
        return False
    return not any(callable(held) and not isinstance(held, type) for _, held in reachable(value))


def _inside(path: str, value: Any) -> list[tuple[str, Any]]:
    if type(value) in _DICTS:  # most of what there is: a module has a dozen of them, and this runs for every layer
        return _entries(path, value.values()) if len(value) <= _LONG else []
    found: list[tuple[str, Any]] = []
    if is_open(value):
        is_module = isinstance(value, nn.Module)
        for key, held in vars(value).items():
            if type(held) in _ATOMS:
                continue
            if is_module and key in ("_parameters", "_buffers", "_modules"):
                found.append((path, held))
                found += [(f"{path}.{name}", item) for name, item in held.items()]
            else:
                found.append((f"{path}.{key}", held))
    if isinstance(value, (list, tuple, set, frozenset, deque)) and len(value) <= _LONG:
        found += _entries(path, value)
    elif isinstance(value, Mapping) and len(value) <= _LONG:
        found += _entries(path, value.values())
    return found


def _entries(path: str, items: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(path, item) for item in items if type(item) not in _ATOMS]


def is_open(value: Any) -> bool:
    """Whether this is a module, or an object of the user's own."""
    if isinstance(value, nn.Module):
        return True
    root = str(type(value).__module__).partition(".")[0]
    return root not in _FOREIGN and isinstance(getattr(value, "__dict__", None), dict)


def _restorers(value: Any) -> Iterator[Callable[[], Any]]:
    if type(value) in _DICTS:
        yield _Content(value)
        return
    if type(value) in (Tensor, nn.Parameter):
        return
    if is_open(value):
        yield _Content(vars(value))
    if isinstance(value, _CONTAINERS):
        yield _Content(value)
    elif isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield partial(value.setstate, value.getstate())
    elif isinstance(value, numpy.random.Generator):
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, numpy.random.RandomState):
        yield partial(value.set_state, value.get_state())


class _Content:
    """What a container holds now; called, fills it again."""

    __slots__ = ("_container", "_content")

    def __init__(self, container: Any) -> None:
        self._container = container
        self._content = dict(container) if isinstance(container, dict) else list(container)

    def __call__(self) -> None:
        self._container.clear()
        if isinstance(self._container, (list, deque)):
            self._container.extend(self._content)
        else:
            self._container.update(self._content)

    def is_there(self) -> bool:
        """Whether the container still holds the same objects."""
        now, before = self._container, self._content
        if len(now) != len(before):
            return False
        if isinstance(before, dict):
            return all(now.get(key, _Content) is item for key, item in before.items())
        return all(one is other for one, other in zip(now, before, strict=True))


def _flags(parameter: nn.Parameter) -> Callable[[], None]:
    grad, requires_grad = parameter.grad, parameter.requires_grad

    def restore() -> None:
        parameter.requires_grad = requires_grad
        parameter.grad = grad

    return restore
