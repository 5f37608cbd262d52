"""What a message takes between two processes on this machine, measured on channels like those of a run."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_pp.runtime.channel import Receiver, Sender, Spec
from lightning_pp.runtime.comm import Peer, make_group
from lightning_pp.runtime.transfer import trip_seconds

__all__: list[str] = []

_HOST = torch.device("cpu")
_TIMEOUT = timedelta(seconds=60)
#: numbers in a message: of one all is latency, of the other next to nothing
_SMALL, _LARGE = 1, 2**20
_BYTES_EACH = 4


@dataclass(frozen=True, slots=True)
class Link:
    """What messages between two stages take.

    Attributes:
        latency: Seconds of a message without content.
        bytes_per_second: What it can carry.
    """

    latency: float
    bytes_per_second: float


def measure_link() -> Link:
    """Send messages of float32 to another process and back, over Gloo.

    Raises:
        ValueError: The two cannot reach each other.
    """
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    other = multiprocessing.get_context("spawn").Process(target=_answer, args=(store.port,), daemon=True)
    other.start()
    try:
        small, large = _trips(store, 0)
    except RuntimeError as error:  # of the store, of Gloo at its start, or a lost peer
        raise ValueError(
            f"two processes on this machine cannot send each other messages ({error}): say --latency and --bandwidth"
        ) from error
    finally:
        other.join(timeout=1)
        other.kill()
    size = (_LARGE - _SMALL) * _BYTES_EACH
    return Link(small, size / max(large - small, 1e-9))


def _answer(port: int) -> None:
    """The other process."""
    torch.set_num_threads(1)
    _trips(TCPStore("127.0.0.1", port, 2, is_master=False, timeout=_TIMEOUT), 1)


def _trips(store: Any, end: int) -> list[float]:
    peers = [Peer(make_group(name, end, 2, "gloo", _TIMEOUT, store), 1 - end, _HOST, "gloo") for name in ("F", "B")]
    there, back = peers if end == 0 else reversed(peers)
    sender, receiver = Sender(there, there), Receiver(back, back)
    sizes = (_SMALL, _LARGE)
    return [
        trip_seconds(sender, receiver, (Spec((size,), torch.float32, False),), _HOST, is_first=end == 0)
        for size in sizes
    ]
