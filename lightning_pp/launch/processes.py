"""The processes of one job: how they start, where each one stands, and what Lightning asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.arguments import Arguments
from lightning_pp.launch import agreement, failure, launching, printing
from lightning_pp.launch.watcher import Watched, Watcher
from lightning_pp.launch.whereabouts import Place, place_of
from lightning_pp.runtime.comm import backend_for, gather_with_gradients, job_store, losing_peers
from lightning_pp.runtime.groups import Groups, groups_for
from lightning_pp.runtime.mesh import Mesh

__all__: list[str] = []

_T = TypeVar("_T")


class PipelineProcesses(ParallelStrategy):
    """A strategy's processes, laid out as stages times replicas.

    Args:
        arguments: Of the strategy.
    """

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments
        self.num_nodes = 1
        self._mesh: Mesh | None = None
        self._host_group: Any = None
        self._groups: Groups | None = None
        self._has_failed = False
        self._watcher: Watcher | None = None

    # -- where this process is --------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """This process's position; raises before processes are connected."""
        if self._mesh is None:
            raise RuntimeError("The position in the pipeline is not known before the processes have been connected.")
        return self._mesh

    @property
    def groups(self) -> Groups:
        """This process's groups; raises before processes are connected."""
        if self._groups is None:
            raise RuntimeError("There are no process groups before the processes have been connected.")
        return self._groups

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return self.mesh.num_stages

    @property
    def stage_index(self) -> int:
        """The stage that this process runs, from 0."""
        return self.mesh.position

    @property
    def data_parallel_rank(self) -> int:
        """The pipeline that this process belongs to, from 0."""
        return self.mesh.replica

    @property
    def data_parallel_size(self) -> int:
        """Number of pipelines side by side."""
        return self.mesh.num_replicas

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether samples are spread over processes: not by stages, which all see the same batch."""
        return self._mesh is not None and self._mesh.num_replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # -- start-up ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self.arguments.num_stages(self.world_size)  # before another process is started
            if not launching.has_script():
                launching.check_needs_no_script(self.num_processes)
                return  # Lightning refuses every launcher of scripts in a notebook, even with nothing to start
        self._launcher = compat.script_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        launching.check_same_job(self.world_size)
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = backend_for(self.root_device, self.arguments.process_group_backend)
        if not dist.is_initialized():
            timeout = self.arguments.timeout
            store = launching.open_store(self.cluster_environment, timeout)
            compat.connect_processes(self.cluster_environment, backend, store, timeout, self.root_device)
        assert self.lightning_module is not None
        if self.world_size > 1:
            agreement.check(
                job_store(), self.global_rank, self.world_size, self.arguments, self.lightning_module.trainer
            )
        num_stages = self.arguments.num_stages(self.world_size)
        self._mesh = Mesh(self.global_rank, num_stages, self.world_size // num_stages)
        if self._groups is None:
            self._groups = groups_for(self._mesh, backend, self.arguments.timeout)
        self._host_group = self._groups.everyone
        failure.reset(job_store(), self.global_rank, self._host_group)
        if self.world_size > 1:
            printing.install()
            self._watch(self.lightning_module.trainer)

    def _watch(self, trainer: Trainer) -> None:
        def place() -> Place:
            # a thread asks, at any time: what is being made or unmade is not there
            engine = getattr(getattr(self, "_pipeline", None), "engine", None)
            return place_of(self.mesh, engine.now if engine is not None else None, compat.batches_begun(trainer))

        watched = Watched(
            place, lambda: compat.is_interrupted(self.lightning_module), lambda: compat.dead_child(self._launcher)
        )
        timeout = self.arguments.timeout.total_seconds()
        self._watcher = Watcher(job_store(), self.global_rank, self.world_size, timeout, watched)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers who this process is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- between processes ------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._host_group is not None:
            with self._together():
                dist.barrier(group=self._host_group)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        box = [obj]
        if self._host_group is not None:
            with self._together():
                dist.broadcast_object_list(box, src=src, group=self._host_group)
        return box[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce ``tensor`` over replicas; the stages of one pipeline hold one and the same value.

        Args:
            tensor: Anything but a tensor is returned as it is.
            group: Another group to reduce over.
            reduce_op: ``"mean"`` or ``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"``, or an op of torch.
        """
        chosen = self._chosen(group)
        if chosen is None or not isinstance(tensor, Tensor) or self.is_planning:
            return tensor
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if is_mean or reduce_op is None else reduce_op
        if isinstance(op, str):
            op = getattr(dist.ReduceOp, op.upper())
        reduced = tensor.detach().clone()
        if is_mean and not reduced.is_floating_point() and not reduced.is_complex():
            reduced = reduced.to(torch.get_default_dtype())
        with self._together():
            dist.all_reduce(reduced, op=op, group=chosen)
        return reduced / dist.get_world_size(chosen) if is_mean else reduced

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the replicas' tensors: ``[num_replicas, *shape]``; of a single pipeline it is ``tensor`` itself."""
        chosen = self._chosen(group)
        if chosen is None:
            return tensor
        if self.is_planning:
            return torch.stack([tensor] * dist.get_world_size(chosen))
        if sync_grads:
            return gather_with_gradients(tensor, chosen)
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(chosen))]
        with self._together():
            dist.all_gather(gathered, tensor.contiguous(), group=chosen)
        return torch.stack(gathered)

    @property
    def is_planning(self) -> bool:
        """Whether a step runs to be planned, each rank by itself."""
        return False

    def _chosen(self, group: Any) -> Any:
        """The replicas where no group of the user's own is given; Lightning gives that of all processes then."""
        return self.groups.replicas.group if group is None or group is dist.group.WORLD else group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision))
        with self._together():
            dist.all_reduce(votes, group=self._host_group)
        return bool(votes == self.world_size) if all else bool(votes)

    def all_agree(self, vote: bool) -> bool:
        """Whether every process votes yes; at once for a single one."""
        if self.world_size == 1:
            return vote
        return self.reduce_boolean_decision(vote)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what takes other processes: where one of them is gone, say why."""
        with failure.explained(job_store()), losing_peers():
            yield

    # -- the end ----------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        if self._mesh is not None:
            failure.leave_note(job_store(), self.global_rank, exception)

    @override
    def teardown(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._watcher is not None:
            self._watcher.stop(self._has_failed)
            self._watcher = None
        if self._has_failed and dist.is_initialized():
            # the others wait for this rank: its connections must go, so that they learn of it at once
            self._host_group = self._groups = None
            store = job_store()
            dist.destroy_process_group()
            failure.part(store, self.global_rank, self.world_size)
