"""How far the clocks of a job's machines are apart; the processes of one machine share one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__: list[str] = []

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_EXCHANGES = 16


def machine() -> str:
    """Names the running system; two processes that see the same name see the same monotonic clock."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


def offsets(group: Any, name: str | None = None, now: Callable[[], float] = time.monotonic) -> list[float]:
    """Say by how many seconds each process's clock is ahead of the first one's; all processes must call it.

    A process of another machine is asked for its time a few times. The answer that came back quickest counts, and is
    taken to have been given half-way; so it is wrong by half of that way at most. It holds for the moment: clocks
    drift.

    Args:
        group: All processes, for host memory.
        name: Of this process's machine; None for :func:`machine`.
        now: This process's clock.

    Returns:
        Seconds by rank in ``group``, on its first process; 0 on the first one's machine. Elsewhere nothing.
    """
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, machine() if name is None else name, group=group)
    rank = dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group)
    if rank == 0:
        return [0.0 if other == names[0] else _ask(ranks[i], group, now) for i, other in enumerate(names)]
    if names[rank] != names[0]:
        _answer(ranks[0], group, now)
    return []


def _ask(other: int, group: Any, now: Callable[[], float]) -> float:
    told = torch.zeros(1, dtype=torch.float64)
    tries = []
    for _ in range(_EXCHANGES):
        asked = now()
        dist.send(told, other, group=group)
        dist.recv(told, other, group=group)
        answered = now()
        tries.append((answered - asked, told.item() - (asked + answered) / 2))
    return min(tries)[1]


def _answer(first: int, group: Any, now: Callable[[], float]) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        dist.recv(question, first, group=group)
        dist.send(torch.tensor([now()], dtype=torch.float64), first, group=group)
