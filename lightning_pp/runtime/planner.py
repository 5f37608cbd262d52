"""Plans each step function for each batch signature, under one cut and one ownership for the whole model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pp.partition import plan as planning
from lightning_pp.partition.alike import Alike
from lightning_pp.partition.cost import call_costs, time_call
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.trace import Trace, trace_step
from lightning_pp.runtime.job import SignaturePlan
from lightning_pp.runtime.layout import Layout
from lightning_pp.runtime.unseen import compare_first

__all__: list[str] = []

#: share of all parameters beyond which owning them on several stages deserves a warning
_TIED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class CutOptions:
    """How the user wants the model cut (see :class:`lightning_pp.PipelineStrategy`)."""

    num_stages: int
    num_microbatches: int
    split: Sequence[str] | None
    balance: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Which stages need which parameter or buffer, and where the deciding step was cut.

    Attributes:
        bounds: ``num_stages + 1`` layer-call numbers.
        ownership: ``{name: stages}`` for everything that a stage needs.
        touched: What glue uses in any way, on every stage.
        calls: The layers in the order of their calls.
        step: The step function that decided; others follow its ownership.
        updated: Buffers that every stage holds, and of which only the last one's is right after a step.
    """

    bounds: tuple[int, ...]
    ownership: Mapping[str, tuple[int, ...]]
    touched: frozenset[str]
    calls: tuple[str, ...]
    step: str
    updated: frozenset[str] = frozenset()

    def stages_of(self, name: str, is_buffer: bool, num_stages: int) -> tuple[int, ...]:
        """The stages that hold ``name``: what nobody needs lies on the last one, loose buffers on all."""
        everywhere = tuple(range(num_stages))
        if is_buffer:
            return everywhere if name in self.touched else self.ownership.get(name, everywhere)
        return self.ownership.get(name, (num_stages - 1,))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step function under one batch signature."""

    trace: Trace
    bounds: tuple[int, ...]
    signature_plan: SignaturePlan

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn anywhere in it."""
        return self.trace.draws or self.trace.draws_python or any(call.draws for call in self.trace.calls)


