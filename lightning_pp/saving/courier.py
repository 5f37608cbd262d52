"""Brings what the ranks hold to rank 0 and its answers back, over connections that carry nothing else.

A checkpoint may be asked for by one rank alone, or after a failure in the middle of other traffic. On connections of
its own neither can be taken for something else, and a rank that does not come is named.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_pp.runtime.comm import Peer, PeerLost, make_group
from lightning_pp.runtime.engine import PipelineError

__all__: list[str] = []

#: the rank that assembles and writes
WRITER = 0
_HOST = torch.device("cpu")
_ADVICE = "A checkpoint takes all processes: call trainer.save_checkpoint on every rank, not on rank 0 alone."


class Courier:
    """One rank's connections to the writer, or the writer's to all others.

    All ranks must make the same calls in the same order. Everything goes through host memory.

    Args:
        name: Of these connections, the same on all ranks and never used before.
        rank: This process's global rank.
        size: Number of processes.
        timeout: How long a rank waits for another.
    """

    def __init__(self, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._peers: dict[int, Peer] = {}
        if size > 1:
            group = make_group(name, rank, size, "gloo", timeout)
            others = range(1, size) if self.is_writer else [WRITER]
            self._peers = {other: Peer(group, other, _HOST, "gloo") for other in others}

    @property
    def is_writer(self) -> bool:
        """Whether this rank assembles and writes."""
        return self.rank == WRITER

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)
        self.share(None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on the writer; nothing on others."""
        if self.is_writer:
            return [value, *(self._receive_object(other) for other in self._peers)]
        self._send_object(value, WRITER)
        return []

    def share(self, value: Any) -> Any:
        """The writer's value, on all ranks."""
        return self.scatter([value] * self.size if self.is_writer else [])

    def scatter(self, values: list[Any]) -> Any:
        """What the writer has for this rank.

        Args:
            values: By rank; looked at on the writer only.
        """
        if not self.is_writer:
            return self._receive_object(WRITER)
        for other in self._peers:
            self._send_object(values[other], other)
        return values[WRITER]

    def collect(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """All other ranks' values on the writer, one tensor after the other; nothing on other ranks.

        Args:
            values: What this rank gives, under names that no other rank uses; plain tensors travel as they are, with
                their strides, and anything else is pickled.
        """
        if self.is_writer:
            return dict(item for other in self._peers for item in self._receive_values(other))
        self._send_object({key: _described(value) for key, value in values.items()}, WRITER)
        for value in values.values():
            if _is_plain(value) and value.numel():
                self._send(_as_bytes(value), WRITER)
        return {}

    def _receive_values(self, other: int) -> Iterator[tuple[Any, Any]]:
        for key, (value, layout) in self._receive_object(other).items():
            if layout is None:
                yield key, value
                continue
            shape, stride, dtype = layout
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                # as bytes: no library moves every dtype
                tensor = self._receive(tensor.nbytes, other).view(dtype).view(shape)
            yield (
                key,
                tensor if tensor.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype).copy_(tensor),
            )

    def _send_object(self, value: Any, other: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._send(torch.tensor([content.numel()]), other)
        self._send(content, other)

    def _receive_object(self, other: int) -> Any:
        with self._waiting_for(other):
            (length,) = self._peers[other].receive((1,), torch.int64).wait().tolist()
        return pickle.loads(self._receive(length, other).numpy().tobytes())

    def _send(self, tensor: Tensor, other: int) -> None:
        with self._waiting_for(other):
            self._peers[other].send(tensor).wait()

    def _receive(self, length: int, other: int) -> Tensor:
        with self._waiting_for(other):
            return self._peers[other].receive((length,), torch.uint8).wait()

    @contextmanager
    def _waiting_for(self, other: int) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            if "timed out" in str(error).lower():
                # not chained: nobody has failed before this rank, and the others are to hear of it
                raise RuntimeError(f"Rank {self.rank} waited {self._timeout} for rank {other}. {_ADVICE}") from None
            raise PipelineError(f"Rank {other} has ended while rank {self.rank} waited for it. {_ADVICE}") from error


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized


def _described(value: Any) -> tuple[Any, Any]:
    """What the writer must know before the bytes come, or the value itself."""
    if not _is_plain(value):
        return value.cpu() if isinstance(value, Tensor) else value, None
    contiguous = torch.empty(value.shape, device="meta").stride()
    return None, (tuple(value.shape), value.stride() if _is_dense(value) else contiguous, value.dtype)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
