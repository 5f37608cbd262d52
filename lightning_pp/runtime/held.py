"""How many bytes a stage holds for its backward: what autograd has saved, and what the stage before has sent.

Each storage counts once, from the moment at which something holds it for a backward until nothing does. While nobody
counts, nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_pp.partition.operators import storage_key

__all__: list[str] = []


class HeldBytes:
    """Counts the bytes that a stage holds for backward; results stay what they are.

    A gradient checkpoint, or hooks on saved tensors, inside of the step decide themselves what they keep: a
    checkpoint's inputs are counted, what other hooks make of a tensor is not. Hooks that the user has set around the
    whole step would be hidden by those that count, so nothing is counted then.

    Args:
        apart: Tensors whose storages are there anyway, and do not count: parameters, buffers, the batch.
        device: Where the stage computes; what lies elsewhere does not count.

    Attributes:
        now: Bytes that are held.
        peak: Most bytes that were held at once.
        growth: By how many bytes each micro-batch's forward has added.
        is_blind: Whether some of it could not be seen, as the user's own hooks surround the step.
    """

    def __init__(self, apart: Iterable[Tensor], device: torch.device) -> None:
        self._apart = frozenset(storage_key(tensor) for tensor in apart)
        self._device = device.type
        self._holders: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self.growth: dict[int, int] = {}
        self._before = 0
        self.is_blind = False

    def watched(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Call ``forward`` and count what autograd saves meanwhile."""
        self._before = self.now
        if _are_hooks_set():
            self.is_blind = True
            return forward(*args)
        try:
            with saved_tensors_hooks(self.hold, _unpacked):
                return forward(*args)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                raise RuntimeError(
                    "Activation memory cannot be counted in a step that uses torch.func.grad and its like: torch allows"
                    " no hooks on saved tensors there. Train without ActivationMemoryMonitor."
                ) from error
            raise

    def keep(self, mb: int, received: Iterable[Tensor]) -> list[Holder]:
        """The forward of ``mb`` has ended: count what it was given as well, for as long as what this returns lives."""
        holders = [self.hold(tensor) for tensor in received]
        self.growth[mb] = self.now - self._before
        return holders

    def hold(self, tensor: Tensor) -> Holder:
        """Count ``tensor`` for as long as what this returns lives."""
        key = storage_key(tensor)
        if key in self._apart or tensor.device.type != self._device:
            return Holder(tensor, None, key, 0)
        size = _size(tensor)
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if not holders:
            self.now += size
            self.peak = max(self.peak, self.now)
        return Holder(tensor, self, key, size)

    def let_go(self, key: int, size: int) -> None:
        """One holder of a storage is gone."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= size


class Holder:
    """Keeps a tensor, and is counted while it lives."""

    __slots__ = ("_counter", "_key", "_size", "_version", "tensor")

    def __init__(self, tensor: Tensor, counter: HeldBytes | None, key: int, size: int) -> None:
        self.tensor = tensor.detach()  # what a node has made must not hold the node, or neither would ever go
        self._counter = counter
        self._key = key
        self._size = size
        self._version = tensor._version

    def __del__(self) -> None:
        if self._counter is not None:
            self._counter.let_go(self._key, self._size)

    def unpack(self) -> Tensor:
        """The tensor; torch leaves it to hooks to see that nobody has written into it meanwhile."""
        if self.tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected"
                f" version {self._version} instead."
            )
        return self.tensor


def _unpacked(holder: Holder) -> Tensor:
    return holder.unpack()


def _size(tensor: Tensor) -> int:
    """Bytes of the tensor's storage; of its elements where it has no storage of its own."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0


def _are_hooks_set() -> bool:
    """Whether hooks on saved tensors are set, or forbidden, where this is called."""
    try:
        with torch.enable_grad():
            saved: Any = torch.ones(1, requires_grad=True).exp().grad_fn
        saved._raw_saved_result.register_hooks(_as_it_is, _as_it_is)
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            return False
    except RuntimeError:
        return True


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