class Planner:
    """Keeps the plans of one model on one rank.

    Args:
        model: The LightningModule.
        board: Its switched layers.
        stages: The stages that this rank runs.
        device: Where they run.
        checkpointed: Layers whose activations are recomputed.

    Attributes:
        cut: How the model is cut; None before that is decided.
        is_tracing: Whether a step runs to be planned, at a time of this rank's own.
    """

    def __init__(
        self,
        model: nn.Module,
        board: Switchboard,
        stages: Sequence[int],
        device: torch.device,
        checkpointed: frozenset[str],
    ) -> None:
        self._model = model
        self._board = board
        self._stages = tuple(stages)
        self._device = device
        self._checkpointed = checkpointed
        self._held = planning.held_by_layers(model, board.layers)
        self._plans: dict[tuple[Any, ...], StepPlan] = {}
        self._alike: defaultdict[str, Alike] = defaultdict(Alike)
        self.cut: Cut | None = None
        self.is_tracing = False
        self._num_stages = 0

    def decide(self, name: str, step: Callable[[], Any], options: CutOptions, agree: Callable[[Cut], Cut]) -> Trace:
        """Trace ``step`` and cut the model by it.

        Args:
            name: The step function's name; it goes by its own cuts from now on.
            step: Runs it on one micro-batch.
            options: What the user asked for.
            agree: Makes all ranks take the cut of the first one; raises where theirs differ.

        Raises:
            ValueError: The model cannot be cut as asked.
        """
        timer = time_call if options.balance == "time" and options.split is None else None
        with self._tracing():
            alike = self._alike[name]
            trace = trace_step(step, self._model, self._board, self._device, twice=True, time_call=timer, alike=alike)
        if trace.returns_none and name == "training_step":
            raise ValueError(
                f"{type(self._model).__name__}.training_step must return the loss for the first batch, by which the"
                " model is cut; it returned None. Let the first batch be one that is trained on."
            )
        number = len(trace.calls)
        if options.num_stages > max(number, 1):
            raise ValueError(
                f"stages={options.num_stages}, but {type(self._model).__name__}.{name} calls only {number} layer(s):"
                f" {', '.join(call.layer for call in trace.calls) or 'none'}. Use at most {max(number, 1)} stage(s), or"
                " name smaller layers with layers=."
            )
        if name == "training_step":
            self._refuse_recomputed_writes(trace)
        bounds = self._bounds(trace, options)
        trace.refuse_divided(bounds)
        ownership = planning.owners(trace, bounds, self._held)
        cut = Cut(bounds, ownership, trace.touched, tuple(call.layer for call in trace.calls), name, trace.updated)
        self.cut = agree(cut)
        self._num_stages = options.num_stages
        self._warn_if_tied(self.cut)
        return trace

    def adopt(self, cut: Cut, num_stages: int) -> None:
        """Go by a cut that an earlier run has made, or by none at all."""
        self.cut = cut
        self._num_stages = num_stages

    def plan(self, name: str, signature: Any, step: Callable[[], Any]) -> StepPlan:
        """The plan of step function ``name`` for micro-batches of ``signature``; traced when it is new."""
        key = (name, signature)
        found = self._plans.get(key)
        if found is None:
            assert self.cut is not None, "plan() before decide()"
            with self._tracing():
                alike = self._alike[name]
                trace = trace_step(step, self._model, self._board, self._device, measured=False, alike=alike)
            found = self._plans[key] = self._planned(name, trace)
        return found

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        self.is_tracing = True
        try:
            yield
        finally:
            self.is_tracing = False

    def forget(self) -> None:
        """Drop all plans, keeping the cut."""
        self._plans.clear()
        self._alike.clear()

    def _planned(self, name: str, trace: Trace) -> StepPlan:
        assert self.cut is not None
        same = tuple(call.layer for call in trace.calls) == self.cut.calls
        if name == self.cut.step and same:
            bounds = self.cut.bounds
        else:
            names = {key for held in self._held.values() for key in held}
            buffers = {key for key, _ in self._model.named_buffers()}
            ownership = {
                key: self.cut.stages_of(key, key in buffers, self._num_stages)
                for key in names | set(self.cut.ownership)
            }
            bounds = planning.follow(trace, ownership, self._held, self._num_stages)
        trace.refuse_divided(bounds)
        parts = planning.segments(trace, bounds)
        absent = _absent_tensors(self._model, trace.touched)
        layouts = {
            stage: Layout(trace, parts[stage], self._device, self._checkpointed, absent, torch.is_grad_enabled())
            for stage in self._stages
        }
        for layout in layouts.values():
            compare_first(layout, trace.not_run)
        return StepPlan(trace, bounds, SignaturePlan(layouts))

    def _bounds(self, trace: Trace, options: CutOptions) -> tuple[int, ...]:
        if options.split is not None:
            return planning.cut_by_names(trace, options.split, self._board.layers)
        if options.num_stages == 1:
            return (0, len(trace.calls))
        costs, saved = call_costs(trace, self._board, options.balance)
        memory = (saved, options.num_microbatches) if options.balance == "memory" else None
        return planning.cut_by_balance(trace, options.num_stages, costs, memory)

    def _refuse_recomputed_writes(self, trace: Trace) -> None:
        """A layer that is run a second time would find its arguments as it has left them."""
        for call in trace.calls:
            if call.writes and call.layer in self._checkpointed:
                kept = ", ".join(sorted(self._checkpointed - {c.layer for c in trace.calls if c.writes})) or "none"
                raise ValueError(
                    f"activation_checkpointing: layer {call.layer!r} writes into its arguments in place, so that it"
                    " cannot be run again in the backward pass. Let it write into a copy (`x = x.clone()`), or name the"
                    f" layers that are recomputed without it: {kept}."
                )

    def _warn_if_tied(self, cut: Cut) -> None:
        sizes = {name: p.numel() for name, p in self._model.named_parameters()}
        tied = [name for name, stages in cut.ownership.items() if len(stages) > 1 and name in sizes]
        share = sum(sizes[name] for name in tied) / max(1, sum(sizes.values()))
        if share > _TIED_SHARE:
            warnings.warn(
                f"{share:.0%} of the parameters are needed on several stages (such as {tied[0]!r}), because"
                " the step runs those layers more than once, or uses them outside of layers. Results are right, but"
                " this memory is not saved. If the step calls the model twice, call it once on both inputs"
                " concatenated.",
                stacklevel=2,
            )


def _absent_tensors(model: nn.Module, names: frozenset[str]) -> list[tuple[dict[str, Any], str]]:
    """``(dict, key)`` of every place in ``model`` that holds one of ``names`` on the meta device."""
    named = {id(p): name for name, p in model.named_parameters()} | {id(b): name for name, b in model.named_buffers()}
    return [
        (held, key)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and tensor.is_meta and named[id(tensor)] in names
    ]
