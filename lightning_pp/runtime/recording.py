"""What was done to tensors on the meta device, kept so that it can be done again for those that are wanted.

A tensor on meta has a shape and no values. Every operator that makes or writes one is kept here, in order, with the
random state that it would have drawn from, so the value of a single tensor follows from its own part of the list. It
is the very value that the same code gives off meta. Tensors are told apart by their storage: views share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.partition.operators import storage_key, written_arguments
from lightning_pp.runtime.rng import Draw, drawing_from

__all__: list[str] = []

_Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class _Place(tree.Marker):
    """A tensor on meta, as one operator saw it."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _OwnGenerator(tree.Marker):
    """A generator of the user's, as it was."""

    device: torch.device
    state: Tensor


@dataclass(frozen=True, slots=True)
class _Here(tree.Marker):
    """Stands for the meta device where an operator names it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An operator and what it is called with.

    Attributes:
        arguments: ``(args, kwargs)``, with a :class:`_Place` for each tensor on meta.
        reads: Keys of those tensors.
        writes: Keys of those that it writes into.
        dtype: torch's default one at that time.
    """

    func: Any
    arguments: tuple[Any, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Entry:
    """An operator that has run.

    Attributes:
        made: For each tensor of its result, the place where it is a new one.
        writes: Keys of the tensors that it wrote into or made.
        device: Where it would have run.
        draw: Where it would have drawn from.
    """

    seen: Seen
    made: tuple[_Place | None, ...]
    writes: frozenset[int]
    device: torch.device
    draw: Draw


class Recording:
    """Operators on meta tensors, and the values that they would have made."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._next = 0
        self._writers: dict[int, list[int]] = {}
        self._known: set[int] = set()
        self._storages: _Storages = {}  # they stay alive, so that an address stays one storage's own
        self._recent: tuple[_Storages, int] = ({}, 0)

    def knows(self, tensor: Tensor) -> bool:
        """Whether what was kept says what ``tensor`` holds; a copy of an unknown tensor is unknown."""
        return storage_key(tensor) in self._known

    def seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Seen:
        """What an operator is about to be called with."""
        given = {storage_key(tensor): tensor for tensor in tree.tensors_of((args, kwargs)) if on_meta(tensor)}
        for key, tensor in given.items():
            self._storages.setdefault(key, tensor.untyped_storage())
        written = (storage_key(tensor) for tensor in written_arguments(func, tuple(args), dict(kwargs)))
        frozen = tree.map_leaves(_frozen, (tuple(args), dict(kwargs)))
        return Seen(func, frozen, frozenset(given), frozenset(written), torch.get_default_dtype())

    def add(self, seen: Seen, result: Any, device: torch.device, draw: Draw) -> None:
        """Keep an operator that has run; one that makes nothing but a view needs no keeping."""
        results = tree.tensors_of(result)
        made = tuple(_place(t) if on_meta(t) and storage_key(t) not in seen.reads else None for t in results)
        writes = seen.writes | {place.key for place in made if place is not None}
        if not writes:
            return
        for tensor in filter(on_meta, results):
            self._storages.setdefault(storage_key(tensor), tensor.untyped_storage())
        for key in writes:
            self._writers.setdefault(key, []).append(self._next)
        if self._known >= seen.reads - seen.writes:
            self._known |= writes
        self._entries[self._next] = _Entry(seen, made, writes, device, draw)
        self._next += 1

    def value(self, tensor: Tensor, device: torch.device) -> Tensor:
        """What ``tensor`` would hold, in memory of its own; zeros where nothing was kept of it."""
        place, storages = _place(tensor), _Storages()
        for number in sorted(self._needed([place.key], {}, 0) or ()):
            self._again(self._entries[number], storages)
        if place.key not in storages:
            return torch.zeros(place.size, dtype=place.dtype, device=device)
        value = _view(place, storages[place.key])
        is_all_of_it = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return (value if is_all_of_it else value.clone()).to(device)

    def read(self, value: Any) -> Any:
        """``value`` with the numbers that its meta tensors would hold now, for code that has to know them.

        Code that reads once mostly reads again (it draws until all numbers fit), so what was used last is kept.
        """
        keys = [storage_key(tensor) for tensor in tree.tensors_of(value) if on_meta(tensor)]
        storages, since = self._recent
        needed = self._needed(keys, storages, since)
        if needed is None:
            storages, needed = {}, self._needed(keys, {}, 0)
        used = set(keys)
        for number in sorted(needed or ()):
            self._again(self._entries[number], storages)
            used |= self._entries[number].seen.reads | self._entries[number].writes
        self._recent = {key: storages[key] for key in used if key in storages}, self._next

        def numbers(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not on_meta(leaf):
                return leaf
            return _view(_place(leaf), self._storage(storage_key(leaf), storages, torch.device("cpu"))).clone()

        return tree.map_leaves(numbers, value)

    def rest(self) -> None:
        """Let go of what :meth:`read` keeps."""
        self._recent = {}, 0

    def forget(self, keys: Iterable[int]) -> None:
        """Drop what the values of the storages ``keys`` follow from; they have been taken, or nobody wants them."""
        for number in self._needed(keys, {}, 0) or ():
            for key in self._entries.pop(number).writes:
                self._writers[key].remove(number)
        for key in [key for key, numbers in self._writers.items() if not numbers]:
            del self._writers[key]
            self._known.discard(key)
            self._storages.pop(key, None)

    def _needed(self, keys: Iterable[int], storages: _Storages, since: int) -> set[int] | None:
        """The entries that the values of ``keys`` follow from.

        Args:
            keys: What is wanted, as it is now.
            storages: What is there already.
            since: It is as it was before this entry.

        Returns:
            None where something is needed as it was even earlier.
        """
        needed: set[int] = set()
        looked_at: dict[int, int] = {}
        waiting = [(key, self._next) for key in keys]
        while waiting:
            key, limit = waiting.pop()
            if looked_at.get(key, -1) >= limit:
                continue
            looked_at[key] = limit
            for number in self._writers.get(key, ()):
                if number < since and key in storages:
                    if number >= limit:
                        return None
                elif number < limit and number not in needed:
                    entry = self._entries[number]
                    if number < since and not entry.writes.isdisjoint(storages):
                        return None
                    needed.add(number)
                    waiting += [(other, number) for other in entry.seen.reads]
        return needed

    def _again(self, entry: _Entry, storages: _Storages) -> None:
        def thawed(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return _view(leaf, self._storage(leaf.key, storages, entry.device))
            if isinstance(leaf, _Here):
                return entry.device
            if isinstance(leaf, _OwnGenerator):
                return torch.Generator(leaf.device).set_state(leaf.state)
            return leaf

        args, kwargs = tree.map_leaves(thawed, entry.seen.arguments)
        with torch.no_grad(), _default(entry.seen.dtype), drawing_from(entry.draw, entry.device):
            result = entry.seen.func(*args, **kwargs)
        for place, tensor in zip(entry.made, tree.tensors_of(result), strict=True):
            if place is not None:
                storages[place.key] = _laid_out(tensor, place).untyped_storage()

    def _storage(self, key: int, storages: _Storages, device: torch.device) -> torch.UntypedStorage:
        if key not in storages:  # it was made where nobody looked
            size = self._storages[key].nbytes()
            storages[key] = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
        return storages[key]


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def on_meta(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values (``is_meta`` may be answered otherwise while a module is built)."""
    return tensor.device.type == "meta"


def _place(tensor: Tensor) -> _Place:
    return _Place(storage_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _view(place: _Place, storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=place.dtype, device=storage.device)
    return empty.set_(storage, place.offset, place.size, place.stride)


def _laid_out(tensor: Tensor, place: _Place) -> Tensor:
    """``tensor`` in the memory layout that views of the one on meta go by."""
    assert tensor.dtype == place.dtype, f"{tensor.dtype} was {place.dtype} on meta"
    assert tuple(tensor.shape) == place.size, f"{tuple(tensor.shape)} was {place.size} on meta"
    if tensor.stride() == place.stride and tensor.storage_offset() == place.offset:
        return tensor
    return torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=tensor.device).copy_(tensor)


def _frozen(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _place(leaf) if on_meta(leaf) else leaf.detach().clone()
    if isinstance(leaf, torch.Generator):
        return _OwnGenerator(leaf.device, leaf.get_state())
    return _Here() if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf
