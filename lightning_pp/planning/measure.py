"""One run of the user's step on tensors without memory: what its layers cost, save for backward and hand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lightning_pp import compat
from lightning_pp.partition import plan as partition
from lightning_pp.partition import tree
from lightning_pp.partition.calls import Call, Leaf, Trace, TraceError
from lightning_pp.partition.cost import call_costs
from lightning_pp.partition.layers import find_layers
from lightning_pp.partition.operators import storage_key
from lightning_pp.partition.provenance import Provenance, names_of, outputs_of
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.untouched import as_if_never
from lightning_pp.planning.timing import Asked, Passes, Timer
from lightning_pp.planning.work import Held, Work
from lightning_pp.runtime import microbatch
from lightning_pp.steps.jobs import whole_step

__all__: list[str] = []

_CPU = torch.device("cpu")


def switched(module: LightningModule, layers: Sequence[str] | None) -> Switchboard:
    """The module's layers, ready to be watched."""
    board = Switchboard(find_layers(module, layers, ignored=(Metric,)))
    board.install()
    return board


def measure(
    module: LightningModule,
    board: Switchboard,
    batch: Any,
    num_microbatches: int,
    balance: str,
    context: Callable[[], AbstractContextManager[None]],
    states: dict[str, int],
    checkpointed: frozenset[str] = frozenset(),
    timer: Timer | None = None,
) -> Work:
    """Run ``training_step`` once on the largest micro-batch, without memory for anything.

    Args:
        module: The module, anywhere (on meta too).
        board: Its switched layers.
        batch: What a data loader gives.
        num_microbatches: Most micro-batches.
        balance: What stages are balanced by.
        context: The precision of the step.
        states: Bytes of optimizer state, by parameter.
        checkpointed: Layers whose activations are recomputed.
        timer: Times the layers afterwards, for which there has to be memory; None if nobody wants to know.

    Raises:
        ValueError: The step cannot run so.
    """
    parts = _split(module, batch, num_microbatches)
    sizes = [microbatch.batch_size(part) or 1 for part in parts]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Watch(board, checkpointed)
    with as_if_never(module, watch.provenance), mode, _without_memory(module, mode, watch):
        part = tree.map_leaves(lambda leaf: _fake(leaf, mode), parts[sizes.index(max(sizes))])
        watch.exclude(tree.tensors_of(part))
        rest = compat.step_arguments(module, "training_step", part, 1)[1:]
        step = whole_step(module, "training_step", part, rest, context)
        trace = watch.run(step)
    passes = None
    if timer is not None:
        passes = [timer.passes(board.layers[asked.name], asked) for asked in watch.asked]
        timed = zip(trace.calls, passes, strict=True)
        trace = replace(trace, calls=tuple(replace(call, seconds=one.forward + one.backward) for call, one in timed))
    return _work(module, batch, watch, trace, (balance, states, checkpointed), passes, sizes)


def _work(
    module: LightningModule,
    batch: Any,
    watch: _Watch,
    trace: Trace,
    given: tuple[str, dict[str, int], frozenset[str]],
    passes: Sequence[Passes] | None,
    sizes: Sequence[int],
) -> Work:
    """Put what was seen together."""
    balance, states, checkpointed = given
    board = watch.board
    costs, _ = call_costs(trace, board, balance)
    every, _ = call_costs(trace, board, "flops")
    forward = [float(call.flops) for call in trace.calls]
    if not any(forward):
        forward, every = every, [3 * all_ for all_ in every]
    again = [call.layer in checkpointed for call in trace.calls]
    return Work(
        trace=trace,
        costs=tuple(costs),
        forward=tuple(forward),
        backward=tuple(all_ - (1 - a) * one for all_, one, a in zip(every, forward, again, strict=True)),
        saved=tuple(watch.saved.get(place, {}) for place in range(len(trace.calls) + 1)),
        recomputed=tuple(sum(watch.recomputed.get(place, {}).values()) for place in range(len(trace.calls))),
        outputs=watch.outputs,
        returned=frozenset(watch.returned),
        passes=passes
        and [Passes(one.forward, one.backward + a * one.forward) for one, a in zip(passes, again, strict=True)],
        held=tuple(_held(module, board, trace, states)),
        num_microbatches=len(sizes),
        mean_size=sum(sizes) / len(sizes) / max(sizes),
        batch_size=microbatch.batch_size(batch) or 1,
        batch_bytes=sum({storage_key(t): t.untyped_storage().nbytes() for t in tree.tensors_of(batch)}.values()),
    )


