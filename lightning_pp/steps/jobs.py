"""From one batch and one step function to a job for the engine, and from its results to what Lightning expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pp.metrics.shared import SharedMetrics
from lightning_pp.partition import tree
from lightning_pp.partition.calls import LEFT_OUT
from lightning_pp.partition.random_state import preserved
from lightning_pp.partition.switch import without_fast_path
from lightning_pp.partition.trace import TraceError
from lightning_pp.runtime import microbatch, rng
from lightning_pp.runtime.flush import Flush
from lightning_pp.runtime.groups import Replicas
from lightning_pp.runtime.job import Job
from lightning_pp.runtime.planner import Planner, StepPlan
from lightning_pp.schedule import Lowered
from lightning_pp.steps import left_out, reports
from lightning_pp.steps.kept import KeptValues
from lightning_pp.steps.logs import LogRecorder, replay, replay_objects
from lightning_pp.steps.union import over_replicas

__all__: list[str] = []

#: which random stream a step function draws from
_STREAMS = {"training_step": 0, "validation_step": 1, "test_step": 2, "predict_step": 3}


@dataclass(frozen=True, slots=True)
class Parts:
    """A batch in micro-batches.

    Attributes:
        batches: The micro-batches.
        sizes: Their numbers of samples.
        weights: Their shares in the mean; sum to 1.
        total: What the whole batch weighs.
    """

    batches: list[Any]
    sizes: list[int | None]
    weights: list[float]
    total: float


def split(module: LightningModule, batch: Any, num_microbatches: int) -> Parts:
    """Cut a batch into weighted micro-batches, as ``module`` says where it defines how."""
    user_split = getattr(module, "split_batch", None)
    if user_split is not None:
        batches = list(user_split(batch, num_microbatches))
        if not 1 <= len(batches) <= num_microbatches:
            raise MisconfigurationException(
                f"{type(module).__name__}.split_batch returned {len(batches)} micro-batches; allowed are 1 to"
                f" {num_microbatches} (PipelineStrategy(microbatches=...))."
            )
        sizes = [microbatch.batch_size(part) for part in batches]
    else:
        batches = microbatch.split(batch, num_microbatches)
        sizes = microbatch.sizes(batch, len(batches))
    user_weight = getattr(module, "micro_batch_weight", None)
    shares = [float(size or 1) for size in sizes] if user_weight is None else [float(user_weight(b)) for b in batches]
    total = sum(shares)
    return Parts(batches, sizes, [share / total if total else float("nan") for share in shares], total)


def whole_step(
    module: LightningModule,
    name: str,
    part: Any,
    rest: Sequence[Any],
    context: Callable[[], AbstractContextManager[None]],
) -> Callable[[], Any]:
    """The user's step as the planner wants it: it returns everything that leaves the user's code."""
    function = getattr(module, name)

    def step() -> Any:
        own = tree.map_leaves(lambda leaf: leaf, part)  # a step may pop from its batch
        with LogRecorder(module) as recorder, context():
            return function(own, *rest), recorder.values

    return step


def about_size(size: int | None, parts: Parts) -> str:
    """What to say of a micro-batch that could not be planned, where the whole batch might have been."""
    if size != 1 or len(parts.batches) == 1:
        return ""
    return (
        f" The micro-batch holds one of the batch's {sum(size or 0 for size in parts.sizes)} samples. What takes"
        " statistics over samples (BatchNorm) or drops dims of size 1 (squeeze) needs more of them: use fewer"
        " microbatches or a larger batch_size, and drop_last=True where it is the last batch that is small."
    )


@dataclass(slots=True)
class Prepared:
    """One step that is ready to run; ``is_left_out`` where it will return None, so that nothing is trained."""

    name: str
    job: Job
    parts: Parts
    plans: list[StepPlan]
    recorder: LogRecorder
    context: Callable[[], AbstractContextManager[None]]
    is_left_out: bool = False


class StepRunner:
    """Prepares and finishes the steps of one module.

    Args:
        module: The user's module.
        planner: Plans step functions.
        flush: Shares results.
        num_microbatches: Most micro-batches per batch.
        programs: ``(number of micro-batches, training) -> schedule with messages``.
        is_last: Whether this rank runs the last stage.
        device: Where batches live.
        seed: Base of all random streams.
        replicas: The other pipelines, which see other samples.
        replica: The number of this pipeline among them.
        metrics: The module's.

    Attributes:
        kept: What steps keep in the module.
    """

    def __init__(
        self,
        module: LightningModule,
        planner: Planner,
        flush: Flush,
        num_microbatches: int,
        programs: Callable[[int, bool], Lowered],
        is_last: bool,
        device: torch.device,
        seed: int,
        replicas: Replicas,
        replica: int,
        metrics: SharedMetrics,
    ) -> None:
        self._module = module
        self._planner = planner
        self._flush = flush
        self._num_microbatches = num_microbatches
        self._programs = programs
        self._is_last = is_last
        self._device = device
        self._seed = seed
        self._replicas = replicas
        self._replica = replica
        self.kept = KeptValues(module, is_last)
        self._metrics = metrics

    def prepare(
        self,
        name: str,
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[None]],
        step_number: int,
        accumulated: int | None = None,
    ) -> Prepared:
        """Make the job for one batch.

        Args:
            name: The step function.
            args: What Lightning calls it with; the batch comes first.
            context: The precision plugin's context for it.
            step_number: Names the random stream.
            accumulated: Number of batches whose gradients add up to one step; None runs no backward.
        """
        batch, *rest = args
        parts = split(self._module, batch, self._num_microbatches)
        plans = self._plans(name, parts, rest, context)
        recorder = LogRecorder(self._module, self._metrics, self._flush.is_alone)
        training = accumulated is not None
        is_left_out = training and left_out.is_left_out(
            type(self._module).__name__,
            plans,
            lambda: self._plan(name, batch, rest, context, self._mode()),
            self._replicas.size,
        )
        job = Job(
            lowered=self._programs(len(parts.batches), training and not is_left_out),
            step=self._step(name, parts.batches, rest, plans, recorder, context, step_number),
            plans=[plan.signature_plan for plan in plans],
            loss_of=self._loss_of if training and not is_left_out else None,
            scales=self._scales(parts, accumulated) if accumulated and not is_left_out else (),
            ending=self._flush.expect,
        )
        if not self._flush.is_alone:
            self._flush.begin(microbatch.checksum(batch, self._device))
        return Prepared(name, job, parts, plans, recorder, context, is_left_out)

    def _step(
        self,
        name: str,
        batches: Sequence[Any],
        rest: Sequence[Any],
        plans: Sequence[StepPlan],
        recorder: LogRecorder,
        context: Callable[[], AbstractContextManager[None]],
        step_number: int,
    ) -> Callable[[int], Any]:
        """The user's step for each micro-batch, with what surrounds it."""
        function, kept, values = getattr(self._module, name), self.kept, self._metrics.batch
        is_plain = type(context()) is nullcontext  # of 32-true: nothing to enter for each micro-batch
        draws = any(plan.draws for plan in plans)
        draws_python = any(plan.trace.draws_python for plan in plans)

        def step(mb: int) -> Any:
            recorder.mb = kept.mb = values.micro_batch = mb
            if draws:
                seed = rng.stream_seed(self._seed, _STREAMS[name], step_number, mb, self._replica)
                rng.start_stream(seed, draws_python)
            if is_plain:
                return function(batches[mb], *rest)
            with context():
                return function(batches[mb], *rest)

        return step

    def running(self, prepared: Prepared) -> AbstractContextManager[Any]:
        """The contexts in which the engine runs the job."""
        stack = ExitStack()
        stack.enter_context(without_fast_path())
        stack.enter_context(preserved(any(plan.draws for plan in prepared.plans)))
        stack.enter_context(prepared.recorder)
        stack.enter_context(self.kept.recording(prepared.parts.sizes, prepared.parts.weights))
        stack.enter_context(self._metrics.running(len(prepared.parts.batches)))
        return stack

    def finish(self, prepared: Prepared, results: Mapping[int, Any]) -> Any:
        """Share what the last stage has, log it, and return the step's output."""
        report = None
        if self._is_last:
            recorder = prepared.recorder
            logged = recorder.merged(prepared.parts.weights), recorder.objects()
            calls = recorder.calls if self._replica == 0 else []
            report = (self._output(prepared, results), *logged, calls)
        output, logs, objects, calls = self._flush.share(report)
        if self._replicas.size > 1:
            size = sum(size or 0 for size in prepared.parts.sizes)
            logs = over_replicas(logs, self._replicas, prepared.parts.total, size, self._device)
        with prepared.context():  # new values have the default dtype, which is the precision plugin's
            replay(self._module, logs)
            replay_objects(self._module, objects)
        if self._module.trainer.is_global_zero:
            reports.make(self._module, calls)
        return output

    def _scales(self, parts: Parts, accumulated: int) -> list[float]:
        """What each micro-batch's loss counts in the mean over all replicas' batches and the accumulated ones."""
        total = self._replicas.total(parts.total)
        if not total:
            return [float("nan")] * len(parts.batches)
        return [(weight * parts.total if parts.total else 0.0) / total / accumulated for weight in parts.weights]

    def _mode(self) -> tuple[bytes, bytes]:
        """What of the module decides over a plan."""
        return (
            bytes(parameter.requires_grad for parameter in self._module.parameters()),
            bytes(module.training for module in self._module.modules()),
        )

    def _plans(
        self, name: str, parts: Parts, rest: Sequence[Any], context: Callable[[], AbstractContextManager[None]]
    ) -> list[StepPlan]:
        mode, is_split_by_user = self._mode(), hasattr(self._module, "split_batch")
        by_size: dict[int | None, StepPlan] = {}
        plans = []
        for part, size in zip(parts.batches, parts.sizes, strict=True):
            plan = by_size.get(size)
            if plan is None or is_split_by_user:
                plan = by_size[size] = self._plan(name, part, rest, context, mode, about_size(size, parts))
            plans.append(plan)
        return plans

    def _plan(
        self,
        name: str,
        part: Any,
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[None]],
        mode: object,
        hint: str = "",
    ) -> StepPlan:
        step = whole_step(self._module, name, part, rest, context)
        try:
            return self._planner.plan(name, (microbatch.signature(part), mode), step)
        except TraceError as error:
            raise MisconfigurationException(f"{name}: {error}{hint}") from error

    def _output(self, prepared: Prepared, results: Mapping[int, Any]) -> Any:
        parts = prepared.parts
        outputs = [results[mb] for mb in range(len(parts.batches))]
        if prepared.is_left_out:
            left_out.check_results(type(self._module).__name__, outputs)
        if prepared.job.loss_of is None:
            return microbatch.join(outputs, parts.sizes, parts.weights)
        loss = microbatch.weighted_mean([self._loss_of(output) for output in outputs], parts.weights)
        if not isinstance(outputs[0], Mapping):
            return loss
        extras = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
        return {"loss": loss, **microbatch.join(extras, parts.sizes, parts.weights)}

    def _loss_of(self, output: Any) -> Tensor:
        if isinstance(output, Tensor):
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise MisconfigurationException(
                f"{type(self._module).__name__}.training_step must return the loss, a tensor or a dict with the key"
                f" 'loss', for every micro-batch; it returned {type(output).__name__}. {LEFT_OUT}"
            )
        return loss
