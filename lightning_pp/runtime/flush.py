"""The one collective at the end of a step: what the last stage knows reaches every rank, and batches are compared.

One packed float64 tensor carries the loss, logged values and small results together with a checksum of the batch from
each stage. What the values are (names, structure, dtypes) is described separately, and a description travels only
the first time it occurs; afterwards its number in the packed tensor is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.partition import tree

__all__: list[str] = []

#: tensors with more elements than this travel on their own
_SMALL = 1024
#: descriptions remembered; a step that never repeats one costs an exchange each time, not memory
_REMEMBERED = 256


class DifferentBatchesError(RuntimeError):
    """The stages of one pipeline were given different batches."""


@dataclass(frozen=True, slots=True)
class _Description:
    structure: object
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def num_packed(self) -> int:
        return sum(_numel(shape) for shape, _ in self.tensors if _numel(shape) <= _SMALL)


class Flush:
    """Shares what the last stage reports.

    Args:
        group: All ranks of the pipeline, in order of position; None for a single one.
        host_group: The same ranks for host memory (may be ``group``).
        position: This rank's place in it.
        size: Number of ranks.
        device: Where the packed tensor lives.
    """

    def __init__(self, group: Any, host_group: Any, position: int, size: int, device: torch.device) -> None:
        self._group = group
        self._host_group = host_group
        self._position = position
        self._size = size
        self._device = device
        self._known: list[_Description] = []
        self._pending: Tensor | None = None

    def share(self, report: Any, checksum: Tensor | None) -> Any:
        """Give every rank the last stage's ``report`` (others pass None).

        Args:
            report: Any nesting of tensors and picklable plain values.
            checksum: This rank's float64 scalar for its batch; None skips the comparison.

        Raises:
            DifferentBatchesError: The checksums differ. On a GPU this comes one step late, so as not to wait for it.
        """
        if self._size == 1:
            return report
        is_source = self._position == self._size - 1
        tensors: list[Tensor] = []
        description = None
        if is_source:
            tensors, structure = tree.flatten(report)
            description = _Description(structure, tuple((tuple(t.shape), t.dtype) for t in tensors))
        number = self._number(description) if description is not None else -1
        packed, number = self._exchange(tensors, number, checksum)
        if number >= len(self._known):
            description = self._send_description(description)
            packed = self._broadcast_packed(tensors, description)
        else:
            description = self._known[number]
        return self._unpacked(packed, tensors, description)

    def check(self) -> None:
        """Compare the checksums of the step before (see :meth:`share`)."""
        if self._pending is not None:
            sums, self._pending = self._pending.tolist(), None
            if max(sums) - min(sums) > 1e-6 * max(1.0, max(map(abs, sums))):
                raise DifferentBatchesError(
                    "The stages saw different batches: their checksums, by stage, are"
                    f" {sums}. Every stage must read the same samples in the same order with the same augmentation:"
                    " seed the dataset's random numbers by index, not by process, and do not draw random numbers on"
                    " rank 0 alone."
                )

    def _number(self, description: _Description) -> int:
        try:
            return self._known.index(description)
        except ValueError:
            return len(self._known)

    def _exchange(self, tensors: list[Tensor], number: int, checksum: Tensor | None) -> tuple[Tensor, int]:
        capacity = max((description.num_packed() for description in self._known), default=0)
        head = self._size + 1
        packed = torch.zeros(head + capacity, dtype=torch.float64, device=self._device)
        if checksum is not None:
            packed[1 + self._position] = checksum
        if self._position == self._size - 1:
            packed[0] = number
            if number < len(self._known):
                _pack_into(packed[head:], tensors)
        dist.all_reduce(packed, group=self._group)
        if checksum is not None:
            self._pending = packed[1:head]
        if self._device.type == "cpu":
            self.check()
            return packed[head:], int(packed[0].item())
        return packed[head:], self._number_on_host(number)

    def _number_on_host(self, number: int) -> int:
        """Off the device's queue, so that the host need not wait for the device."""
        box = torch.tensor([number], dtype=torch.int64)
        self._broadcast(box, self._host_group)
        return int(box.item())

    def _send_description(self, description: _Description | None) -> _Description:
        box = [description]
        source = dist.get_global_rank(self._host_group, self._size - 1)
        dist.broadcast_object_list(box, src=source, group=self._host_group)
        assert box[0] is not None
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known.append(box[0])
        return box[0]

    def _broadcast_packed(self, tensors: list[Tensor], description: _Description) -> Tensor:
        packed = torch.zeros(description.num_packed(), dtype=torch.float64, device=self._device)
        _pack_into(packed, tensors)
        self._broadcast(packed, self._group)
        return packed

    def _broadcast(self, tensor: Tensor, group: Any) -> None:
        dist.broadcast(tensor, src=dist.get_global_rank(group, self._size - 1), group=group)

    def _unpacked(self, packed: Tensor, own: list[Tensor], description: _Description) -> Any:
        tensors: list[Tensor] = []
        offset = 0
        for index, (shape, dtype) in enumerate(description.tensors):
            number = _numel(shape)
            if number <= _SMALL:
                tensors.append(packed[offset : offset + number].reshape(shape).to(dtype))
                offset += number
            else:
                large = own[index].contiguous() if own else torch.empty(shape, dtype=dtype, device=self._device)
                self._broadcast(large, self._group)
                tensors.append(large)
        return tree.unflatten(tensors, description.structure)


def _pack_into(packed: Tensor, tensors: list[Tensor]) -> None:
    small = [t.detach().reshape(-1).to(packed.device, torch.float64) for t in tensors if t.numel() <= _SMALL]
    if small:
        flat = torch.cat(small)
        packed[: flat.numel()] = flat


def _numel(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number
