"""Keeps what several processes hold equal: tied parameters, buffers that all stages read, and whole replicas."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.runtime.average import GradientAverage
from lightning_pp.runtime.comm import job_store, make_group
from lightning_pp.runtime.gradients import GradientHold
from lightning_pp.runtime.groups import Groups
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []


class Copies:
    """The copies of this process's parameters and buffers on other processes.

    Args:
        ownership: What is where.
        mesh: This process's position.
        groups: This process's groups.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long a collective may take.
    """

    def __init__(self, ownership: Ownership, mesh: Mesh, groups: Groups, backend: str, timeout: timedelta) -> None:
        self._ownership = ownership
        self._mesh = mesh
        self._groups = groups
        session = job_store().add(f"lightning_pp/copies/{mesh.rank}", 1)
        index = {id(parameter): number for number, parameter in enumerate(ownership.owned())}
        named = dict(ownership.model.named_parameters())
        owners: dict[int, tuple[int, ...]] = {
            index[id(named[name])]: positions
            for name, positions in ownership.tied().items()
            if mesh.position in positions
        }
        made: dict[tuple[str, tuple[int, ...]], Any] = {}

        def group(which: str, positions: tuple[int, ...], own: int, size: int) -> Any:
            if (which, positions) not in made:
                name = f"tied/{session}/{which}/{'-'.join(map(str, positions))}"
                made[which, positions] = make_group(name, own, size, backend, timeout)
            return made[which, positions]

        size = mesh.num_replicas
        self._tied: dict[int, Any] = {}
        self._tied_everywhere: dict[int, Any] = {}
        self._first = frozenset(number for number, positions in owners.items() if positions[0] == mesh.position)
        for number, positions in sorted(owners.items(), key=lambda item: item[1]):
            place = positions.index(mesh.position)
            self._tied[number] = group(f"replica{mesh.replica}", positions, place, len(positions))
            if size > 1:
                own = place * size + mesh.replica
                self._tied_everywhere[number] = group("all", positions, own, len(positions) * size)

    def gradient_hold(self) -> GradientHold:
        """What holds, and sums, the gradients of the owned parameters."""
        owned = self._ownership.owned()
        average = None
        if self._groups.replicas.size > 1:
            average = GradientAverage(owned, self._groups.replicas.group, self._tied_everywhere, self._first)
        return GradientHold(owned, self._tied, average)

    def share(self) -> None:
        """Give tied parameters and shared buffers the first stage's values, and all replicas those of the first."""
        owned = self._ownership.owned()
        for number in sorted(self._tied):
            _broadcast(owned[number], partial(_from_first_owner, self._tied[number]))
        for name, buffer in self._ownership.model.named_buffers():
            if len(self._ownership.positions(name)) == self._mesh.num_stages > 1:
                _broadcast(buffer, partial(dist.broadcast, src=self._mesh.global_rank(0), group=self._groups.pipeline))
        if self._groups.replicas.size > 1:
            for parameter in owned:
                _broadcast(parameter, self._from_first_replica)
            self.share_buffers()

    def share_buffers(self) -> None:
        """Give all replicas the buffers of the first one: each has seen other samples."""
        if self._groups.replicas.size == 1:
            return
        for buffer in self._ownership.model.buffers():
            if not buffer.is_meta:
                _broadcast(buffer, self._from_first_replica)

    def _from_first_replica(self, values: Tensor) -> None:
        dist.broadcast(values, src=self._mesh.replicas[0], group=self._groups.replicas.group)


def _from_first_owner(group: Any, values: Tensor) -> None:
    group.broadcast([values]).wait()


def _broadcast(tensor: Tensor, send: Callable[[Tensor], Any]) -> None:
    """Give ``tensor`` the sender's values, as bytes: not every library moves complex or boolean tensors."""
    if tensor.numel() == 0:
        return
    values = tensor.detach().contiguous()
    send(values.reshape(-1).view(torch.uint8))
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)
