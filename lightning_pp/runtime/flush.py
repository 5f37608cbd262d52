"""What is shared at the end of a step: what the last stage knows reaches every rank, and batches are compared.

One packed int64 tensor carries the bits of the loss, of logged values and of small results from the last stage, which
is ready first, to the others, so that nobody waits. The checksums of the batch, one from each stage, are summed up
beside the whole step: that begins before its first micro-batch. What the values are (names, structure, dtypes) is
described separately, and a description travels only the first time it occurs; afterwards its number in the packed
tensor is enough.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.runtime.comm import Readback, losing_peers, start_broadcast, start_sum

__all__: list[str] = []

#: tensors with more elements than this travel on their own
_SMALL = 1024
#: descriptions remembered; a step that never repeats one costs an exchange each time, not memory
_REMEMBERED = 256
#: how far checksums may lie apart, by their size: sums on different devices differ in the last digits
_TOLERANCE = 1e-6


class DifferentBatchesError(RuntimeError):
    """The stages of one pipeline were given different batches."""


@dataclass(frozen=True, slots=True)
class _Description:
    structure: object
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def num_packed(self) -> int:
        """Int64 places that the small tensors take."""
        return sum(_places(shape, dtype) for shape, dtype in self.tensors if _is_small(shape))


class Flush:
    """Shares what the last stage reports.

    Args:
        group: All ranks of the pipeline, in order of position, for nothing but this; None for a single one.
        host_group: The same ranks for host memory.
        position: This rank's place in it.
        size: Number of ranks.
        device: Where the packed tensor lives.
        reads_packed: Whether the host reads the packed tensor at once, as it may where that costs no waiting. Otherwise
            the number of the description travels through host memory and checksums are compared a step later. None:
            on a CPU.
    """

    def __init__(
        self,
        group: Any,
        host_group: Any,
        position: int,
        size: int,
        device: torch.device,
        reads_packed: bool | None = None,
    ) -> None:
        self._group = group
        self._host_group = host_group
        self._position = position
        self._size = size
        self._device = device
        self._reads_packed = device.type == "cpu" if reads_packed is None else reads_packed
        self._known: list[_Description] = []
        self._numbers: dict[bytes, int] = {}
        self._capacity = 0
        self._sums: tuple[Tensor, Any] | None = None
        self._coming: tuple[Tensor, Any] | None = None
        self._pending: Readback | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to share with."""
        return self._size == 1

    def begin(self, checksum: Tensor) -> None:
        """Start to compare the batches, at the beginning of a step; all ranks must call, and :meth:`share` follows.

        Args:
            checksum: This rank's float64 scalar for its batch.
        """
        if self._size == 1:
            return
        if not self._reads_packed:
            self.check()
        sums = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        sums[self._position] = checksum
        with losing_peers():
            self._sums = sums, start_sum(self._group, sums)

    def expect(self) -> None:
        """Start to receive what the last stage will share, where this rank has something left to do meanwhile.

        May be called between :meth:`begin` and :meth:`share`, whatever other ranks do. On a GPU it does nothing, as a
        collective that waits there keeps a part of it busy.
        """
        if self._size == 1 or not self._reads_packed or self._position == self._size - 1:
            return
        packed = self._new_packed()
        with losing_peers():
            self._coming = packed, start_broadcast(self._group, packed, self._size - 1)

    def share(self, report: Any) -> Any:
        """Give every rank the last stage's ``report`` (others pass None).

        Args:
            report: Any nesting of tensors and picklable plain values.

        Raises:
            DifferentBatchesError: The checksums differ. On a GPU this comes one step late, so as not to wait for it.
            TypeError: The report holds what cannot be sent to another process.
        """
        if self._size == 1:
            return report
        tensors: list[Tensor] = []
        text = b""
        number = -1
        if self._position == self._size - 1:
            tensors, text = _described(report)
            number = self._numbers.get(text, len(self._known))
        packed, number = self._exchange(tensors, number)
        self._end_comparison()  # not before: what others have started to receive must come
        if number >= len(self._known):
            description = self._send_description(text)
            packed = self._broadcast_packed(tensors, description)
        else:
            description = self._known[number]
        return self._unpacked(packed, tensors, description)

    def check(self) -> None:
        """Compare the checksums that were shared last, unless that was done."""
        if self._pending is None:
            return
        sums, self._pending = self._pending.read(), None
        if max(sums) - min(sums) > _TOLERANCE * max(1.0, max(map(abs, sums))):
            raise DifferentBatchesError(
                "The stages saw different batches: their checksums, by stage, are"
                f" {sums}. Every stage must read the same samples in the same order with the same augmentation:"
                " seed the dataset's random numbers by index, not by process, and do not draw random numbers on"
                " rank 0 alone."
            )

    def _end_comparison(self) -> None:
        if self._sums is None:
            return
        (sums, work), self._sums = self._sums, None
        with losing_peers():
            work.wait()
        self._pending = Readback(sums)
        if self._reads_packed:
            self.check()

    def _exchange(self, tensors: list[Tensor], number: int) -> tuple[Tensor, int]:
        """The one collective; the number of a new description is the number of those known."""
        if self._coming is not None:
            (packed, work), self._coming = self._coming, None
        else:
            packed = self._new_packed()
            if self._position == self._size - 1:
                packed[0] = number
                if number < len(self._known):
                    _pack_into(packed[1:], tensors)
            with losing_peers():
                work = start_broadcast(self._group, packed, self._size - 1)
        with losing_peers():
            work.wait()
        return packed[1:], int(packed[0].item()) if self._reads_packed else self._number_on_host(number)

    def _new_packed(self) -> Tensor:
        """Room for the number of a description, and for all that one of those known has packed."""
        return torch.zeros(1 + self._capacity, dtype=torch.int64, device=self._device)

    def _number_on_host(self, number: int) -> int:
        """Off the device's queue, so that the host need not wait for the device."""
        box = torch.tensor([number], dtype=torch.int64)
        self._broadcast(box, self._host_group)
        return int(box.item())

    def _send_description(self, text: bytes) -> _Description:
        box = [text]
        source = dist.get_global_rank(self._host_group, self._size - 1)
        with losing_peers():
            dist.broadcast_object_list(box, src=source, group=self._host_group)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
            self._numbers.clear()
            self._capacity = 0
        description: _Description = pickle.loads(box[0])
        self._numbers[box[0]] = len(self._known)
        self._known.append(description)
        self._capacity = max(self._capacity, description.num_packed())
        return description

    def _broadcast_packed(self, tensors: list[Tensor], description: _Description) -> Tensor:
        packed = torch.zeros(description.num_packed(), dtype=torch.int64, device=self._device)
        _pack_into(packed, tensors)
        if packed.numel():
            self._broadcast(packed, self._group)
        return packed

    def _broadcast(self, tensor: Tensor, group: Any) -> None:
        with losing_peers():
            start_broadcast(group, tensor, self._size - 1).wait()

    def _unpacked(self, packed: Tensor, own: list[Tensor], description: _Description) -> Any:
        tensors: list[Tensor] = []
        offset = 0
        for index, (shape, dtype) in enumerate(description.tensors):
            if _is_small(shape):
                places = _places(shape, dtype)
                tensors.append(_from_bits(packed[offset : offset + places], dtype).reshape(shape))
                offset += places
            else:
                if own:
                    large = own[index].detach().to(self._device).contiguous()
                else:
                    large = torch.empty(shape, dtype=dtype, device=self._device)
                self._broadcast(large.view(torch.uint8), self._group)  # not every library knows every dtype
                tensors.append(large)
        return tree.unflatten(tensors, description.structure)


