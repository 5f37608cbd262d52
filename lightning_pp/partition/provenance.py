"""Where every tensor of a step comes from: layer outputs and parameters it was computed from by glue alone.

A dispatch mode sees each operation that the user's own code runs between the layers and hands the sources of its
inputs on to its outputs. Sources are kept per storage, so views and in-place writes need no special care.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pp.partition import operators
from lightning_pp.partition.calls import TraceError
from lightning_pp.partition.modes import Watching, asks_for_device, lifted
from lightning_pp.partition.operators import storage_key, tensors_in

__all__: list[str] = []

#: a layer output ``(call, leaf)``, the name of a parameter or buffer that glue touches itself, or ``kept:`` and the
#: storage key of a value that an earlier run of the step has kept
Source = tuple[int, int] | str

KEPT = "kept:"
NOTHING: frozenset[Source] = frozenset()

_OTHERS_CODE = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


@dataclass(frozen=True, slots=True)
class Read:
    """A value that Python took out of a tensor (``.item()``, ``bool()``, a boolean index, ``.numpy()``).

    Attributes:
        num_calls: Number of layer calls before it.
        where: The user's line.
        sources: What the tensor was computed from.
    """

    num_calls: int
    where: str
    sources: frozenset[Source]


class Provenance(Watching):
    """Tracks sources while active.

    Attributes:
        written: Layer outputs that glue, or a later layer, has written into.
        reads: Values of layers, of parameters or of an earlier run that Python has seen.
        draws: Whether glue drew random numbers.
        tail: What the operations since the last layer call used.
        touched: Names of parameters and buffers that glue used in any way, if only for their dtype.
        own_draws: Where each generator of the user's was drawn from first: layer calls before, and the line.
        aside: By storage key, the layer, and the number of its call, that made a tensor which lives on without having
            been returned.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0
        self.touched: set[str] = set()
        self.tail = NOTHING
        self.written: set[tuple[int, int]] = set()
        self.reads: list[Read] = []
        self.draws = False
        self.own_draws: dict[torch.Generator, tuple[int, str]] = {}
        self.aside: dict[int, tuple[str, int]] = {}
        self._paused = False
        self._sources: dict[int, frozenset[Source]] = {}
        self._outputs: dict[int, tuple[int, int]] = {}
        self._parameters: dict[int, str] = {}
        self._born: set[int] = set()
        self._alive: list[Tensor] = []  # a storage that dies would lend its key to another
        self._undo: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or asks_for_device(func, args):
            return func(*args, **kwargs)
        inputs = tensors_in([*args, *kwargs.values()])
        sources = NOTHING.union(*(self.of(tensor) for tensor in inputs))
        self._use(inputs, sources)
        for tensor in operators.values_read(func, args, kwargs):
            self._read(tensor)
        if operators.is_value_free(func):
            sources = NOTHING
        self.tail |= sources
        self.draws = self.draws or operators.draws_random(func, args, kwargs)
        self._draw_own(operators.own_generator(func, args, kwargs))
        targets = operators.written_arguments(func, args, kwargs)
        for tensor in targets:
            self._before_write(tensor)
        result = func(*args, **kwargs)
        keys = {storage_key(tensor) for tensor in inputs}
        for tensor in tensors_in(result):
            if storage_key(tensor) not in keys or func is torch.ops.aten.lift_fresh.default:
                self._remember_birth(tensor)
            self.add(tensor, sources)
        for tensor in targets:
            self.add(tensor, sources)
        return result

    def of(self, tensor: Tensor) -> frozenset[Source]:
        """The sources of ``tensor``."""
        return self._sources.get(storage_key(tensor), NOTHING)

    def add(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        """Say that ``tensor`` comes (also) from ``sources``."""
        if sources:
            key = storage_key(tensor)
            self._sources[key] = self._sources.get(key, NOTHING) | sources
            self._alive.append(tensor)

    def add_parameter(self, tensor: Tensor, name: str, is_buffer: bool) -> None:
        """Say that ``tensor`` *is* the parameter or buffer ``name``."""
        self.add(tensor, frozenset([name]))
        if not is_buffer:
            self._parameters[storage_key(tensor)] = name

    def add_output(self, tensor: Tensor, output: tuple[int, int]) -> None:
        """Say that ``tensor`` *is* the layer output ``(call, leaf)``."""
        self.add(tensor, frozenset([output]))
        self._outputs[storage_key(tensor)] = output
        self._remember_birth(tensor)

    def overwrite(self, tensor: Tensor, output: tuple[int, int]) -> None:
        """Say that a layer has written ``output`` into ``tensor``, one of its arguments."""
        key = storage_key(tensor)
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
        self.tail = NOTHING

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away inside the block."""
        before, self._paused = self._paused, True
        try:
            with lifted(self):
                yield
        finally:
            self._paused = before

    @contextmanager
    def seeing_conversions(self) -> Iterator[None]:
        """See ``.numpy()`` and ``.tolist()`` as well, which read values without any operator."""
        names = ("numpy", "tolist")
        for name in names:
            setattr(Tensor, name, self._watched(getattr(Tensor, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(Tensor, name)  # torch's own lies in a base class

    def undo_writes(self) -> None:
        """Give every tensor that existed before, and was written into, its old values back."""
        with torch.no_grad():
            for tensor, before in reversed(self._undo):
                tensor.detach().copy_(before)
        self._undo.clear()

    def next_run(self) -> dict[int, frozenset[tuple[int, int]]]:
        """Forget all layer outputs, for a second run of the same step.

        Returns:
            What was forgotten, by storage key: sources of values that the first run may have kept.
        """
        forgotten = {}
        for key, sources in self._sources.items():
            outputs = outputs_of(sources)
            if outputs:
                forgotten[key] = outputs
                self._sources[key] = sources - outputs | {f"{KEPT}{key}"}
        self._outputs.clear()
        self.start_calls()
        self.own_draws.clear()
        self.reads.clear()
        return forgotten

    def keep_alive(self, tensor: Tensor) -> None:
        """Keep the storage of ``tensor``, and with it its key, until the trace is over."""
        self._alive.append(tensor)

    def refuse_aside(self, tensor: Tensor, user: str) -> None:
        """Complain about a use of ``tensor`` where it is one that a layer made and did not return."""
        maker = self.aside.get(storage_key(tensor))
        if maker is not None or isinstance(tensor, FakeTensor):
            layer = "a layer" if maker is None else f"layer {maker[0]!r}"
            raise TraceError(
                f"{user} uses a tensor that {layer} has put aside (in an attribute, a list or another object) instead"
                f" of returning it: {user_line()}. It would be missing, or stale, on the other stages. Return it from"
                " the layer's forward. Where a library collects it on demand (output_hidden_states, output_attentions,"
                " output_router_logits), do not ask for it."
            )

    def _use(self, inputs: list[Tensor], sources: frozenset[Source]) -> None:
        for tensor in inputs:
            self.refuse_aside(tensor, "The step")
        self.touched.update(source for source in sources if isinstance(source, str) and not source.startswith(KEPT))

    def _draw_own(self, generator: torch.Generator | None) -> None:
        if generator is None:
            return
        first, where = self.own_draws.setdefault(generator, (self.num_calls, user_line()))
        if first != self.num_calls:
            raise TraceError(
                f"The step draws from one torch.Generator of its own at two places with layers in between: {where}, and"
                f" {user_line()}. A stage that ends between them would draw fewer numbers than the others. Draw all at"
                " the beginning, use two generators, or torch's global one."
            )

    def _read(self, tensor: Tensor) -> None:
        sources = self.of(tensor)
        if sources:
            self.reads.append(Read(self.num_calls, user_line(), sources))

    def _watched(self, convert: Callable[..., Any]) -> Callable[..., Any]:
        def converted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._paused:
                sources = self.of(tensor)
                self._use([tensor], sources)
                self._read(tensor)
                self.tail |= sources
            return convert(tensor, *args, **kwargs)

        return converted

    def _before_write(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._parameters:
            raise TraceError(
                f"The step writes into parameter {self._parameters[key]!r}: {user_line()}. Each stage holds some of the"
                " parameters and runs a part of the step, so they would not all be changed. Do it in a hook such as"
                " on_train_batch_end. Where one follows another (a momentum encoder), both must lie on one stage."
            )
        output = self._outputs.get(key)
        if output is not None:
            self.written.add(output)
        if key not in self._born:
            self._undo.append((tensor, tensor.detach().clone()))
            self._alive.append(tensor)

    def _remember_birth(self, tensor: Tensor) -> None:
        self._born.add(storage_key(tensor))
        self._alive.append(tensor)


def outputs_of(sources: frozenset[Source]) -> frozenset[tuple[int, int]]:
    """The layer outputs among ``sources``."""
    return frozenset(source for source in sources if isinstance(source, tuple))


def names_of(sources: frozenset[Source]) -> frozenset[str]:
    """The parameters and buffers among ``sources``."""
    return frozenset(source for source in sources if isinstance(source, str) and not source.startswith(KEPT))


def kept_of(sources: frozenset[Source]) -> frozenset[int]:
    """The storage keys of values kept from an earlier run among ``sources``."""
    return frozenset(
        int(source[len(KEPT) :]) for source in sources if isinstance(source, str) and source.startswith(KEPT)
    )


def user_line() -> str:
    """The line of the user's code that is being run."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OTHERS_CODE):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"