class _Sources(Provenance):  # type: ignore[no-untyped-call]
    """Follows tensors without memory, which the strategy's tracer meets only where something is wrong."""

    def refuse_aside(self, tensor: Tensor, user: str) -> None:
        """Nothing is refused: the run itself will do that."""


class _Watch:
    """Lets layers compute, and takes down what they do.

    Attributes:
        provenance: Of the glue.
        board: The switched layers.
        saved: By place, the storages saved for backward there. Place p is layer call p and the code before it.
        recomputed: By layer call, what is saved there when its backward begins, not before.
        outputs: The storage of each layer output ``(call, leaf)``.
        returned: Those for which a gradient comes back.
        asked: What the layers were called with.
    """

    def __init__(self, board: Switchboard, checkpointed: frozenset[str]) -> None:
        self.provenance = _Sources()
        self.saved: dict[int, dict[int, int]] = {}
        self.recomputed: dict[int, dict[int, int]] = {}
        self.outputs: dict[tuple[int, int], int] = {}
        self.returned: set[tuple[int, int]] = set()
        self.asked: list[Asked] = []
        self.board = board
        self._checkpointed = checkpointed
        self._excluded: set[int] = set()
        self._calls: list[Call] = []
        self._place = 0
        self._alive: list[Any] = []  # a storage that dies would lend its key to another

    def exclude(self, batch: list[Tensor]) -> None:
        """Say which tensors are the batch."""
        self._excluded.update(map(storage_key, batch))
        self._alive += batch

    def add_tensor(self, tensor: Tensor, name: str, is_buffer: bool) -> None:
        """Say that ``tensor`` is a parameter or buffer."""
        self._excluded.add(storage_key(tensor))
        self._alive.append(tensor)
        self.provenance.add_parameter(tensor, name, is_buffer)

    def run(self, step: Callable[[], Any]) -> Trace:
        """Run the step."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        try:
            with self.board.answered_by(self), self.provenance, hooks:
                result = step()
        except TraceError:
            raise
        except Exception as error:
            after = f" after layer {self._calls[-1].layer!r}" if self._calls else ""
            kind = type(error).__name__
            why = f"{kind}: {error}"
            if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
                why = f"it asks a tensor for its values ({error}), which a plan does not have"
            raise ValueError(
                f"training_step was run on a batch of these shapes, without any values, and failed{after}: {why}"
            ) from error
        end = self.provenance.tail.union(*(self.provenance.of(tensor) for tensor in tree.tensors_of(result)))
        self._alive.append(result)
        return Trace(
            calls=tuple(self._calls),
            end_needs=outputs_of(end),
            end_parameters=names_of(end),
            touched=frozenset(self.provenance.touched),
            draws=False,
            draws_python=False,
        )

    def __call__(self, name: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let one layer compute."""
        inputs = tree.tensors_of((args, kwargs))
        sources = frozenset[Any]().union(*(self.provenance.of(tensor) for tensor in inputs))
        versions = [tensor._version for tensor in inputs]
        index = len(self._calls)
        self.asked.append(Asked.of(name, args, kwargs))
        counter = FlopCounterMode(display=False)
        with self.provenance.paused(), self.board.answered_by(None), self._saving(name, index, inputs), counter:
            result = compute(*args, **kwargs)
        given = {id(tensor) for tensor in inputs}
        written = [tensor for tensor, old in zip(inputs, versions, strict=True) if tensor._version != old]
        leaves = [tensor for tensor in tree.tensors_of(result) if id(tensor) not in given] + written
        for leaf, tensor in enumerate(leaves):
            self.provenance.overwrite(tensor, (index, leaf))
            self.outputs[index, leaf] = storage_key(tensor)
            if tensor.requires_grad:
                self.returned.add((index, leaf))
        self._calls.append(
            Call(
                layer=name,
                structure=None,
                leaves=tuple(Leaf(tuple(tensor.shape), tensor.dtype) for tensor in leaves),
                writes=(),
                needs=outputs_of(sources),
                parameters=names_of(sources),
                draws=False,
                flops=int(counter.get_total_flops()),
                saved_bytes=sum((self.saved.get(index, {}) | self.recomputed.get(index, {})).values()),
            )
        )
        self._alive += [inputs, leaves]
        self._place = index + 1
        self.provenance.start_calls(self._place)
        return result

    @contextmanager
    def _saving(self, name: str, index: int, inputs: list[Tensor]) -> Iterator[None]:
        """A layer that is recomputed keeps what it was called with, and saves the rest later."""
        if name not in self._checkpointed or not torch.is_grad_enabled():
            yield
            return
        later: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            later.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for tensor in inputs if later else []:  # a layer that saves nothing is not run again
            self._save(tensor)
        kept = self.saved.get(index, {})
        for tensor in later:
            if storage_key(tensor) not in kept:
                self._note(self.recomputed.setdefault(index, {}), tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        self._note(self.saved.setdefault(self._place, {}), tensor)
        return tensor

    def _note(self, where: dict[int, int], tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._excluded:
            where[key] = tensor.untyped_storage().nbytes()
            self._alive.append(tensor)


@contextmanager
def _without_memory(module: nn.Module, mode: FakeTensorMode, watch: _Watch) -> Iterator[None]:
    """Put tensors without memory in the place of all parameters and buffers."""
    names = {id(p): name for name, p in module.named_parameters()}
    names |= {id(b): name for name, b in module.named_buffers()}
    fakes: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for inner in module.modules():
            for held in (inner._parameters, inner._buffers):
                for key, tensor in list(held.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = fake = _like(tensor)
                        watch.add_tensor(fake, names[id(tensor)], held is inner._buffers)
                    stack.callback(held.__setitem__, key, tensor)  # type: ignore[arg-type]
                    held[key] = fakes[id(tensor)]  # type: ignore[assignment]
        yield


def _like(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _fake(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=_CPU) if leaf.is_meta else mode.from_tensor(leaf)


def _split(module: LightningModule, batch: Any, num_microbatches: int) -> list[Any]:
    user_split = getattr(module, "split_batch", None)
    return list((user_split or microbatch.split)(batch, num_microbatches))


def _held(module: nn.Module, board: Switchboard, trace: Trace, states: dict[str, int]) -> Iterator[Held]:
    """Who needs each parameter and buffer."""
    inside = partition.held_by_layers(module, board.layers)
    needed: dict[str, set[int]] = {}
    for index, call in enumerate(trace.calls):
        for name in (*inside[call.layer], *call.parameters):
            needed.setdefault(name, set()).add(index)
    for name in trace.end_parameters:
        needed.setdefault(name, set()).add(len(trace.calls))
    for name, parameter in module.named_parameters():
        gradient = parameter.nbytes if parameter.requires_grad else 0
        places = tuple(sorted(needed.get(name, {len(trace.calls)})))
        yield Held(name, parameter.numel(), parameter.nbytes, gradient, states.get(name, 0), places)
    for name, buffer in module.named_buffers():
        places = () if name in trace.touched else tuple(sorted(needed.get(name, ())))
        yield Held(name, 0, buffer.nbytes, 0, 0, places)
