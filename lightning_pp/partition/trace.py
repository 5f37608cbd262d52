"""What one step does with the layers of a model: which it calls, in which order, and what each call needs.

The step runs once with every layer replaced by a recorder. The recorder infers the layer's output shapes under fake
tensors (its parameters may be on the meta device) and hands real tensors of those shapes back to the user's code, so
that everything between the layers, the *glue*, runs as always. Meanwhile :class:`Provenance` follows the glue. Hence

    ``live(c) = union of needs[j] for j >= c (and of the end), restricted to outputs of calls before c``

is exactly what has to cross a cut in front of call ``c``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_pp.partition import tree
from lightning_pp.partition.provenance import LayerWatch, Provenance, Source
from lightning_pp.partition.random_state import capture_python, preserved
from lightning_pp.partition.switch import Switchboard

__all__: list[str] = []

#: ``(layer, args, kwargs, device) -> seconds``
TimeCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], torch.device], float]

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, tree.Slot)


class TraceError(ValueError):
    """A step cannot be cut into stages as it stands; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Argument(tree.Marker):
    """In the structure of a layer's output: the same object that was leaf number ``index`` of its arguments."""

    index: int
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a layer's output.

    Attributes:
        written: Whether the step writes into it in place later on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    written: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: The layer's name.
        structure: Its output, with :class:`tree.Slot` or :class:`Argument` in place of tensors.
        leaves: The output's tensors, then those arguments that the layer wrote into, as they are afterwards.
        writes: Which leaves of its arguments those are.
        needs: Layer outputs that its arguments were computed from by glue.
        parameters: Parameters that its arguments were computed from by glue (not its own).
        draws: Whether the layer draws random numbers.
        flops: Floating-point operations of its forward.
        saved_bytes: Bytes it keeps for its backward, parameters excluded.
        seconds: What the trace's ``time_call`` said; 0 without one.
    """

    layer: str
    structure: object
    leaves: tuple[Leaf, ...]
    writes: tuple[int, ...]
    needs: frozenset[tuple[int, int]]
    parameters: frozenset[str]
    draws: bool
    flops: int
    saved_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """The layer calls of one step, and what its end (loss, logging, return value) needs.

    Attributes:
        calls: In the order of the step.
        end_needs: Layer outputs that the end needs.
        end_parameters: Parameters that the end needs.
        touched: Parameters and buffers that glue uses in any way.
        draws: Whether glue draws from torch's generators.
        draws_python: Whether the step draws from :mod:`random` or numpy.
    """

    calls: tuple[Call, ...]
    end_needs: frozenset[tuple[int, int]]
    end_parameters: frozenset[str]
    touched: frozenset[str]
    draws: bool
    draws_python: bool

    def live(self, call: int) -> tuple[tuple[int, int], ...]:
        """The layer outputs ``(call, leaf)`` that cross a cut in front of call number ``call``, in order."""
        needed = self.end_needs.union(*(later.needs for later in self.calls[call:]))
        return tuple(sorted(output for output in needed if output[0] < call))

    def bytes_at(self, call: int) -> int:
        """Bytes that cross a cut in front of call number ``call``."""
        leaves = (self.calls[i].leaves[leaf] for i, leaf in self.live(call))
        return sum(_numel(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are called, each once."""
        return tuple(dict.fromkeys(call.layer for call in self.calls))


def trace_step(
    step: Callable[[], Any],
    model: nn.Module,
    board: Switchboard,
    device: torch.device,
    twice: bool = False,
    time_call: TimeCall | None = None,
) -> Trace:
    """Trace ``step``; nothing that it does to the model, the batch or a random state remains.

    Args:
        step: Runs the user's step on one micro-batch.
        model: The module that ``step`` belongs to, with the layers of ``board`` inside.
        board: The switched layers.
        device: Where the layers will run.
        twice: Run a second time, to find values of layers that one step keeps for the next.
        time_call: ``(layer, args, kwargs, device) -> seconds``, asked once for each call.

    Raises:
        TraceError: The step cannot be cut.
    """
    tracer = _Tracer(model, board, device)
    tracer.time_call = time_call
    with _as_if_never(model, tracer.provenance), tracer.stand_ins():
        trace = tracer.run(step)
        if twice:
            kept = _kept_attributes(model, tracer.provenance)
            origins = tracer.provenance.next_run()
            tracer.time_call = None
            trace = _merge(trace, tracer.run(step), kept, origins)
    return trace


@dataclass
class _Recording:
    """A :class:`Call` while it may still change."""

    call: Call
    sources: frozenset[Source]


