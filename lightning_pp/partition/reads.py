"""Which attributes of a module are looked at while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_pp.partition.forms import Place

__all__: list[str] = []


class _Noted:
    """Stands in a class in place of a plain attribute of its instances, and notes which of them are asked for it."""

    def __init__(self, name: str, read: set[Place]) -> None:
        self.name = name
        self.read = read
        self.watched: dict[int, str] = {}

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError(self.name)
        if id(instance) in self.watched:
            self.read.add((self.watched[id(instance)], self.name))
        try:
            return vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        if self.name not in vars(instance):
            raise AttributeError(self.name)
        del vars(instance)[self.name]


@contextmanager
def noted_reads(layer: nn.Module, places: frozenset[Place]) -> Iterator[set[Place]]:
    """Note which plain attributes at ``places`` the code in the block looks at.

    Only a class can tell: what lies in an instance's ``__dict__`` is found without any code being asked. What a class
    itself has a value for cannot be told, and counts as looked at.

    Yields:
        The places, filled in while the block runs.
    """
    modules = dict(_paths(layer)) if places else {}
    read = {(path, name) for path, name in places if hasattr(type(modules[path]), name)}
    noted: dict[tuple[type, str], _Noted] = {}
    for path, name in places - read:
        module = modules[path]
        noted.setdefault((type(module), name), _Noted(name, read)).watched[id(module)] = path
    with ExitStack() as stack:
        for (cls, name), descriptor in noted.items():
            try:
                setattr(cls, name, descriptor)
            except (AttributeError, TypeError):  # a metaclass that refuses
                read.update((path, name) for path in descriptor.watched.values())
            else:
                stack.callback(delattr, cls, name)
        yield read


def _paths(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules in ``module`` under the paths of :class:`lightning_pp.partition.forms.Form`."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{path}.{name}")
