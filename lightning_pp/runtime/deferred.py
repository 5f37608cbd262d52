"""Code that builds modules, run without their memory: what it does to tensors is recorded, to be done where wanted.

The code must not notice. It draws the random numbers that it would have drawn, so the stream goes on where it would
have gone on; and where it needs to know a number (``if mask.any()``, ``.item()``), that number is computed for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pp.partition import tree
from lightning_pp.partition.operators import draws_random, own_generator, written_arguments
from lightning_pp.runtime.recording import Recording, on_meta
from lightning_pp.runtime.rng import Draw, default_state, stream_seed

__all__: list[str] = []

_META = torch.device("meta")


@contextmanager
def deferring(recording: Recording, device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Make new tensors on meta inside the block, unless it says where they are to be.

    Args:
        recording: Keeps what is done to them.
        device: Where they would be.
        seed: Draw from streams of their own that start from it; None draws, for nobody, all that would have been drawn.
    """
    numbers = None if seed is None else _seeds(seed)
    try:
        with device, _OnMeta(recording, defers=True), _Recorder(recording, device, numbers):
            yield
    finally:
        recording.rest()


@contextmanager
def recorded(recording: Recording, seed: int | None = None) -> Iterator[None]:
    """Keep what the block does to tensors that are on meta already.

    Args:
        recording: Keeps it.
        seed: Draw from streams of their own that start from it, and not from the current one.
    """
    numbers = None if seed is None else _seeds(seed)
    try:
        with _OnMeta(recording, defers=False), _Recorder(recording, torch.device("cpu"), numbers):
            yield
    finally:
        recording.rest()


def _seeds(seed: int) -> Iterator[int]:
    number = 0
    while True:
        yield stream_seed(seed, number)
        number += 1


class _OnMeta(TorchFunctionMode):
    """Puts new tensors on meta, and reads for code that asks a tensor for numbers."""

    def __init__(self, recording: Recording, defers: bool) -> None:
        super().__init__()
        self._recording = recording
        self._defers = defers
        self._default = torch.get_default_device()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _factories() and kwargs.get("device") is None:
            out = kwargs.get("out")
            is_free = self._defers and out is None and torch.get_default_device() == self._default
            if is_free or (out is not None and on_meta(out)):
                kwargs = {**kwargs, "device": _META}
        elif func in _readers() and on_meta(args[0]):
            args = self._recording.read(args)
        elif func == _is_meta() and sys._getframe(1).f_globals.get("__name__") == "torch.nn.init":
            return False  # on meta, some initialisers would do nothing
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Keeps every operator on meta tensors."""

    def __init__(self, recording: Recording, device: torch.device, seeds: Iterator[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._device = device
        self._seeds = seeds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tree.tensors_of((args, kwargs))
        if not any(map(on_meta, tensors)) and kwargs.get("device") != _META:
            return func(*args, **kwargs)
        if _wants_numbers(func, args, kwargs):
            args, kwargs = self._recording.read((args, kwargs))
            return func(*args, **kwargs)
        seen, draw = self._recording.seen(func, args, kwargs), self._draw(func, args, kwargs)
        result = self._on_meta(func, args, kwargs)
        self._recording.add(seen, result, self._device, draw)
        if isinstance(draw, Tensor) or own_generator(func, args, kwargs) is not None:
            self._move_on(func, args, kwargs)
        return result

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            meta_args, meta_kwargs = tree.map_leaves(_without_numbers, (args, kwargs))
            return func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # not every operator knows its shapes
            true_args, true_kwargs = self._recording.read((args, kwargs))
            result = func(*true_args, **true_kwargs)
            written = written_arguments(func, args, kwargs)
            return written[0] if len(written) == 1 else tree.map_leaves(_without_numbers, result)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Draw:
        if not draws_random(func, args, kwargs):
            return None
        return default_state(self._device) if self._seeds is None else next(self._seeds)

    def _move_on(self, func: Any, args: Any, kwargs: Any) -> None:
        """Draw for nobody, so that the generator goes on where it would have gone on."""
        written = {id(tensor) for tensor in written_arguments(func, args, kwargs)}

        def scratch(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and on_meta(leaf):
                fill = torch.empty if id(leaf) in written else _halves
                return fill(tuple(leaf.shape), dtype=leaf.dtype, device=self._device)
            return self._device if isinstance(leaf, torch.device) and leaf == _META else leaf

        args, kwargs = tree.map_leaves(scratch, (args, kwargs))
        func(*args, **kwargs)


def _halves(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, 0.5 if dtype.is_floating_point else 0, dtype=dtype, device=device)


def _wants_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator cannot run on meta: it hands numbers on, or goes by them."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    target = kwargs.get("device")
    if target is not None and target != _META:
        return True
    return any(not on_meta(tensor) for tensor in written_arguments(func, args, kwargs))


def _without_numbers(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or on_meta(leaf):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)


@cache
def _factories() -> frozenset[Callable[..., Any]]:
    """What makes the tensors that take memory; numbers that are counted or listed (``arange``) stay true ones."""
    return frozenset(
        (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.eye)
    )


@cache
def _readers() -> frozenset[Callable[..., Any]]:
    """What asks a tensor for its numbers without going through an operator."""
    kinds = ("bool", "int", "float", "complex", "index", "contains", "array")
    return frozenset([getattr(Tensor, f"__{kind}__") for kind in kinds] + [Tensor.item, Tensor.tolist, Tensor.numpy])


@cache
def _is_meta() -> Any:
    return Tensor.is_meta.__get__  # type: ignore[attr-defined]
