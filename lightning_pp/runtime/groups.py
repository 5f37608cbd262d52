"""The process groups of one process: the stages of its pipeline, and its copies in the other pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.runtime.comm import losing_peers
from lightning_pp.runtime.mesh import Mesh

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Replicas:
    """The processes at one position of all pipelines; they hold equal parameters and see different samples.

    Attributes:
        size: Number of pipelines.
        group: In order of pipeline, for device memory; None for a single one.
        host_group: The same for host memory.
    """

    size: int = 1
    group: Any = None
    host_group: Any = None

    def total(self, number: float) -> float:
        """The sum of all replicas' numbers; the same bits on each."""
        if self.size == 1:
            return number
        return sum(row[0] for row in self.gather([number]))

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """All replicas' numbers (equally many), by replica; through host memory, so no device waits."""
        own = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with losing_peers():
            dist.all_gather(rows, own, group=self.host_group)
        return [row.tolist() for row in rows]

    def gather_objects(self, value: object) -> list[Any]:
        """All replicas' values, by replica."""
        found: list[Any] = [None] * self.size
        with losing_peers():
            dist.all_gather_object(found, value, group=self.host_group)
        return found

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """All replicas' tensors (of one shape and dtype), by replica."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        with losing_peers():
            dist.all_gather(tensors, tensor.contiguous(), group=self.group)
        return tensors


@dataclass(frozen=True, slots=True)
class Groups:
    """What one process belongs to.

    Attributes:
        everyone: All processes, for host memory.
        pipeline: The stages of this process's pipeline, by position, for device memory; None for a single stage.
        pipeline_host: The same for host memory; there for a single stage, too, where other pipelines exist.
        replicas: This position in all pipelines.
    """

    everyone: Any
    pipeline: Any
    pipeline_host: Any
    replicas: Replicas


#: groups made beside each connection of the processes, for every run that wants the same: torch forgets none sooner.
#: They hold nothing of the connection, which ends when the processes are disconnected, and they with it.
_MADE: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def groups_for(mesh: Mesh, backend: str, timeout: timedelta) -> Groups:
    """This process's groups; of those that are made, the ones that an earlier run of this script has made.

    Each is made by its members alone. Every process makes the same number of groups in the same order: torch names a
    group that is made by its members after the number of groups that a process has.
    """
    made = _MADE.setdefault(dist.group.WORLD, {})

    def make(ranks: list[int] | None, library: str) -> Any:
        key = (None if ranks is None else tuple(ranks), library, timeout)
        if key not in made:
            made[key] = dist.new_group(
                ranks, timeout=timeout, backend=library, use_local_synchronization=ranks is not None
            )
        return made[key]

    on_host = backend == "gloo"
    everyone = dist.group.WORLD if on_host else make(None, "gloo")
    if mesh.num_replicas == 1:
        pipeline = dist.group.WORLD if mesh.num_stages > 1 else None
        return Groups(everyone, pipeline, everyone, Replicas())

    pipeline = make(mesh.pipeline, backend)
    pipeline_host = pipeline if on_host else make(mesh.pipeline, "gloo")
    replicas = make(mesh.replicas, backend)
    replicas_host = replicas if on_host else make(mesh.replicas, "gloo")
    return Groups(
        everyone,
        pipeline if mesh.num_stages > 1 else None,
        pipeline_host,
        Replicas(mesh.num_replicas, replicas, replicas_host),
    )