def _described(report: Any) -> tuple[list[Tensor], bytes]:
    """The tensors of a report, and the rest of it as bytes."""
    tensors, structure = tree.flatten(report)
    description = _Description(structure, tuple((tuple(t.shape), t.dtype) for t in tensors))
    try:
        return tensors, pickle.dumps(description)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            "What a step logs or returns goes to all ranks of the pipeline, and something in it cannot be sent to"
            f" another process: {error}. Return tensors, numbers, strings and containers of them."
        ) from error


def _pack_into(packed: Tensor, tensors: list[Tensor]) -> None:
    small = [_to_bits(tensor.detach().to(packed.device)) for tensor in tensors if _is_small(tuple(tensor.shape))]
    if small:
        flat = torch.cat(small)
        packed[: flat.numel()] = flat


def _to_bits(tensor: Tensor) -> Tensor:
    """A tensor of any dtype as a row of int64, without loss."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)
    return flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back; a copy, as who keeps one value of many steps should not keep all that travelled with it."""
    if dtype.is_complex:
        return torch.view_as_complex(bits.clone().view(torch.float64).reshape(-1, 2)).to(dtype)
    return (bits.view(torch.float64) if dtype.is_floating_point else bits).to(dtype, copy=True)


def _is_small(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= _SMALL


def _places(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * (2 if dtype.is_complex else 1)
