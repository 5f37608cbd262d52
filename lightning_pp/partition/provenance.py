"""Where every tensor of a step comes from: layer outputs and parameters it was computed from by glue alone.

A dispatch mode sees each operation that the user's own code runs between the layers and hands the sources of its
inputs on to its outputs. Sources are kept per storage, so views and in-place writes need no special care.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pp.partition import tree

__all__: list[str] = []

#: a layer output ``(call, leaf)``, or the name of a parameter or buffer that glue touches itself
Source = tuple[int, int] | str

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_NOTHING: frozenset[Source] = frozenset()

#: operators whose result depends on the shape, dtype and device of their input but not on its values
_VALUE_FREE = frozenset(
    f"{kind}_{how}"
    for kind, how in (
        *(("new", how) for how in ("zeros", "ones", "empty", "full", "empty_strided")),
        *((kind, "like") for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")),
    )
)


class Provenance(TorchDispatchMode):
    """Tracks sources while active.

    Attributes:
        written: Layer outputs that glue, or a later layer, has written into.
        reads: ``(number of layer calls so far, where)`` for each value that Python took out of a tensor which comes
            from a layer (``.item()``, ``bool()``, a boolean index).
        draws: Whether glue drew random numbers.
        tail: What the operations since the last layer call used.
        touched: Names of parameters and buffers that glue used in any way, if only for their dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.touched: set[str] = set()
        self.tail: frozenset[Source] = _NOTHING
        self.written: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, str]] = []
        self.draws = False
        self._paused = False
        self._sources: dict[int, frozenset[Source]] = {}
        self._outputs: dict[int, tuple[int, int]] = {}
        self._born: set[int] = set()
        self._alive: list[Tensor] = []  # a storage that dies would lend its key to another
        self._undo: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        inputs = tree.tensors_of((args, kwargs))
        sources = _NOTHING.union(*(self.of(tensor) for tensor in inputs))
        self.touched.update(source for source in sources if isinstance(source, str))
        if func.overloadpacket.__name__ in _VALUE_FREE:
            sources = _NOTHING
        self.tail |= sources
        if any(isinstance(source, tuple) for source in sources) and reads_values(func):
            self.reads.append((self.num_calls, _user_line()))
        self.draws = self.draws or draws_random(func, args, kwargs)
        targets = written_arguments(func, args, kwargs)
        for tensor in targets:
            self._before_write(tensor)
        result = func(*args, **kwargs)
        keys = {_key(tensor) for tensor in inputs}
        for tensor in tree.tensors_of(result):
            if _key(tensor) not in keys or func is torch.ops.aten.lift_fresh.default:
                self._remember_birth(tensor)
            self.add(tensor, sources)
        for tensor in targets:
            self.add(tensor, sources)
        return result

    def of(self, tensor: Tensor) -> frozenset[Source]:
        """The sources of ``tensor``."""
        return self._sources.get(_key(tensor), _NOTHING)

    def add(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        """Say that ``tensor`` comes (also) from ``sources``."""
        if sources:
            key = _key(tensor)
            self._sources[key] = self._sources.get(key, _NOTHING) | sources
            self._alive.append(tensor)

    def add_output(self, tensor: Tensor, output: tuple[int, int]) -> None:
        """Say that ``tensor`` *is* the layer output ``(call, leaf)``."""
        self.add(tensor, frozenset([output]))
        self._outputs[_key(tensor)] = output
        self._remember_birth(tensor)

    def overwrite(self, tensor: Tensor, output: tuple[int, int]) -> None:
        """Say that a layer has written ``output`` into ``tensor``, one of its arguments."""
        key = _key(tensor)
        before = self._outputs.get(key)
        if before is not None:
            self.written.add(before)
        if tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes():
            self._sources.pop(key, None)  # nothing of the old values is left
        self.add(tensor, frozenset([output]))
        self._outputs[key] = output

    def start_calls(self, num_calls: int = 0) -> None:
        """Say how many layers have been called so far."""
        self.num_calls = num_calls
        self.tail = _NOTHING

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away inside the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def undo_writes(self) -> None:
        """Give every tensor that existed before, and was written into, its old values back."""
        with torch.no_grad():
            for tensor, before in reversed(self._undo):
                tensor.detach().copy_(before)
        self._undo.clear()

    def next_run(self) -> dict[int, frozenset[Source]]:
        """Forget all layer outputs, for a second run of the same step.

        Returns:
            What was forgotten, by storage key (see :meth:`key`): sources of values that the first run may have kept.
        """
        kept = {}
        for key, sources in self._sources.items():
            outputs = frozenset(source for source in sources if isinstance(source, tuple))
            if outputs:
                kept[key] = outputs
                self._sources[key] = sources - outputs | {f"kept:{key}"}
        self._outputs.clear()
        self.start_calls()
        self.reads.clear()
        return kept

    @staticmethod
    def key(tensor: Tensor) -> int:
        """The identity of a tensor's storage while it lives."""
        return _key(tensor)

    def _before_write(self, tensor: Tensor) -> None:
        output = self._outputs.get(_key(tensor))
        if output is not None:
            self.written.add(output)
        if _key(tensor) not in self._born:
            self._undo.append((tensor, tensor.detach().clone()))
            self._alive.append(tensor)

    def _remember_birth(self, tensor: Tensor) -> None:
        self._born.add(_key(tensor))
        self._alive.append(tensor)


class LayerWatch(TorchDispatchMode):
    """Sees what happens inside one layer while its shapes are inferred.

    Attributes:
        draws: Whether it drew random numbers.
        written: Keys of the storages it wrote into.
        closed_over: Real tensors it used that were not among its arguments.
    """

    def __init__(self, is_fake: Any) -> None:
        super().__init__()
        self.draws = False
        self.written: set[int] = set()
        self.closed_over: list[Tensor] = []
        self._is_fake = is_fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws = self.draws or draws_random(func, args, kwargs)
        self.written.update(_key(tensor) for tensor in written_arguments(func, args, kwargs))
        self.closed_over += [tensor for tensor in tree.tensors_of((args, kwargs)) if not self._is_fake(tensor)]
        return func(*args, **kwargs)


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this operator draws from a default generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    # attention kernels carry the tag even where nothing is dropped
    return arguments.get("dropout_p", 1.0) != 0.0 and arguments.get("generator") is None


def reads_values(func: Any) -> bool:
    """Whether this operator hands values of a tensor to Python, or lets them decide a shape."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this operator writes into."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    written: list[Tensor] = []
    for position, spec in enumerate(schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(spec.name)
            written += tree.tensors_of(value)
    return written


def _key(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper subclass has no storage of its own
        return id(tensor)


def _user_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_PACKAGE, _TORCH)):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"
