"""The output of one layer call without its computation: shapes under fake tensors, or from an empty copy."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_pp.partition import tree
from lightning_pp.partition.calls import CONSTANTS, Argument, TraceError
from lightning_pp.partition.mirror import show_changes
from lightning_pp.partition.operators import storage_key
from lightning_pp.partition.provenance import Provenance, names_of, outputs_of
from lightning_pp.partition.untouched import State, is_store
from lightning_pp.partition.watch import LayerWatch

__all__: list[str] = []


@dataclass
class Cost:
    """What one layer call costs."""

    flops: int = 0
    saved_bytes: int = 0
    _storages: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def measuring(self, parameters: dict[str, Tensor], wanted: bool) -> Iterator[None]:
        """Count inside the block, if ``wanted``; what is saved of ``parameters`` is free.

        In either case hooks of the user's on saved tensors, of which the innermost count, see nothing of it.
        """
        if not wanted:
            with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
                yield
            return
        own = {storage_key(tensor) for tensor in parameters.values()}
        keep: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            if storage_key(tensor) not in own:
                self._storages[storage_key(tensor)] = tensor.untyped_storage().nbytes()
                keep.append(tensor)
            return tensor

        counter = FlopCounterMode(display=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, _itself), counter:
            yield
        self.flops = int(counter.get_total_flops())
        self.saved_bytes = sum(self._storages.values())


@dataclass(frozen=True, slots=True)
class Inferred:
    """What a layer call gives.

    Attributes:
        result: Its output: tensors of the right shapes, and :class:`Argument` for what was passed through.
        written: Which leaves of the arguments it wrote into.
        watch: What was seen inside.
        cost: What it cost.
        state: What the layer and its arguments held before; None where this says nothing of what they hold now.
    """

    result: Any
    written: tuple[int, ...]
    watch: LayerWatch
    cost: Cost
    state: State | None = None

    def is_pure(self) -> bool:
        """Whether the layer has done nothing that shows, but to return ``result``."""
        return self.state is not None and self.watch.is_quiet() and self.state.is_unchanged()


class Inference:
    """Infers the layers of one trace.

    Args:
        model: The module that holds them.
        device: Where they will run.
        provenance: Of the glue.

    Attributes:
        is_measuring: Whether costs are wanted.
    """

    def __init__(self, model: nn.Module, device: torch.device, provenance: Provenance) -> None:
        self._model = model
        self._device = device
        self._provenance = provenance
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, Tensor] = {}
        self._origins: dict[int, Tensor] = {}
        self._fill = torch.Generator(device).manual_seed(0)
        self._undo: list[Callable[[], None]] = []
        self._differentiable: set[tuple[int, int]] = set()
        self.is_measuring = True

    def __call__(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inferred:
        """Infer one call.

        Raises:
            TraceError: The layer fails, or does something that cannot be cut.
        """
        state = State((args, kwargs, layer))
        try:
            return self._with_fakes(name, layer, args, kwargs, state)
        except TraceError:
            raise
        except Exception as error:  # whatever a layer does not bear as a fake, it may bear for real
            state()  # it may have come half-way, and a cache of keys and values grows with each run
            return self._for_real(name, layer, args, kwargs, error)

    def filled(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A real tensor of harmless values, from a generator of its own."""
        if not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        return torch.empty(tuple(shape), dtype=dtype, device=self._device).uniform_(0.1, 1.0, generator=self._fill)

    def note_gradients(self, outputs: Iterable[tuple[int, int]]) -> None:
        """Say which layer outputs require a gradient; what is computed from them does too, so that layers save it."""
        self._differentiable.update(outputs)

    def register(self, stand_in: Tensor, tensor: Tensor) -> None:
        """Say that ``stand_in`` stands for parameter or buffer ``tensor``, which is somewhere else."""
        self._origins[id(stand_in)] = tensor

    def origin(self, tensor: Tensor) -> Tensor:
        """The parameter or buffer that ``tensor`` stands for, if it does for one."""
        return self._origins.get(id(tensor), tensor)

    def undo_changes(self) -> None:
        """Give containers that layers have changed their old content back."""
        while self._undo:
            self._undo.pop()()

    def real_copy(self, layer: nn.Module) -> nn.Module:
        """An empty copy of ``layer`` on the device, which shares what it uses of the rest of the model."""
        own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
        memo: dict[int, Any] = {
            id(tensor): tensor
            for tensor in (*self._model.parameters(), *self._model.buffers())
            if id(tensor) not in own
        }
        for module in layer.modules():
            for tensor in tree.tensors_of(dict(module.__dict__)):
                if isinstance(tensor, FakeTensor) or not tensor.is_leaf:  # neither can be copied as it is
                    memo[id(tensor)] = self.filled(tensor.shape, tensor.dtype)
            # what one call leaves in a cache of its own, the next has to find
            memo |= {id(held): held for held in vars(module).values() if is_store(held)}
        copied = copy.deepcopy(layer, memo).to_empty(device=self._device)
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.data = self.filled(tensor.shape, tensor.dtype)
        return copied

    def _with_fakes(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: State
    ) -> Inferred:
        inputs = tree.leaves((args, kwargs))
        fakes = self._fake_inputs(inputs)
        with self._fake_mode:
            parameters = {key: self._fake_parameter(p) for key, p in layer.named_parameters()}
            buffers = {key: self._fake_parameter(b) for key, b in layer.named_buffers()}
        cost = Cost()
        given = [item for item in fakes if isinstance(item, Tensor)]
        watch = LayerWatch(name, self._provenance, [*given, *parameters.values()], buffers.values())
        tensors = parameters | buffers
        own = dict(tensors)
        fake_args, fake_kwargs = _with_leaves((args, kwargs), fakes)
        with (
            torch.compiler.set_stance("force_eager"),
            self._fake_mode,
            cost.measuring(tensors, self.is_measuring),
            watch,
        ):
            result = torch.func.functional_call(layer, tensors, fake_args, fake_kwargs)
        watch.finish()
        is_changed = self._show_changes((args, kwargs), (fake_args, fake_kwargs), inputs, fakes)
        is_changed |= any(
            tensors.get(key) is not tensor for key, tensor in own.items()
        )  # torch tells what was bound anew
        written = _positions(fakes, watch.written)
        return Inferred(_by_identity(result, fakes), written, watch, cost, None if is_changed else state)

    def _for_real(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fake_error: Exception
    ) -> Inferred:
        """Run an empty copy of the layer: only its shapes matter (data-dependent routing is one that needs it)."""
        inputs = tree.leaves((args, kwargs))
        copies = [_copied(item) for item in inputs]
        copied = self.real_copy(layer)
        cost = Cost()
        given = [item for item in copies if isinstance(item, Tensor)]
        watch = LayerWatch(name, self._provenance, [*given, *copied.parameters()], copied.buffers())
        modules = list(zip(layer.modules(), copied.modules(), strict=True))
        copied_args, copied_kwargs = _with_leaves((args, kwargs), copies)
        try:
            counting = cost.measuring(dict(copied.named_parameters()), self.is_measuring)
            with torch.compiler.set_stance("force_eager"), counting, watch:
                result = copied(*copied_args, **copied_kwargs)
        except Exception as error:
            raise TraceError(
                f"Layer {name!r} ({type(copied).__name__}) could not be planned: its output shapes can neither be"
                f" inferred with fake tensors ({type(fake_error).__name__}: {fake_error}) nor by running an empty copy"
                f" of it ({type(error).__name__}: {error}). Does the step run without the strategy?"
            ) from error
        for original, module in modules:
            self._put_aside(original, module, watch)
        watch.finish()
        self._show_changes((args, kwargs), (copied_args, copied_kwargs), inputs, copies)
        _refuse_numbers(name, result, copies)
        return Inferred(_by_identity(result, copies), _positions(copies, watch.written), watch, cost)

    def _fake_inputs(self, inputs: list[Any]) -> list[Any]:
        distinct = {id(item): item for item in inputs if isinstance(item, Tensor)}
        shared = Counter(storage_key(tensor) for tensor in distinct.values())
        fakes = {key: self._fake_input(tensor, shared) for key, tensor in distinct.items()}
        return [fakes.get(id(item), item) for item in inputs]

    def _fake_input(self, tensor: Tensor, shared: Counter[int]) -> Tensor:
        if isinstance(tensor, FakeTensor):  # one that a layer has put aside; the watch minds its use
            return tensor
        is_alone = shared[storage_key(tensor)] == 1
        learns = is_alone and self.needs_gradient(tensor)
        if is_alone and self._is_plain(tensor):
            with self._fake_mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device, requires_grad=learns)
                return fake.clone() if learns else fake  # no leaf, which could not be written into
        fake = self._fake_mode.from_tensor(tensor.detach())
        with self._fake_mode:
            return fake.detach().requires_grad_().clone() if learns else fake

    def needs_gradient(self, tensor: Tensor) -> bool:
        """Whether the layer will see it as one that a gradient goes back through."""
        if not torch.is_grad_enabled() or not tensor.is_floating_point():
            return False
        sources = self._provenance.of(tensor)
        return bool(names_of(sources) or outputs_of(sources) & self._differentiable)

    def _is_plain(self, tensor: Tensor) -> bool:
        """Whether nothing but its shape and dtype has to be known for a fake one, which is many times quicker so."""
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            # what is saved of a part holds the whole
            and (not self.is_measuring or tensor.untyped_storage().nbytes() == tensor.nbytes)
        )

    def _put_aside(self, original: nn.Module, module: nn.Module, watch: LayerWatch) -> None:
        """Let tensors that the copy has put into attributes turn up in the layer, as they would have without a copy."""
        for key, value in module.__dict__.items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if any(watch.has_made(tensor) for tensor in tree.tensors_of(value)):
                original.__dict__[key] = tree.map_leaves(self._as_fake, value)
                for fake in tree.tensors_of(original.__dict__[key]):
                    watch.put_aside(fake)

    def _show_changes(self, original: Any, changed: Any, inputs: list[Any], copies: list[Any]) -> bool:
        """Show the caller what a layer has changed in its arguments; returns whether there is any such change."""
        real_of = {id(item): real for real, item in zip(inputs, copies, strict=True)}
        changes = list(show_changes(original, changed, real_of))
        self._undo += changes
        return bool(changes)

    def _as_fake(self, leaf: Any) -> Any:
        return self._fake_mode.from_tensor(leaf.detach()) if isinstance(leaf, Tensor) else leaf

    def _fake_parameter(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._fakes:
            origin = self.origin(tensor)
            self._fakes[id(tensor)] = torch.empty_strided(
                origin.size(),
                origin.stride(),
                dtype=origin.dtype,
                device=self._device,
                requires_grad=origin.requires_grad,
            )
        return self._fakes[id(tensor)]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _copied(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) and not isinstance(item, FakeTensor) else item


def _positions(items: list[Any], written: set[int]) -> tuple[int, ...]:
    return tuple(index for index, item in enumerate(items) if isinstance(item, Tensor) and storage_key(item) in written)


def _by_identity(result: Any, arguments: list[Any]) -> Any:
    """Replace leaves of ``result`` that are arguments of the same call by :class:`Argument`."""
    positions = {id(item): index for index, item in enumerate(arguments) if not isinstance(item, CONSTANTS)}

    def known(leaf: Any) -> Any:
        return Argument(positions[id(leaf)], isinstance(leaf, Tensor)) if id(leaf) in positions else leaf

    return tree.map_leaves(known, result)


def _with_leaves(value: Any, leaves: list[Any]) -> Any:
    remaining = iter(leaves)
    return tree.map_leaves(lambda leaf: next(remaining), value)


def _refuse_numbers(name: str, result: Any, arguments: list[Any]) -> None:
    kinds = (bool, int, float, complex)
    given = {(type(item), item) for item in arguments if isinstance(item, kinds)}
    for leaf in tree.leaves(result):
        if isinstance(leaf, kinds) and (type(leaf), leaf) not in given:
            raise TraceError(
                f"Layer {name!r} returns the {type(leaf).__name__} {leaf!r}, and what it does depends on the values of"
                " its input, so that other stages could not know this number. Return it as a tensor."
            )
