"""The processes of one job: how they start, where each one stands, and what Lightning asks of them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_pp import compat, failure
from lightning_pp.arguments import Arguments
from lightning_pp.runtime.comm import backend_for, job_store
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
        self._has_failed = False

    # -- where this process is --------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """This process's position; raises before processes are connected."""
        if self._mesh is None:
            raise RuntimeError("The position in the pipeline is not known before the processes have been connected.")
        return self._mesh

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
            self._launcher = compat.script_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        num_stages = self.arguments.num_stages(self.world_size)
        assert self.cluster_environment is not None
        backend = backend_for(self.root_device, self.arguments.process_group_backend)
        compat.connect_processes(self.cluster_environment, backend, self.arguments.timeout, self.root_device)
        self._mesh = Mesh(self.global_rank, num_stages, self.world_size // num_stages)
        if self._host_group is None:
            self._host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        failure.reset(job_store(), self.global_rank, self._host_group)

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
            dist.barrier(group=self._host_group)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        box = [obj]
        if self._host_group is not None:
            dist.broadcast_object_list(box, src=src, group=self._host_group)
        return box[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Over replicas; stages of one pipeline hold one and the same value."""
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over replicas; with one pipeline it returns ``tensor``, as a single device does."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, group=self._host_group)
        return bool(votes == self.world_size) if all else bool(votes)

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
        if self._has_failed and dist.is_initialized():
            # the others wait for this rank: its connections must go, so that they learn of it at once
            self._host_group = None
            dist.destroy_process_group()
