"""One module's pipeline on one process: its cut, its channels, and what runs its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_pp.arguments import Arguments
from lightning_pp.data import NoBatchError
from lightning_pp.metrics.shared import SharedMetrics
from lightning_pp.partition.layers import chosen_layers, find_layers
from lightning_pp.partition.random_state import preserved
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.trace import Trace, TraceError
from lightning_pp.runtime.comm import Clock, backend_for
from lightning_pp.runtime.engine import Engine
from lightning_pp.runtime.events import Recorder, StepRecord
from lightning_pp.runtime.flush import Flush
from lightning_pp.runtime.gradients import GradientHold
from lightning_pp.runtime.groups import Groups
from lightning_pp.runtime.links import open_beside, open_links
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.runtime.planner import Cut, CutOptions, Planner
from lightning_pp.runtime.stage import Stage
from lightning_pp.schedule import Lowered, Schedule, build, forward_only, lower, placement_of
from lightning_pp.steps.jobs import StepRunner, about_size, split, whole_step
from lightning_pp.steps.logs import is_in_step
from lightning_pp.weights.copies import Copies
from lightning_pp.weights.materialise import Construction
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []


class Pipeline:
    """Cuts a module and holds what its steps need.

    Args:
        module: The user's module.
        arguments: Of the strategy.
        mesh: This process's position.
        device: Where it computes.
        groups: Its process groups.

    Attributes:
        ownership: Which process holds what.
        engine: Runs jobs.
        runner: Makes jobs.
        gradients: Holds what the backward passes have made.
        flush: Shares results and compares batches.
        copies: Keeps equal what several processes hold.
        metrics: The module's, known on all ranks.
        group: All stages of this pipeline, for device memory; None for a single one.
        host_group: The same for host memory.
        replicas: This position in all pipelines.
        schedule: What training steps go by at present, as the strategy's argument.
    """

    ownership: Ownership
    engine: Engine
    flush: Flush
    runner: StepRunner
    gradients: GradientHold
    copies: Copies
    metrics: SharedMetrics

    def __init__(
        self, module: LightningModule, arguments: Arguments, mesh: Mesh, device: torch.device, groups: Groups
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._mesh = mesh
        self._device = device
        self._groups = groups
        self.group = groups.pipeline
        self.host_group = groups.pipeline_host
        self.replicas = groups.replicas
        self.schedule = arguments.schedule
        self._num_microbatches = arguments.num_microbatches(mesh.num_stages)
        self._lowered: dict[tuple[int, bool], Lowered] = {}
        self._placement = placement_of(self._schedule(1, training=True))
        if len(self._placement) != mesh.num_stages:
            raise MisconfigurationException(
                f"schedule={arguments.schedule!r} has {len(self._placement)} stages on {mesh.num_stages} ranks. This"
                " version runs one stage per rank: use a schedule in which rank k runs stage k alone."
            )
        self._board: Switchboard | None = None
        self._planner: Planner | None = None

    def cut(
        self,
        name: str,
        first_arguments: Callable[[], Sequence[Any]] | None,
        context: Callable[[], AbstractContextManager[None]],
        optimizers: Sequence[Optimizer],
        construction: Construction,
    ) -> None:
        """Decide which stage runs what, by one batch of step function ``name``, and get ready to run.

        Args:
            name: ``"training_step"`` for fit.
            first_arguments: Gives what the first call of the step function will get; None where there is no data.
            context: The precision plugin's context for it.
            optimizers: Whose parameters other stages may own.
            construction: Knows the values of what is on the meta device.

        Raises:
            MisconfigurationException: The model cannot be cut as asked.
        """
        before = Ownership.of(self._module)
        self._board = board = self._switched(before)
        stages = [stage for stage, position in enumerate(self._placement) if position == self._mesh.position]
        self._planner = planner = Planner(self._module, board, stages, self._device, self._checkpointed(board))
        if before is not None:
            planner.adopt(before.cut, before.num_stages)
            self.ownership = before
        else:
            construction.show_to_glue(self._module, board.layers, self._device)
            with _misconfigured():
                is_cut = first_arguments is not None and self._decide(planner, name, first_arguments, context)
            if not is_cut:
                planner.adopt(self._nothing_cut(), len(self._placement))
            assert planner.cut is not None
            self.ownership = Ownership(self._module, board, planner.cut, self._mesh, self._placement)
            construction.finish(self._module, optimizers, self.ownership.is_here, self._device)
            self.ownership.release(optimizers)
            if is_cut:
                self.ownership.mark()
        self.ownership.to_device(self._device)
        self._connect(board, planner)

    def use_schedule(self, schedule: str) -> None:
        """Go by another schedule of the same placement from the next training step on; all ranks must."""
        self.schedule = schedule
        self._lowered = {key: lowered for key, lowered in self._lowered.items() if not key[1]}

    def record(self, listener: Callable[[StepRecord], None]) -> Recorder:
        """Record training steps from now on, and give them to ``listener``; whoever listens ends each step."""
        if self.engine.recorder is None:
            self.engine.recorder = Recorder(Clock(self._device))
        self.engine.recorder.subscribe(listener)
        return self.engine.recorder

    def stop_recording(self, listener: Callable[[StepRecord], None]) -> None:
        """Give ``listener`` no more steps, and record none where nobody else listens."""
        if self.engine.recorder is not None and not self.engine.recorder.unsubscribe(listener):
            self.engine.recorder = None

    def begin_step(self, number: int) -> None:
        """Training on batch ``number`` begins."""
        if self.engine.recorder is not None:
            self.engine.recorder.begin(number)

    def forget_step(self) -> None:
        """The step that has begun trains nothing, and is not for those who listen."""
        if self.engine.recorder is not None:
            self.engine.recorder.forget()

    def mark(self, what: str) -> None:
        """Something outside of the engine has ended."""
        if self.engine.recorder is not None:
            self.engine.recorder.mark(what)

    @property
    def is_planning(self) -> bool:
        """Whether a step runs to be planned: other ranks may not be doing so, and must not be waited for."""
        return self._planner is not None and self._planner.is_tracing

    def close(self) -> None:
        """Let go of the channels; a model in several stages stays cut."""
        if hasattr(self, "engine"):
            self.engine.close()
        if hasattr(self, "metrics"):
            self.metrics.release()
        mark = Ownership.of(self._module)
        if mark is None and self._board is not None:
            self._board.remove()  # it failed before it was cut
        elif mark is not None and self._mesh.num_stages == 1:
            mark.unmark()

    # -- deciding ---------------------------------------------------------------------------------------------------

    def _switched(self, before: Ownership | None) -> Switchboard:
        if before is not None:
            if before.num_stages != len(self._placement):
                raise MisconfigurationException(
                    f"This {type(self._module).__name__} has been cut into {before.num_stages} stages by an"
                    f" earlier run, and is now to run in {len(self._placement)}. Save a checkpoint and load it into a"
                    " new module."
                )
            before.check_layers()
            return before.board
        with _misconfigured():
            layers = find_layers(self._module, self._arguments.layers, ignored=(Metric,))
        board = Switchboard(layers)
        board.install()
        return board

    def _decide(
        self,
        planner: Planner,
        name: str,
        first_arguments: Callable[[], Sequence[Any]],
        context: Callable[[], AbstractContextManager[None]],
    ) -> bool:
        """Cut by the first batch; returns whether there is one."""
        with preserved(), torch.set_grad_enabled(name == "training_step"):
            try:
                batch, *rest = first_arguments()
            except NoBatchError:  # an empty loader: Lightning has warned of it, and runs no step
                self._gather_cuts(None)
                return False
            parts = split(self._module, batch, self._num_microbatches)
            part = parts.batches[0]
            step = whole_step(self._module, name, part, rest, context)
            options = CutOptions(
                len(self._placement), self._num_microbatches, self._arguments.split, self._arguments.balance
            )
            try:
                trace = planner.decide(name, step, options, self._agree)
            except NoBatchError:  # another process has none
                return False
            except TraceError as error:
                raise TraceError(f"{error}{about_size(parts.sizes[0], parts)}") from error
        assert planner.cut is not None
        if self._mesh.num_stages > 1:
            rank_zero_info(_partition_text(self._module, trace, planner.cut))
        return True

    def _agree(self, cut: Cut) -> Cut:
        """Take rank 0's cut; where a rank calls other layers, complain on all of them."""
        cuts = self._gather_cuts(cut)
        for rank, other in enumerate(cuts):
            if other is None:
                raise NoBatchError(f"rank {rank} has no batch")
            if other.calls != cuts[0].calls:
                raise ValueError(
                    f"Rank {rank} calls other layers than rank 0: {list(other.calls)} instead of"
                    f" {list(cuts[0].calls)}. All processes must run the same script on the same data."
                )
        return cuts[0]  # type: ignore[no-any-return]

    def _gather_cuts(self, cut: Cut | None) -> list[Any]:
        """The cuts of all processes; None where there is no batch to cut by."""
        if self._mesh.num_stages == 1:
            return [cut]
        cuts: list[Any] = [None] * dist.get_world_size(self._groups.everyone)
        dist.all_gather_object(cuts, cut, group=self._groups.everyone)
        return cuts

    def _nothing_cut(self) -> Cut:
        everywhere = tuple(range(len(self._placement)))
        names = [name for name, _ in (*self._module.named_parameters(), *self._module.named_buffers())]
        return Cut((0,) * (len(everywhere) + 1), dict.fromkeys(names, everywhere), frozenset(), (), "")

    def _checkpointed(self, board: Switchboard) -> frozenset[str]:
        with _misconfigured():
            return chosen_layers(self._module, board.layers, self._arguments.activation_checkpointing)

    # -- connecting -------------------------------------------------------------------------------------------------

    def _connect(self, board: Switchboard, planner: Planner) -> None:
        mesh, arguments = self._mesh, self._arguments
        backend = backend_for(self._device, arguments.process_group_backend)
        edges = {edge for training in (True, False) for edge in self._program(self._num_microbatches, training).edges}
        senders, receivers = open_links(mesh, edges, self._device, backend, arguments.timeout)
        self.engine = Engine(mesh.position, self._placement, Stage(board), senders, receivers, mesh.rank)
        with _misconfigured():
            self.engine.prepare(self._program(self._num_microbatches, training=True))
        self.copies = Copies(self.ownership, mesh, self._groups, backend, arguments.timeout)
        self.copies.share()
        self.gradients = self.copies.gradient_hold()
        is_beside = mesh.num_stages > 1 and self._device.type == "cpu"
        beside = open_beside(mesh, backend, arguments.timeout) if is_beside else self.group
        self.flush = flush = Flush(beside, self.host_group, mesh.position, mesh.num_stages, self._device)
        self.metrics = SharedMetrics(
            self._module,
            self.host_group if mesh.num_stages > 1 else None,
            mesh.global_rank(self._placement[-1]),
            self.replicas,
            lambda: is_in_step(self._module),
            self._device,
        )
        self.runner = StepRunner(
            self._module,
            planner,
            flush,
            self._num_microbatches,
            self._program,
            is_last=mesh.position == self._placement[-1],
            device=self._device,
            seed=self._base_seed(),
            replicas=self.replicas,
            replica=mesh.replica,
            metrics=self.metrics,
        )

    def _program(self, num_microbatches: int, training: bool) -> Lowered:
        key = (num_microbatches, training)
        if key not in self._lowered:
            self._lowered[key] = lower(self._schedule(num_microbatches, training))
        return self._lowered[key]

    def _schedule(self, num_microbatches: int, training: bool) -> Schedule:
        with _misconfigured():
            if training:
                return build(self.schedule, self._mesh.num_stages, num_microbatches)
            return forward_only(self._placement, num_microbatches)

    def _base_seed(self) -> int:
        box = [int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))]
        if self._mesh.num_stages * self._mesh.num_replicas > 1:
            dist.broadcast_object_list(box, src=0, group=self._groups.everyone)
        return box[0]


@contextmanager
def _misconfigured() -> Iterator[None]:
    """What is wrong with the user's model or arguments is a misconfiguration to Lightning."""
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def _partition_text(module: LightningModule, trace: Trace, cut: Cut) -> str:
    """The partition as a small table."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    lines = [f"PipelineStrategy cut {type(module).__name__} into {len(cut.bounds) - 1} stages:"]
    for stage, (start, stop) in enumerate(zip(cut.bounds, cut.bounds[1:], strict=False)):
        owned = sum(size for name, size in sizes.items() if stage in cut.stages_of(name, False, len(cut.bounds) - 1))
        calls = trace.calls[start:stop]
        span = f"{calls[0].layer} ... {calls[-1].layer}" if len(calls) > 1 else calls[0].layer
        flops = sum(call.flops for call in calls)
        lines.append(f"  stage {stage}: {len(calls):3d} layer calls, {owned:,} parameters, {flops:,} FLOPs, {span}")
    return "\n".join(lines)
