"""What one step does with the layers of a model: which it calls, in which order, and what each call needs.

The step runs once with every layer replaced by a recorder. The recorder infers the layer's output shapes under fake
tensors (its parameters may be on the meta device) and hands real tensors of those shapes back to the user's code, so
that everything between the layers, the *glue*, runs as always. Meanwhile :class:`Provenance` follows the glue. Hence

    ``live(c) = union of needs[j] for j >= c (and of the end), restricted to outputs of calls before c``

is exactly what has to cross a cut in front of call ``c``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_pp.partition import tree
from lightning_pp.partition.alike import Alike, Answer, Answers
from lightning_pp.partition.both import merged, refuse_other_calls
from lightning_pp.partition.calls import CONSTANTS, TimeCall
from lightning_pp.partition.calls import Argument as Argument
from lightning_pp.partition.calls import Call as Call
from lightning_pp.partition.calls import Leaf as Leaf
from lightning_pp.partition.calls import Trace as Trace
from lightning_pp.partition.calls import TraceError as TraceError
from lightning_pp.partition.calls import rebuild as rebuild
from lightning_pp.partition.calls import stand_in_for as stand_in_for
from lightning_pp.partition.infer import Inference, Inferred
from lightning_pp.partition.provenance import NOTHING, Provenance, Source, kept_of, names_of, outputs_of
from lightning_pp.partition.random_state import capture_python
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.untouched import as_if_never, kept_names, kept_tensors

__all__: list[str] = []


def trace_step(
    step: Callable[[], Any],
    model: nn.Module,
    board: Switchboard,
    device: torch.device,
    twice: bool = False,
    time_call: TimeCall | None = None,
    measured: bool = True,
    alike: Alike | None = None,
) -> Trace:
    """Trace ``step``; nothing that it does to the model, the batch or a random state remains.

    Args:
        step: Runs the user's step on one micro-batch; gives what it returns, or a tuple of that and of further values.
        model: The module that ``step`` belongs to, with the layers of ``board`` inside.
        board: The switched layers.
        device: Where the layers will run.
        twice: Run a second time, to find values of layers that one step keeps for the next.
        time_call: ``(layer, args, kwargs, device) -> seconds``, asked once for each call.
        measured: Count operations and saved bytes of the calls, and run all layers; else they are 0.
        alike: What earlier traces of the step have shown of its layers; learns from this one. None runs all layers.

    Raises:
        TraceError: The step cannot be cut.
    """
    may_take = not (measured or twice or alike is None)
    try:
        return _traced(step, _Tracer(model, board, device, alike, may_take), twice, time_call, measured)
    except TraceError:
        if not may_take:
            raise
    # with all layers run, to be sure of it and to give the true reason
    return _traced(step, _Tracer(model, board, device, alike), twice, time_call, measured)


def _traced(step: Callable[[], Any], tracer: _Tracer, twice: bool, time_call: TimeCall | None, measured: bool) -> Trace:
    with as_if_never(tracer.model, tracer.provenance), tracer.stand_ins():
        trace = tracer.run(step, time_call, measured)
        return tracer.run_again(step, trace) if twice else trace


@dataclass(frozen=True, slots=True)
class _Recording:
    """A :class:`Call` whose leaves may still be written into, and where its arguments come from."""

    call: Call
    sources: frozenset[Source]


class _Tracer:
    """Runs a step with itself as the answer to every layer call."""

    def __init__(
        self,
        model: nn.Module,
        board: Switchboard,
        device: torch.device,
        alike: Alike | None = None,
        may_take: bool = False,
    ) -> None:
        self.model = model
        self.board = board
        self.device = device
        self.provenance = Provenance()
        self._inference = Inference(model, device, self.provenance)
        self._answers = None if alike is None else Answers(alike, board.layers, self._inference, may_take)
        self._time_call: TimeCall | None = None
        self._not_run: dict[int, str] = {}
        self._calls: list[_Recording] = []
        self._given: list[list[Tensor]] = []
        self._kept: dict[int, str] = {}
        self._trains = torch.is_grad_enabled()
        self._regions: list[FrameType] = []
        self._training_regions: set[int] = set()

    def run(self, step: Callable[[], Any], time_call: TimeCall | None = None, measured: bool = False) -> Trace:
        self._calls, self._given, self._time_call = [], [], time_call
        self._inference.is_measuring = measured
        if self._answers is not None:
            self._answers.start()
        before = capture_python()
        with self.board.answered_by(self), self.provenance, self.provenance.seeing_conversions():
            try:
                result = step()
            except TraceError:
                raise
            except Exception as error:
                raise TraceError(self._failure(error)) from error
            finally:
                self._inference.undo_changes()
        end = self.provenance.tail.union(*(self._returned(tensor) for tensor in tree.tensors_of(result)))
        self._refuse_early_reads()
        kept = NOTHING.union(*(self.provenance.of(tensor) for _, tensor in kept_tensors(self.model)))
        everywhere = NOTHING.union(*(read.sources for read in self.provenance.reads))
        return Trace(
            calls=tuple(self._finished(index, names_of(everywhere)) for index in range(len(self._calls))),
            end_needs=outputs_of(end | kept),
            end_parameters=names_of(end | everywhere),
            touched=frozenset(self.provenance.touched),
            draws=self.provenance.draws,
            draws_python=before != capture_python(),
            updated=frozenset(
                name for name, buffer in self.model.named_buffers() if outputs_of(self.provenance.of(buffer))
            ),
            returns_none=result is None or (isinstance(result, tuple) and bool(result) and result[0] is None),
            not_run=self._not_run,
        )

    def run_again(self, step: Callable[[], Any], first: Trace) -> Trace:
        """Run a second time.

        Returns:
            One trace that holds for the first step and for those after it.
        """
        self._kept = kept_names(self.model)
        origins = self.provenance.next_run()
        second = self.run(step)
        refuse_other_calls(first, second)
        for recording in self._calls:
            for key in kept_of(recording.sources):
                raise TraceError(self._stale(key, f"layer {recording.call.layer!r} of the next"))
        kept = kept_of(self.provenance.tail)
        return merged(first, second, frozenset().union(*(origins[key] for key in kept)))

    def __call__(self, name: str, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer one layer call."""
        with self.provenance.paused(), self.board.answered_by(None):
            inputs = tree.leaves((args, kwargs))
            answer = self._answer(name, args, kwargs)
            inferred, structure, tensors = answer.inferred, answer.structure, answer.tensors
            seconds = 0.0
            if self._time_call is not None:
                layer = self._inference.real_copy(self.board.layers[name])
                seconds = self._time_call(layer, args, kwargs, self.device)
            self._record(name, structure, tensors, inputs, inferred, seconds)
            return self._outputs(structure, tensors, inputs, inferred.written)

    def _answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        answers = self._answers
        if answers is None:
            return self._inferred(name, args, kwargs)
        asked = answers.asked(name, args, kwargs)
        found = answers.find(asked)
        if found is not None:
            self._not_run[len(self._calls)] = found.layer
            return found
        with answers.watching(asked):
            answer = self._inferred(name, args, kwargs)
        answers.learn(asked, answer)
        return answer

    def _inferred(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        inferred = self._inference(name, self.board.layers[name], args, kwargs)
        tensors, structure = tree.flatten(inferred.result)
        _refuse_objects(name, structure)
        return Answer(name, inferred, structure, tensors)

    def _record(
        self,
        name: str,
        structure: object,
        tensors: list[Tensor],
        inputs: list[Any],
        inferred: Inferred,
        seconds: float,
    ) -> None:
        leaves = [*tensors, *(inputs[position] for position in inferred.written)]
        call = Call(
            layer=name,
            structure=structure,
            leaves=tuple(Leaf(tuple(leaf.shape), leaf.dtype) for leaf in leaves),
            writes=inferred.written,
            needs=frozenset(),
            parameters=frozenset(),
            draws=inferred.watch.draws,
            flops=inferred.cost.flops,
            saved_bytes=inferred.cost.saved_bytes,
            seconds=seconds,
            region=self._region(),
            resumes=frozenset(inferred.watch.resumes - {len(self._calls)}),
        )
        given = [self.provenance.of(item) for item in inputs if isinstance(item, Tensor)]
        self._calls.append(_Recording(call, inferred.watch.sources.union(*given)))
        self.provenance.start_calls(len(self._calls))

    def _outputs(self, structure: object, tensors: list[Tensor], inputs: list[Any], written: tuple[int, ...]) -> Any:
        """What the user's code gets: real tensors whose sources are known."""
        index = len(self._calls) - 1
        outputs = [self._inference.filled(tensor.shape, tensor.dtype) for tensor in tensors]
        outputs = [  # not leaves: the user's code may write into them, or hook them
            output.requires_grad_().clone() if tensor.requires_grad else output
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        self._inference.note_gradients((index, leaf) for leaf, tensor in enumerate(tensors) if tensor.requires_grad)
        self._given.append(outputs)
        for leaf, output in enumerate(outputs):
            self.provenance.add_output(output, (index, leaf))
        for leaf, position in enumerate(written, start=len(tensors)):
            self.provenance.overwrite(inputs[position], (index, leaf))
        return rebuild(structure, outputs, inputs)

    def _region(self) -> int | None:
        """Which reentrant gradient checkpoint is running the code."""
        if torch.is_grad_enabled() or not self._trains:
            return None
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                if frame not in self._regions:
                    self._regions.append(frame)
                    if any(frame.f_locals["ctx"].needs_input_grad):
                        self._training_regions.add(len(self._regions) - 1)
                return self._regions.index(frame)
            frame = frame.f_back
        return None

    def _returned(self, tensor: Tensor) -> frozenset[Source]:
        self.provenance.refuse_aside(tensor, "The result of the step")
        return self.provenance.of(tensor)

    def _finished(self, index: int, everywhere: frozenset[str]) -> Call:
        call, sources = self._calls[index].call, self._calls[index].sources
        # a hook on what is handed on would run on both sides of the cut
        touched = {(index, leaf) for leaf, output in enumerate(self._given[index]) if output._backward_hooks}
        touched |= self.provenance.written
        leaves = tuple(
            Leaf(leaf.shape, leaf.dtype, (index, number) in touched) for number, leaf in enumerate(call.leaves)
        )
        needs, parameters = outputs_of(sources), names_of(sources) | everywhere
        return replace(call, inner=self._inner(call, leaves, index), leaves=leaves, needs=needs, parameters=parameters)

    def _inner(self, call: Call, leaves: tuple[Leaf, ...], index: int) -> frozenset[int]:
        if call.region not in self._training_regions:
            return frozenset()
        given = enumerate(zip(self._given[index], leaves, strict=False))
        floats = [(number, leaf, output) for number, (output, leaf) in given if output.is_floating_point()]
        return frozenset(number for number, leaf, output in floats if leaf.written or output.grad_fn is None)

    # -- what cannot be cut -----------------------------------------------------------------------------------------

    def _refuse_early_reads(self) -> None:
        for read in self.provenance.reads:
            if read.num_calls == len(self._calls):
                continue
            following = self._calls[read.num_calls].call.layer
            outputs = outputs_of(read.sources)
            if outputs:
                raise TraceError(
                    f"The step reads a value that comes from layer {self._calls[max(outputs)[0]].call.layer!r} while"
                    f" layer {following!r} is still to run: {read.where}. On the other stages that value does not"
                    " exist. Move the reading behind the last layer, or into a layer."
                )
            for key in kept_of(read.sources):
                raise TraceError(self._stale(key, f"code of the next that runs before its layers: {read.where}"))

    def _stale(self, key: int, user: str) -> str:
        name = self._kept.get(key, "An object outside of the module")
        return (
            f"{name} carries a value that layers computed from one step into {user}. Stages run at different times, so"
            " the next step would see a stale value on some of them. Set it to None (or to a value that no layer made)"
            " at the end of training_step, or train this model without the pipeline."
        )

    def _failure(self, error: Exception) -> str:
        after = f" after layer {self._calls[-1].call.layer!r}" if self._calls else ""
        return (
            f"Planning ran the step on made-up layer outputs, and it failed{after} with {type(error).__name__}:"
            f" {error}. If it runs without the strategy, it depends on the values of layer outputs in a way that cannot"
            " be cut."
        )

    # -- parameters that are not here -------------------------------------------------------------------------------

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Let glue use parameters and buffers that are on the meta device, and know them all by name."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        names |= {id(b): name for name, b in self.model.named_buffers()}
        with ExitStack() as stack:
            for module in self.model.modules():
                for held in (module._parameters, module._buffers):
                    self._stand_in(held, names, held is module._buffers, stack)
            yield

    def _stand_in(self, held: dict[str, Any], names: dict[int, str], are_buffers: bool, stack: ExitStack) -> None:
        for key, tensor in list(held.items()):
            if tensor is None:
                continue
            if tensor.device != self.device:
                is_real_buffer = are_buffers and not tensor.is_meta
                held[key] = tensor.to(self.device) if is_real_buffer else stand_in_for(tensor, self.device)
                self._inference.register(held[key], tensor)
                stack.callback(held.__setitem__, key, tensor)
            self.provenance.add_parameter(held[key], names[id(tensor)], are_buffers)


def _refuse_objects(name: str, structure: object) -> None:
    for leaf in tree.leaves(structure):
        if not isinstance(leaf, (*CONSTANTS, Argument)):
            raise TraceError(
                f"Layer {name!r} returns a {type(leaf).__module__}.{type(leaf).__qualname__}, which cannot cross"
                " from one stage to another. Return tensors, None, numbers, strings or (nested) dicts, lists,"
                " tuples and dataclasses of them, or register the class with torch.utils._pytree."
            )
