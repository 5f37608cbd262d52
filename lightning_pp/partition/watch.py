"""What happens inside one layer while its output shapes are inferred."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pp.partition import operators
from lightning_pp.partition.calls import TraceError
from lightning_pp.partition.modes import Watching, asks_for_device
from lightning_pp.partition.operators import storage_key, tensors_in
from lightning_pp.partition.provenance import NOTHING, Provenance, Source

__all__: list[str] = []


class LayerWatch(Watching):
    """Watches one call of a layer.

    Follows the values of the layer's arguments and parameters inside the layer, because what it computes from them and
    puts aside (in an attribute, in a list it was given) never crosses a cut. A table that it computes from nothing but
    shapes and buffers, and shares with other layers, is the same on every stage and may be put aside.

    Args:
        layer: The layer's name.
        provenance: Of the glue.
        values: Its arguments and parameters, as it will see them.
        buffers: Its buffers: a stage that runs the layer has them.

    Attributes:
        draws: Whether it drew random numbers.
        written: Keys of the storages it wrote into.
        sources: What real tensors that it was not given (such as another module's parameter) come from.
        resumes: The calls of this layer that have put something aside which it uses.
        operators: What it ran, in order.
    """

    def __init__(
        self, layer: str, provenance: Provenance, values: Iterable[Tensor], buffers: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.written: set[int] = set()
        self.sources: frozenset[Source] = NOTHING
        self.resumes: set[int] = set()
        self.operators: list[Any] = []
        self._reaches_out = False
        self._layer = layer
        self._provenance = provenance
        self._given = list(values)
        self._made: list[Tensor] = []
        self._given_keys = {storage_key(tensor) for tensor in self._given}
        self._values = set(self._given_keys)
        self._buffer_keys = {storage_key(tensor) for tensor in buffers}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_for_device(func, args):
            return args[0].fake_device
        kwargs = kwargs or {}
        self.operators.append(func)
        self.draws = self.draws or operators.draws_random(func, args, kwargs)
        targets = operators.written_arguments(func, args, kwargs)
        self.written.update(storage_key(tensor) for tensor in targets)
        if operators.own_generator(func, args, kwargs) or not all(isinstance(item, FakeTensor) for item in targets):
            self._reaches_out = True
        inputs = tensors_in(args)
        if kwargs:
            inputs += tensors_in([*kwargs.values()])
        values = [self._is_value(tensor) for tensor in inputs]
        result = func(*args, **kwargs)
        if any(values) and not operators.is_value_free(func):
            made = [*tensors_in(result), *targets]
            self._values.update(storage_key(tensor) for tensor in made)
            self._made += made
        return result

    def has_made(self, tensor: Tensor) -> bool:
        """Whether the layer computed ``tensor`` from what it was given."""
        return storage_key(tensor) in self._values - self._given_keys

    def is_quiet(self) -> bool:
        """Whether it used and changed nothing but what it was given, its parameters, and what it made itself."""
        owned = self._given_keys | self._buffer_keys
        return not (self._reaches_out or self.sources or self.resumes) and self.written.isdisjoint(owned)

    def finish(self) -> None:
        """Remember what was made, in case it turns up outside of the layer."""
        for tensor in self._made:
            if storage_key(tensor) not in self._given_keys:
                self.put_aside(tensor)

    def put_aside(self, tensor: Tensor) -> None:
        """Say that ``tensor`` may turn up outside of the layer."""
        self._provenance.aside[storage_key(tensor)] = (self._layer, self._provenance.num_calls)
        self._provenance.keep_alive(tensor)

    def _is_value(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        maker, call = self._provenance.aside.get(key, (self._layer, None))
        if call is not None and key not in self._buffer_keys:
            self.resumes.add(call)
        if maker != self._layer:
            raise TraceError(
                f"Layer {self._layer!r} uses a tensor that layer {maker!r} has put aside (in an attribute, a list or"
                " another object) instead of returning it. It would be missing, or stale, where the two run on"
                f" different stages. Return it from the forward of {maker!r} and hand it over as an argument."
            )
        if isinstance(tensor, FakeTensor):
            return key in self._values
        sources = self._provenance.of(tensor)
        self.sources |= sources
        return bool(sources) or key in self._values
