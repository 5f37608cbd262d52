"""Runs one batch: a table of handlers and one loop over this rank's lowered program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pp.partition import tree
from lightning_pp.runtime.channel import Intake, Receiver, Sender, Spec, Specs
from lightning_pp.runtime.comm import PeerLost
from lightning_pp.runtime.events import Recorder
from lightning_pp.runtime.held import HeldBytes
from lightning_pp.runtime.job import Job, SignaturePlan
from lightning_pp.runtime.layout import Layout
from lightning_pp.runtime.profiling import is_profiling, named_ranges
from lightning_pp.runtime.program import Key, Program, Task, prepare
from lightning_pp.runtime.returned import Outgoing, Returns, there
from lightning_pp.runtime.stage import Stage
from lightning_pp.runtime.transfer import transfer_seconds
from lightning_pp.schedule import Edge, Kind, Lowered, Op, mark

__all__: list[str] = []

#: programs kept ready; there is one per number of micro-batches
_REMEMBERED = 256


class PipelineError(RuntimeError):
    """A step failed; names rank, stage, op, micro-batch and layer, and shows the program with the op marked."""


@dataclass(slots=True)
class _Saved:
    """What one micro-batch leaves behind on one stage until its backward."""

    layout: Layout
    received: list[Tensor]
    roots: list[Tensor | GradientEdge]
    root_grads: list[Tensor] | None = None
    counted: object = None


class Engine:
    """This rank's part of the pipeline.

    Args:
        rank: This rank's position in its pipeline.
        placement: The rank of each stage.
        stage: Runs the user's step.
        senders: This rank's ends of its outgoing edges.
        receivers: This rank's ends of its incoming edges.
        global_rank: What messages call this rank; None for ``rank``.

    Attributes:
        in_flight_peak: Most micro-batches that were held for backward at once, since the last reset.
        recorder: Told of each op that has ended; None for nobody.
        held: Counts the bytes that are held for backward; None for nobody.
        now: The op under way, for whoever asks from another thread; None between batches.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        stage: Stage,
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
        global_rank: int | None = None,
    ) -> None:
        self._rank, self._global_rank = rank, rank if global_rank is None else global_rank
        self._placement = tuple(placement)
        self._last_stage = len(placement) - 1
        self._stage = stage
        self._senders = dict(senders)
        self._receivers = dict(receivers)
        self._inbox: dict[Key, list[Tensor]] = {}
        self._outbox: dict[Key, list[Tensor]] = {}
        self._grads_in: dict[Key, list[Tensor | None]] = {}
        self._grads_out: dict[Key, Outgoing] = {}
        self._returns = Returns((), frozenset())
        self._saved: dict[Key, _Saved] = {}
        self._programs: dict[int, tuple[Lowered, Program]] = {}
        self._failed: str | None = None
        self._handlers: dict[Kind, Callable[[Job, Task], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send_activation,
            Kind.RECV_F: self._receive_activation,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
        }
        self._intake = Intake(tuple(self._receivers.values()))
        self.in_flight_peak = 0
        self.recorder: Recorder | None = None
        self.held: HeldBytes | None = None
        self.now: Op | None = None

    def prepare(self, lowered: Lowered) -> Program:
        """Make this rank's program ready, once.

        Raises:
            ValueError: The schedule holds ops that cannot be executed.
        """
        found = self._programs.get(id(lowered))
        if found is None:
            if len(self._programs) >= _REMEMBERED:
                self._programs.clear()
            program = prepare(lowered, self._rank, self._placement, self._senders, self._receivers)
            found = self._programs[id(lowered)] = (lowered, program)
        return found[1]

    def run(self, job: Job) -> dict[int, Any]:
        """Run this rank's program; returns the results of the last stage, by micro-batch.

        Raises:
            ValueError: The schedule holds ops that cannot be executed; nothing has run then.
            PipelineError: Something failed here; the cause is chained. A pipeline of several ranks has lost its place
                in its messages then, and runs no more.
        """
        if self._failed is not None:
            raise PipelineError(f"This pipeline cannot go on after its failure. That was: {self._failed}")
        program = self.prepare(job.lowered)
        handlers, tasks = self._handlers, program.tasks
        if is_profiling():
            handlers = named_ranges(handlers)
        mark = self.recorder.mark if self.recorder is not None else None
        index = 0
        try:
            self._begin(job, program)
            for index, task in enumerate(tasks):  # noqa: B007 - the failure needs it
                self.now = op = task.op
                handlers[op.kind](job, task)
                if mark is not None:
                    mark(op)
            self.now = None
            for sender, _ in program.windows:
                sender.finish()
        except Exception as error:
            text = self._failure(tasks, index, error)
            self._drop(text)
            raise PipelineError(text) from error
        except BaseException as error:
            self._drop(repr(error))
            raise
        return job.results

    def transfer_seconds(self, plan: SignaturePlan, device: torch.device) -> float | None:
        """What a message of ``plan`` takes to the next rank (see :mod:`.transfer`); all ranks must call.

        Raises:
            PipelineError: A peer went away meanwhile.
        """
        try:
            return transfer_seconds(
                self._rank, len(self._placement), self._senders, self._receivers, plan.specs, device
            )
        except Exception as error:
            text = f"Rank {self._global_rank} failed in measuring its links: {type(error).__name__}: {error}"
            self._drop(text)
            raise PipelineError(text) from error

    @property
    def buffers_peak(self) -> int:
        """Most messages that were posted or held by receivers at once, since the last reset."""
        return self._intake.buffers_peak

    def close(self) -> None:
        """Let go of the channels and of everything that a failed run has left."""
        self._drop("it was closed")
        self._programs.clear()
        self._senders.clear()
        self._receivers.clear()
        self._intake.close()

    def reset_peaks(self) -> None:
        """Start counting anew."""
        self.in_flight_peak = 0
        self._intake.buffers_peak = self._intake.buffers

    def _begin(self, job: Job, program: Program) -> None:
        """Set the channels to the program, and start to receive."""
        for sender, window in program.windows:
            sender.window = window
        self._returns = returns = Returns(job.plans, program.first_gradients)
        for receiver, kind, messages in program.incoming:
            if kind is Kind.F:
                receiver.expect(messages, job.known, job.learn)
            else:
                receiver.expect(messages, returns.known, returns.learn, returns.notes)

    def _drop(self, reason: str) -> None:
        """Forget what is under way; a pipeline with channels does not go on, as their messages are out of step."""
        for kept in (self._inbox, self._outbox, self._grads_in, self._grads_out, self._saved):
            kept.clear()
        self._stage.frame = None
        if self._senders or self._receivers:
            self._failed = reason

    # -- compute ----------------------------------------------------------------------------------------------------

    def _forward(self, job: Job, task: Task) -> None:
        stage, mb = key = task.key
        received = self._inbox.pop(key) if stage else []
        layout = job.plans[mb].layouts[stage]
        arguments = (layout, partial(job.step, mb), received)
        if self.held is None or job.loss_of is None:
            result, gives = self._stage.forward(*arguments)
        else:
            result, gives = self.held.watched(self._stage.forward, *arguments)
        if stage == self._last_stage:
            self._finish_forward(job, key, layout, result, received)
            return
        if job.loss_of is not None:
            self._save(key, _Saved(layout, received, [_root(t) for t in gives if t.requires_grad]))
        if task.neighbour is None:
            self._outbox[key] = gives
        else:
            self._inbox[task.neighbour] = [_cut_off(tensor) for tensor in gives]

    def _finish_forward(self, job: Job, key: Key, layout: Layout, result: Any, received: list[Tensor]) -> None:
        job.results[key[1]] = _detached(result)
        if job.loss_of is not None:
            loss = job.loss_of(result)
            self._save(key, _Saved(layout, received, [loss], [job.root_grad(key[1], loss)]))

    def _save(self, key: Key, saved: _Saved) -> None:
        if self.held is not None:
            saved.counted = self.held.keep(key[1], saved.received)
        self._saved[key] = saved
        if len(self._saved) > self.in_flight_peak:
            self.in_flight_peak = len(self._saved)

    def _backward(self, job: Job, task: Task) -> None:
        key = task.key
        if task.is_last and job.ending is not None:
            job.ending()
        saved = self._saved.pop(key)
        roots, grads = saved.roots, saved.root_grads
        if grads is None:
            roots, grads = there(roots, self._grads_in.pop(key))
        if roots:
            self._stage.backward(saved.layout, roots, grads, saved.received)
        else:
            self._stage.skip_backward(saved.received)
        if task.is_last and job.backward_done is not None:
            job.backward_done()
        if key[0] == 0:
            return
        received = [tensor for tensor in saved.received if tensor.requires_grad]
        made = [tensor.grad for tensor in received]
        if task.neighbour is None:
            self._grads_out[key] = self._returns.outgoing((key[0] - 1, key[1]), received, made)
        else:
            self._grads_in[task.neighbour] = made

    # -- messages ---------------------------------------------------------------------------------------------------

    def _send_activation(self, job: Job, task: Task) -> None:
        assert task.sender is not None
        stage, mb = task.message
        plan = job.plans[mb]
        tensors = self._outbox.pop(task.key)
        known = plan.specs.get(stage)
        if known is None:
            specs = tuple(map(Spec.of, tensors))
            plan.learn(stage, specs)
            task.sender.send(task.message, tensors, header=specs)
            return
        if len(known) != len(tensors) or not all(map(Spec.fits, known, tensors)):
            raise RuntimeError(
                f"What crosses from stage {stage - 1} to {stage} changed between micro-batches of the same"
                f" shapes: first {_listed(known)}, now {_listed(tuple(map(Spec.of, tensors)))}. Shapes and dtypes of"
                " layer outputs may depend on the shapes of the batch, but not on its values: do such work inside a"
                " layer, and let what it returns keep its shape and dtype."
            )
        task.sender.send(task.message, tensors)

    def _receive_activation(self, job: Job, task: Task) -> None:
        assert task.receiver is not None
        tensors = task.receiver.take(task.message)
        for tensor, spec in zip(tensors, job.plans[task.key[1]].specs[task.key[0]], strict=True):
            if spec.requires_grad:
                tensor.requires_grad_(True)
        self._inbox[task.key] = tensors

    def _send_gradient(self, job: Job, task: Task) -> None:
        assert task.sender is not None
        out = self._grads_out.pop(task.key)
        task.sender.send(task.message, out.tensors, out.header, out.note)

    def _receive_gradient(self, job: Job, task: Task) -> None:
        assert task.receiver is not None
        self._grads_in[task.key] = self._returns.incoming(task.message, task.receiver.take(task.message))

    # -- failure ----------------------------------------------------------------------------------------------------

    def _failure(self, tasks: Sequence[Task], index: int, error: Exception) -> str:
        op = tasks[index].op
        frame = self._stage.frame
        where = f" in layer {frame.current!r}" if frame is not None and frame.current else ""
        kind = "lost its peer" if isinstance(error, PeerLost) else "failed"
        return (
            f"Rank {self._global_rank} (stage {op.stage}) {kind} in {op}{where}, micro-batch {op.mb}:"
            f" {type(error).__name__}: {error}\n"
            f"Its program: {mark([task.op for task in tasks], index)}"
        )


def _root(tensor: Tensor) -> Tensor | GradientEdge:
    """Where the backward begins: the graph alone, so that the tensor can go as soon as it has been sent.

    The node of a Python autograd function (a reentrant checkpoint is one) lives no longer than the function's output on
    older versions of torch, so that output is kept.
    """
    return tensor if isinstance(tensor.grad_fn, BackwardCFunction) else get_gradient_edge(tensor)


def _cut_off(tensor: Tensor) -> Tensor:
    """What a stage of the same rank receives: the same memory, as the start of a graph of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _detached(result: Any) -> Any:
    """What a step returned, without its graph, so that nothing of a micro-batch outlives its backward."""
    if isinstance(result, Tensor):
        return result.detach()
    return tree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


def _listed(specs: Specs) -> str:
    return ", ".join(f"{list(spec.shape)} {spec.dtype}" for spec in specs) or "nothing"
