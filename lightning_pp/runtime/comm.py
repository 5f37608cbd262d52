"""Everything that depends on the device or the communication library; the rest of the package does not ask.

Channels own their process groups, made by their two members alone. ``torch.distributed.new_group`` either needs every
rank of the job for each pair or, with ``use_local_synchronization``, names a group by the number of groups that a rank
has seen, which differs between the middle and the end of a pipeline. So the backends are built directly, on a part of
the job's store that is named after the channel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__: list[str] = []


class PeerLost(RuntimeError):  # noqa: N818 - says what happened, as a peer's end is not an error of this rank
    """The other end of a channel went away or did not answer in time."""


def job_store() -> Any:
    """The key-value store of the job (a private name of torch; a test tells when it moves)."""
    return dist.distributed_c10d._get_default_store()


def backend_for(device: torch.device, wanted: str | None = None) -> str:
    """The name of the communication library for tensors on ``device``."""
    return wanted or ("nccl" if device.type == "cuda" else "gloo")


def make_group(name: str, rank: int, size: int, backend: str, timeout: timedelta, at: Any = None) -> Any:
    """Build a process group of ``size`` members, of which only they know; all must call with the same ``name``.

    They find each other through the store ``at``, by default the job's.
    """
    store = dist.distributed_c10d.PrefixStore(f"lightning_pp/{name}", job_store() if at is None else at)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"process_group_backend={backend!r}: allowed are 'gloo' and 'nccl'.")


def all_reduce(group: Any, tensor: Tensor) -> None:
    """Sum ``tensor`` in place over a group of :func:`make_group`, whatever its layout and dtype."""
    values = tensor.contiguous()
    with losing_peers():
        group.allreduce([torch.view_as_real(values) if values.is_complex() else values]).wait()
    if values is not tensor:
        tensor.copy_(values)


def start_sum(group: Any, tensor: Tensor) -> Any:
    """Begin to sum a contiguous ``tensor`` in place over ``group``, of whichever kind; returns what is waited for."""
    return group.allreduce([tensor])


def start_broadcast(group: Any, tensor: Tensor, source: int) -> Any:
    """Begin to give all of ``group`` the ``tensor`` of its member ``source``; returns what is waited for."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    return group.broadcast([tensor], options)


def synchronise(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def losing_peers() -> Iterator[None]:
    """Communication fails at its start, or while it is waited for, when another process has gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


class _Gather(torch.autograd.Function):
    """All members' tensors, stacked; a member's gradient is the sum of what all have for its part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def gather_with_gradients(tensor: Tensor, group: Any) -> Tensor:
    """Stack all members' tensors: ``[size, *shape]``; torch's own takes the members of a part of the job for ranks."""
    gathered: Tensor = _Gather.apply(tensor.contiguous(), group)  # type: ignore[no-untyped-call]
    return gathered


class Pending:
    """A transfer under way; holds what must stay alive until it is done."""

    __slots__ = ("_held", "_on_host", "_target", "_work")

    def __init__(self, work: Any, held: Tensor, target: Tensor, on_host: bool) -> None:
        self._work = work
        self._held: Tensor | None = held
        self._target = target
        self._on_host = on_host

    def wait(self) -> Tensor:
        """Wait for the transfer (a stream waits for NCCL, the host for Gloo); returns what was moved."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        if self._held is not None and self._target is not self._held:
            self._target.copy_(self._held, non_blocking=True)
        self._held = None
        return self._target

    def is_done(self) -> bool:
        """Whether waiting is sure to return at once (Gloo cannot tell, and says no)."""
        return not self._on_host and bool(self._work.is_completed())


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: seconds of the host's clock, and for a GPU the event that its stream passes."""

    host: float
    event: torch.cuda.Event | None = None


class Clock:
    """Tells when a device does something, in seconds of the host's monotonic clock, the same for all its processes.

    Args:
        device: A CPU does what the host does; the host runs ahead of a GPU, whose stream is followed instead.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Mark:
        """Now, on the host; for a GPU the moment at which its stream gets here."""
        if not self._is_cuda:
            return Mark(time.monotonic())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Mark(time.monotonic(), event)

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has got to ``mark``; does not wait for it."""
        return mark.event is None or bool(mark.event.query())  # type: ignore[no-untyped-call]

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """When each was passed. For a GPU the first is taken to be passed as soon as the host has made it."""
        begin = marks[0].event
        if begin is None:
            return [mark.host for mark in marks]
        return [marks[0].host + begin.elapsed_time(mark.event) / 1000 for mark in marks if mark.event is not None]


class Readback:
    """A small tensor on its way to the host; the host waits for it only when it is read."""

    __slots__ = ("_copy", "_event")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor.cpu()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> list[float]:
        """The values; waits for what came before them on the device, and for nothing behind."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._copy.tolist()
        return values


class Peer:
    """One end of a channel between two ranks, for tensors on one device.

    Args:
        group: A process group with exactly two members.
        other: The other member's rank in it.
        device: Where tensors come from and go to. Gloo moves host memory only, so tensors of another device are copied.
        backend: ``"gloo"`` or ``"nccl"``.

    Attributes:
        device: As given.
        tells_when_done: Whether it is known of a transfer, without waiting, that it is done; Gloo never knows.
    """

    def __init__(self, group: Any, other: int, device: torch.device, backend: str) -> None:
        self._group = group
        self._other = other
        self.device = device
        self._on_host = backend == "gloo"
        self.tells_when_done = not self._on_host
        self._through_host = self._on_host and device.type != "cpu"

    def send(self, tensor: Tensor) -> Pending:
        """Start to send; ``tensor`` must not be written until the result is done."""
        held = tensor.detach().contiguous()
        if self._through_host:  # memory that the device reaches by itself; the copy waits for what made the tensor
            held = torch.empty(held.shape, dtype=held.dtype, pin_memory=True).copy_(held)
        try:
            work = self._group.send([held], self._other, 0)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        return Pending(work, held, held, self._on_host)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Start to receive a tensor that the other end sends."""
        target = torch.empty(shape, dtype=dtype, device=self.device)
        held = torch.empty(shape, dtype=dtype, pin_memory=True) if self._through_host else target
        try:
            work = self._group.recv([held], self._other, 0)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        return Pending(work, held, target, self._on_host)
