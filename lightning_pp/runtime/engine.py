"""Runs one batch: a table of handlers and one loop over this rank's lowered program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pp.partition import tree
from lightning_pp.runtime.channel import Receiver, Sender, Spec, Specs, gradient_specs
from lightning_pp.runtime.comm import PeerLost
from lightning_pp.runtime.stage import Layout, Stage
from lightning_pp.schedule import Edge, Kind, Lowered, Op, edge_of, mark, message_of

__all__: list[str] = []


class PipelineError(RuntimeError):
    """A step failed; names rank, stage, op, micro-batch and layer, and shows the program with the op marked."""


class SignaturePlan:
    """What is known of micro-batches of one signature.

    Attributes:
        layouts: One per stage of this rank.
        specs: ``{receiving stage: what crosses into it}``, learnt from the first message.
    """

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        self.layouts = layouts
        self.specs: dict[int, Specs] = {}


@dataclass
class Job:
    """One batch to run.

    Attributes:
        lowered: The schedule with its messages.
        step: ``step(mb)`` runs the user's step on micro-batch ``mb`` in its contexts and returns its result.
        loss_of: Takes the loss out of a result; None for a forward-only job.
        plans: One per micro-batch.
        scales: What each micro-batch's loss is multiplied by.
        results: What the last stage's steps returned, by micro-batch.
    """

    lowered: Lowered
    step: Callable[[int], Any]
    plans: Sequence[SignaturePlan]
    loss_of: Callable[[Any], Tensor] | None = None
    scales: Sequence[float] = ()
    results: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Saved:
    """What one micro-batch leaves behind on one stage until its backward."""

    layout: Layout
    received: list[Tensor]
    roots: list[Tensor | GradientEdge]
    root_grads: list[Tensor | None]


class Engine:
    """This rank's part of the pipeline.

    Args:
        rank: This rank's position in its pipeline.
        placement: The rank of each stage.
        stage: Runs the user's step.
        senders: This rank's ends of its outgoing edges.
        receivers: This rank's ends of its incoming edges.

    Attributes:
        in_flight_peak: Most micro-batches that were held for backward at once, since the last reset.
        buffers_peak: Most messages that were posted or held by receivers at once, since the last reset.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        stage: Stage,
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
    ) -> None:
        self._rank = rank
        self._placement = tuple(placement)
        self._last_stage = len(placement) - 1
        self._stage = stage
        self._senders = dict(senders)
        self._receivers = dict(receivers)
        self._inbox: dict[tuple[int, int], list[Tensor]] = {}
        self._outbox: dict[tuple[int, int], list[Tensor]] = {}
        self._grads_in: dict[tuple[int, int], list[Tensor]] = {}
        self._grads_out: dict[tuple[int, int], list[Tensor]] = {}
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._job: Job | None = None
        self._handlers: dict[Kind, Callable[[Op], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send_activation,
            Kind.RECV_F: self._receive_activation,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
        }
        self.in_flight_peak = 0
        self.buffers_peak = 0

    def run(self, job: Job) -> dict[int, Any]:
        """Run this rank's program; returns the results of the last stage, by micro-batch.

        Raises:
            PipelineError: Something failed here; the cause is chained.
        """
        self._job = job
        program = job.lowered.programs[self._rank]
        self._expect_messages(job)
        handlers = self._handlers
        index = 0
        try:
            for index, op in enumerate(program):  # noqa: B007 - the failure needs it
                handlers[op.kind](op)
            for sender in self._senders.values():
                sender.finish()
        except Exception as error:
            raise PipelineError(self._failure(program, index, error)) from error
        finally:
            self._job = None
        return job.results

    def close(self) -> None:
        """Let go of the channels and of everything that a failed run has left."""
        self._senders.clear()
        self._receivers.clear()
        for kept in (self._inbox, self._outbox, self._grads_in, self._grads_out, self._saved):
            kept.clear()

    def reset_peaks(self) -> None:
        """Start counting anew."""
        self.in_flight_peak = 0
        self.buffers_peak = 0

    # -- compute ----------------------------------------------------------------------------------------------------

    def _forward(self, op: Op) -> None:
        job = self._job
        assert job is not None
        key = (op.stage, op.mb)
        received = self._inbox.pop(key, [])
        layout = job.plans[op.mb].layouts[op.stage]
        result, gives = self._stage.forward(layout, lambda: job.step(op.mb), received)
        if op.stage == self._last_stage:
            self._finish_forward(job, key, layout, result, received)
            return
        if job.loss_of is not None:
            roots = [get_gradient_edge(tensor) for tensor in gives if tensor.requires_grad]
            self._save(key, _Saved(layout, received, list(roots), []))
        self._outbox[key] = gives

    def _finish_forward(
        self, job: Job, key: tuple[int, int], layout: Layout, result: Any, received: list[Tensor]
    ) -> None:
        job.results[key[1]] = _detached(result)
        if job.loss_of is not None:
            loss = job.loss_of(result)
            scale = torch.full_like(loss, job.scales[key[1]])
            self._save(key, _Saved(layout, received, [loss], [scale]))

    def _save(self, key: tuple[int, int], saved: _Saved) -> None:
        self._saved[key] = saved
        self.in_flight_peak = max(self.in_flight_peak, len(self._saved))

    def _backward(self, op: Op) -> None:
        key = (op.stage, op.mb)
        saved = self._saved.pop(key)
        grads = saved.root_grads or self._grads_in.pop(key, [])
        if saved.roots:
            self._stage.backward(saved.layout, saved.roots, grads)
        self._grads_out[key] = [
            tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in saved.received
            if tensor.requires_grad
        ]

    # -- messages ---------------------------------------------------------------------------------------------------

    def _send_activation(self, op: Op) -> None:
        assert self._job is not None
        plan = self._job.plans[op.mb]
        tensors = self._outbox.pop((op.stage, op.mb))
        sender = self._senders[edge_of(op, self._placement)]
        specs = tuple(map(Spec.of, tensors))
        known = plan.specs.get(op.stage + 1)
        if known is None:
            plan.specs[op.stage + 1] = specs
            sender.send_header(specs)
        elif known != specs:
            raise RuntimeError(
                f"What crosses from stage {op.stage} to {op.stage + 1} changed between micro-batches of the same"
                f" shapes: first {_listed(known)}, now {_listed(specs)}. Shapes and dtypes of layer outputs may depend"
                " on the shapes of the batch, but not on its values."
            )
        sender.send(tensors)

    def _receive_activation(self, op: Op) -> None:
        assert self._job is not None
        plan = self._job.plans[op.mb]
        receiver = self._receivers[edge_of(op, self._placement)]
        tensors = receiver.take(message_of(op), lambda specs: plan.specs.__setitem__(op.stage, specs))
        for tensor, spec in zip(tensors, plan.specs[op.stage], strict=True):
            if spec.requires_grad:
                tensor.requires_grad_(True)
        self._inbox[op.stage, op.mb] = tensors
        self._count_buffers()

    def _send_gradient(self, op: Op) -> None:
        self._senders[edge_of(op, self._placement)].send(self._grads_out.pop((op.stage, op.mb)))

    def _receive_gradient(self, op: Op) -> None:
        receiver = self._receivers[edge_of(op, self._placement)]
        self._grads_in[op.stage, op.mb] = receiver.take(message_of(op), _no_header)
        self._count_buffers()

    def _expect_messages(self, job: Job) -> None:
        for edge, messages in job.lowered.edges.items():
            receiver = self._receivers.get(edge)
            if receiver is not None and edge.target == self._rank:
                receiver.expect([(message, _known_specs(edge.kind, message, job.plans)) for message in messages])

    def _count_buffers(self) -> None:
        waiting = sum(receiver.num_waiting for receiver in self._receivers.values())
        self.buffers_peak = max(self.buffers_peak, waiting)

    # -- failure ----------------------------------------------------------------------------------------------------

    def _failure(self, program: Sequence[Op], index: int, error: Exception) -> str:
        op = program[index]
        frame = self._stage.frame
        where = f" in layer {frame.current!r}" if frame is not None and frame.current else ""
        kind = "lost its peer" if isinstance(error, PeerLost) else "failed"
        return (
            f"Rank {self._rank} (stage {op.stage}) {kind} in {op}{where}, micro-batch {op.mb}:"
            f" {type(error).__name__}: {error}\n"
            f"Its program: {mark(program, index, 'here')}"
        )


def _detached(result: Any) -> Any:
    """What a step returned, without its graph, so that nothing of a micro-batch outlives its backward."""
    if isinstance(result, Tensor):
        return result.detach()
    return tree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


def _known_specs(
    kind: Kind, message: tuple[int, int], plans: Sequence[SignaturePlan]
) -> Callable[[], Specs | None]:
    stage, mb = message
    specs = plans[mb].specs
    if kind is Kind.F:
        return lambda: specs.get(stage)
    # the gradient of what went into the stage above; known here, since this rank sent it
    return lambda: gradient_specs(specs[stage + 1]) if stage + 1 in specs else None


def _no_header(specs: Specs) -> None:
    raise AssertionError("a gradient needs no header: its shape is that of the activation")


def _listed(specs: Specs) -> str:
    return ", ".join(f"{list(spec.shape)} {spec.dtype}" for spec in specs) or "nothing"