class _Tracer:
    """Runs a step with itself as the answer to every layer call."""

    def __init__(self, model: nn.Module, board: Switchboard, device: torch.device) -> None:
        self.model = model
        self.board = board
        self.device = device
        self.provenance = Provenance()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, Tensor] = {}
        self.time_call: TimeCall | None = None
        self._calls: list[_Recording] = []
        self._fill = torch.Generator(device).manual_seed(0)

    def run(self, step: Callable[[], Any]) -> Trace:
        self._calls = []
        before = capture_python()
        with self.board.answered_by(self), self.provenance:
            try:
                result = step()
            except TraceError:
                raise
            except Exception as error:
                raise TraceError(self._failure(error)) from error
        end = self.provenance.tail.union(*(self.provenance.of(tensor) for tensor in tree.tensors_of(result)))
        self._refuse_early_reads()
        outputs, parameters = _split(end)
        return Trace(
            calls=tuple(self._finished(index, recording) for index, recording in enumerate(self._calls)),
            end_needs=outputs,
            end_parameters=parameters,
            touched=frozenset(name for name in self.provenance.touched if not name.startswith("kept:")),
            draws=self.provenance.draws,
            draws_python=before != capture_python(),
        )

    def __call__(self, name: str, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer one layer call."""
        with self.provenance.paused(), self.board.answered_by(None):
            inputs = tree.leaves((args, kwargs))
            result, watch, cost = self._infer(name, args, kwargs, inputs)
            tensors, structure = tree.flatten(result)
            self._refuse_objects(name, structure)
            index = len(self._calls)
            sources = frozenset().union(
                *(self.provenance.of(item) for item in (*inputs, *watch.closed_over) if isinstance(item, Tensor))
            )
            writes = tuple(
                position
                for position, item in enumerate(inputs)
                if isinstance(item, Tensor) and self.provenance.key(item) in watch.written
            )
            call = Call(
                layer=name,
                structure=structure,
                leaves=tuple(Leaf(tuple(t.shape), t.dtype) for t in (*tensors, *(inputs[i] for i in writes))),
                writes=writes,
                needs=frozenset(),
                parameters=frozenset(),
                draws=watch.draws,
                flops=cost.flops,
                saved_bytes=cost.saved_bytes,
                seconds=self.time_call(self.board.layers[name], args, kwargs, self.device) if self.time_call else 0.0,
            )
            self._calls.append(_Recording(call, sources))
            self.provenance.start_calls(len(self._calls))
            outputs = [self._filled(tensor.shape, tensor.dtype) for tensor in tensors]
            for leaf, output in enumerate(outputs):
                self.provenance.add_output(output, (index, leaf))
            for leaf, position in enumerate(writes, start=len(tensors)):
                self.provenance.overwrite(inputs[position], (index, leaf))
            return rebuild(structure, outputs, inputs)

    # -- inferring a layer's output ---------------------------------------------------------------------------------

    def _infer(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> tuple[Any, LayerWatch, _Cost]:
        layer = self.board.layers[name]
        fakes = [self._fake(item) if isinstance(item, Tensor) else item for item in inputs]
        cost = _Cost()
        try:
            with self._fake_mode:
                parameters = {key: self._fake_parameter(p) for key, p in layer.named_parameters()}
                parameters |= {key: self._fake_parameter(b) for key, b in layer.named_buffers()}
            watch = LayerWatch(lambda tensor: isinstance(tensor, FakeTensor))
            with torch.compiler.set_stance("force_eager"), self._fake_mode, cost.measuring(parameters), watch:
                fake_args, fake_kwargs = _with_leaves((args, kwargs), fakes)
                result = torch.func.functional_call(layer, parameters, fake_args, fake_kwargs)
        except Exception as fake_error:  # whatever a layer does not bear as a fake, it may bear for real
            return self._infer_for_real(name, args, kwargs, inputs, fake_error)
        written = {
            self.provenance.key(real)
            for real, fake in zip(inputs, fakes, strict=True)
            if isinstance(fake, Tensor) and self.provenance.key(fake) in watch.written
        }
        watch.written = written
        return _by_identity(result, fakes), watch, cost

    def _infer_for_real(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any], fake_error: Exception
    ) -> tuple[Any, LayerWatch, _Cost]:
        """Run an empty copy of the layer: only its shapes matter (data-dependent routing is one that needs it)."""
        layer = copy.deepcopy(self.board.layers[name]).to_empty(device=self.device)
        for parameter in (*layer.parameters(), *layer.buffers()):
            parameter.data = self._filled(parameter.shape, parameter.dtype)
        copies = [item.detach().clone() if isinstance(item, Tensor) else item for item in inputs]
        watch, cost = LayerWatch(lambda tensor: True), _Cost()
        try:
            with cost.measuring(dict(layer.named_parameters())), watch:
                copied_args, copied_kwargs = _with_leaves((args, kwargs), copies)
                result = layer(*copied_args, **copied_kwargs)
        except Exception as error:
            raise TraceError(
                f"Layer {name!r} ({type(layer).__name__}) could not be planned: its output shapes can neither be"
                f" inferred with fake tensors ({type(fake_error).__name__}: {fake_error}) nor by running an empty copy"
                f" of it ({type(error).__name__}: {error}). Does the step run without the strategy?"
            ) from error
        watch.written = {
            self.provenance.key(real)
            for real, item in zip(inputs, copies, strict=True)
            if isinstance(item, Tensor) and self.provenance.key(item) in watch.written
        }
        return _by_identity(result, copies), watch, cost

    def _fake(self, tensor: Tensor) -> Tensor:
        return self._fake_mode.from_tensor(tensor)

    def _fake_parameter(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._fakes:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
            self._fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        return self._fakes[id(tensor)]

    def _filled(self, shape: Any, dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device).uniform_(0.1, 1.0, generator=self._fill)

    # -- what cannot be cut -----------------------------------------------------------------------------------------

    def _refuse_objects(self, name: str, structure: object) -> None:
        for leaf in tree.leaves(structure):
            if not isinstance(leaf, (*_CONSTANTS, Argument)):
                raise TraceError(
                    f"Layer {name!r} returns a {type(leaf).__module__}.{type(leaf).__qualname__}, which cannot cross"
                    " from one stage to another. Return tensors, None, numbers, strings or (nested) dicts, lists,"
                    " tuples and dataclasses of them, or register the class with torch.utils._pytree."
                )

    def _refuse_early_reads(self) -> None:
        for calls_before, where in self.provenance.reads:
            if calls_before < len(self._calls):
                raise TraceError(
                    f"The step reads a value that comes from layer {self._calls[calls_before - 1].call.layer!r} (or one"
                    f" before it) while layer {self._calls[calls_before].call.layer!r} is still to run: {where}. On the"
                    " other stages that value does not exist. Move the reading behind the last layer, or into a layer."
                )

    def _failure(self, error: Exception) -> str:
        after = f" after layer {self._calls[-1].call.layer!r}" if self._calls else ""
        return (
            f"Planning ran the step on made-up layer outputs, and it failed{after} with {type(error).__name__}: {error}."
            " If it runs without the strategy, it depends on the values of layer outputs in a way that cannot be cut."
        )

    def _finished(self, index: int, recording: _Recording) -> Call:
        outputs, parameters = _split(recording.sources)
        call = recording.call
        written = self.provenance.written
        leaves = tuple(
            Leaf(leaf.shape, leaf.dtype, (index, number) in written) for number, leaf in enumerate(call.leaves)
        )
        return replace(call, leaves=leaves, needs=outputs, parameters=parameters)

    # -- parameters that are not here -------------------------------------------------------------------------------

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Let glue use parameters and buffers that are on the meta device, and know them all by name."""
        with ExitStack() as stack:
            names = {id(p): name for name, p in self.model.named_parameters()}
            names |= {id(b): name for name, b in self.model.named_buffers()}
            for module in self.model.modules():
                for held in (module._parameters, module._buffers):
                    for key, tensor in list(held.items()):
                        if tensor is None:
                            continue
                        if tensor.device != self.device:
                            real_buffer = held is module._buffers and not tensor.is_meta
                            stand_in = tensor.to(self.device) if real_buffer else stand_in_for(tensor, self.device)
                            self._fakes[id(stand_in)] = self._fake_for_stand_in(tensor)
                            held[key] = stand_in  # type: ignore[assignment]
                            stack.callback(held.__setitem__, key, tensor)
                        self.provenance.add(held[key], frozenset([names[id(tensor)]]))  # type: ignore[arg-type]
            yield

    def _fake_for_stand_in(self, tensor: Tensor) -> Tensor:
        with self._fake_mode:
            return self._fake_parameter(tensor)


@dataclass
class _Cost:
    """What one layer call costs."""

    flops: int = 0
    saved_bytes: int = 0
    _storages: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def measuring(self, parameters: dict[str, Tensor]) -> Iterator[None]:
        own = {tensor.untyped_storage()._cdata for tensor in parameters.values()}
        keep: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                self._storages[storage._cdata] = storage.nbytes()
                keep.append(tensor)
            return tensor

        counter = FlopCounterMode(display=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
            yield
        self.flops = int(counter.get_total_flops())
        self.saved_bytes = sum(self._storages.values())


def rebuild(structure: object, tensors: list[Tensor], inputs: list[Any]) -> Any:
    """A layer's output from its structure, its tensors and the leaves of the arguments it was called with."""
    if isinstance(structure, tree.Slot):
        return tensors[structure.index]

    def put(leaf: Any) -> Any:
        if isinstance(leaf, tree.Slot):
            return tensors[leaf.index]
        return inputs[leaf.index] if isinstance(leaf, Argument) else leaf

    return tree.map_leaves(put, structure)


def stand_in_for(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of zeros in the shape of ``tensor`` that takes one element of memory."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _by_identity(result: Any, arguments: list[Any]) -> Any:
    """Replace leaves of ``result`` that are arguments of the same call by :class:`Argument`."""
    positions = {id(item): index for index, item in enumerate(arguments) if not isinstance(item, _CONSTANTS)}

    def known(leaf: Any) -> Any:
        return Argument(positions[id(leaf)], isinstance(leaf, Tensor)) if id(leaf) in positions else leaf

    return tree.map_leaves(known, result)


def _with_leaves(value: Any, leaves: list[Any]) -> Any:
    remaining = iter(leaves)
    return tree.map_leaves(lambda leaf: next(remaining), value)


def _split(sources: frozenset[Source]) -> tuple[frozenset[tuple[int, int]], frozenset[str]]:
    outputs = frozenset(source for source in sources if isinstance(source, tuple))
    return outputs, frozenset(source for source in sources if isinstance(source, str))


def _numel(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


# -- leaving no trace ------------------------------------------------------------------------------------------------


@contextmanager
def _as_if_never(model: nn.Module, provenance: Provenance) -> Iterator[None]:
    """Restore the model's attributes, written tensors, and every random state afterwards."""
    attributes = [(module.__dict__, dict(module.__dict__), _containers(module)) for module in model.modules()]
    with preserved():
        try:
            yield
        finally:
            provenance.undo_writes()
            for live, before, containers in attributes:
                live.clear()
                live.update(before)
                for container, content in containers:
                    _refill(container, content)


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    kinds = (list, dict, set)
    return [(value, copy.copy(value)) for value in module.__dict__.values() if isinstance(value, kinds)]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


# -- values kept from one step to the next ---------------------------------------------------------------------------


def _kept_attributes(model: nn.Module, provenance: Provenance) -> dict[int, str]:
    """Attributes of modules that hold values of layers after a step, by storage key."""
    kept: dict[int, str] = {}
    for name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if attribute.startswith("_") and attribute in nn.Module().__dict__:
                continue
            for tensor in tree.tensors_of(value):
                kept[provenance.key(tensor)] = ".".join(filter(None, ("self", name, attribute)))
    return kept


def _merge(first: Trace, second: Trace, kept: dict[int, str], origins: dict[int, frozenset[Source]]) -> Trace:
    """One trace that holds for the first step and for those after it."""
    if [call.layer for call in first.calls] != [call.layer for call in second.calls]:
        raise TraceError(
            "The step calls other layers the second time it runs: first"
            f" {[call.layer for call in first.calls]}, then {[call.layer for call in second.calls]}. The order of layer"
            " calls is the order of the pipeline and has to stay the same."
        )
    for call in second.calls:
        for source in call.parameters:
            if source.startswith("kept:"):
                name = kept.get(int(source[len("kept:") :]), "an object outside of the module")
                raise TraceError(
                    f"{name} carries a value that layers computed from one step into layer {call.layer!r} of the next."
                    " Stages run at different times, so the next step would see a stale value on some of them. Set it"
                    " to None (or to a value that no layer made) at the end of training_step, or train this model"
                    " without the pipeline."
                )
    calls = []
    for one, two in zip(first.calls, second.calls, strict=True):
        leaves = tuple(
            Leaf(a.shape, a.dtype, a.written or b.written) for a, b in zip(one.leaves, two.leaves, strict=True)
        )
        calls.append(
            replace(
                one,
                leaves=leaves,
                needs=one.needs | two.needs,
                parameters=one.parameters | two.parameters,
                draws=one.draws or two.draws,
            )
        )
    stale = {source for source in second.end_parameters if source.startswith("kept:")}
    kept_keys = {key for key in origins if key in kept} | {int(source[len("kept:") :]) for source in stale}
    from_before = frozenset().union(*(origins[key] for key in kept_keys))
    return Trace(
        calls=tuple(calls),
        end_needs=first.end_needs | second.end_needs | from_before,  # type: ignore[arg-type]
        end_parameters=(first.end_parameters | second.end_parameters) - stale,
        touched=first.touched | second.touched,
        draws=first.draws or second.draws,
        draws_python=first.draws_python or second.draws_python,
    )

