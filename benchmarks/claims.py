"""What the method promises: little bubble at little memory, transfers hidden, buffers that do not grow."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contestants import join, ours, timed
from benchmarks.models import GPT, Sleepers
from lightning_pp import ActivationMemoryMonitor, BubbleMonitor
from lightning_pp.runtime import links
from lightning_pp.runtime.comm import Peer, Pending
from tests.launch import run_ranks

_WIDTH = 2**14


@dataclass(frozen=True)
class Run:
    """What one number of micro-batches comes to.

    Attributes:
        bubble: Measured, of the whole pipeline.
        closed_form: (P-1)/(M+P-1).
        peak_bytes: Most that a stage holds for backward.
        buffers: Most messages posted or waiting on any stage.
    """

    bubble: float
    closed_form: float
    peak_bytes: float
    buffers: float


def bubble_and_memory(schedule: str, microbatches: int, milliseconds: tuple[float, float], stages: int = 4) -> Run:
    """Train sleeping stages for a step and measure the second one with the package's own callbacks."""
    found: Run = run_ranks(_measured, stages, schedule, microbatches, milliseconds, timeout=600)[0]
    return found


def _measured(schedule: str, microbatches: int, milliseconds: tuple[float, float]) -> Run:
    stages = int(os.environ["WORLD_SIZE"])
    join(stages)
    forward, backward = (one / 1000 for one in milliseconds)
    few = min(microbatches, 2 * stages)
    batches = [(torch.ones(number, _WIDTH), torch.ones(number, 8)) for number in (few, microbatches)]
    bubble, memory = BubbleMonitor(), ActivationMemoryMonitor()
    timed(Sleepers(stages, (forward, backward)), batches, microbatches, [bubble, memory], schedule=schedule)
    return Run(
        bubble.last["pipeline/bubble_fraction"],
        (stages - 1) / (microbatches + stages - 1),
        max(memory.last[f"pipeline/stage{stage}/activation_peak_bytes"] for stage in range(stages)),
        max(memory.last[f"pipeline/stage{stage}/buffers_peak"] for stage in range(stages)),
    )


class _DelayedPeer(Peer):
    """A link on which every message takes some time longer: it carries when it was sent."""

    delay = 0.0

    def send(self, tensor: Any) -> Pending:
        stamp = super().send(torch.tensor([time.monotonic()], dtype=torch.float64))
        return _Both(stamp, super().send(tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        stamp = super().receive((1,), torch.float64)
        return _Late(stamp, super().receive(shape, dtype), self.delay)


class _Both(Pending):
    def __init__(self, stamp: Pending, message: Pending) -> None:
        self._stamp, self._message = stamp, message

    def wait(self) -> Any:
        self._stamp.wait()
        return self._message.wait()

    def is_done(self) -> bool:
        return self._message.is_done()


class _Late(_Both):
    def __init__(self, stamp: Pending, message: Pending, delay: float) -> None:
        super().__init__(stamp, message)
        self._delay = delay

    def wait(self) -> Any:
        tensor = self._message.wait()
        left = float(self._stamp.wait()) + self._delay - time.monotonic()
        if left > 0:
            time.sleep(left)
        return tensor


def delayed(
    rounds: int,
    schedules: tuple[str, ...] = ("1f1b", "auto_1f1b", "eager_1f1b"),
    milliseconds: tuple[float, float] = (20, 40),
) -> dict[str, list[float]]:
    """Step time with links that take 0.1 F longer, over that without; by schedule."""
    ranks = run_ranks(_delayed, 4, rounds, schedules, milliseconds, timeout=900)
    return {name: [max(one) for one in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def _delayed(rounds: int, schedules: tuple[str, ...], milliseconds: tuple[float, float]) -> dict[str, list[float]]:
    join(4)
    forward, backward = (one / 1000 for one in milliseconds)
    batch = torch.ones(64, 64), torch.ones(64, 8)
    links.Peer = _DelayedPeer  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(rounds):
        for name in schedules:
            times = []
            for seconds in (0.0, 0.1 * forward):
                _DelayedPeer.delay = seconds
                times.append(min(ours(Sleepers(4, (forward, backward)), batch, 64, 2, warmup=3, schedule=name)))
            found[name].append(times[1] / times[0])
    return found


class _Watched(GPT):
    """Measures how long a stage takes to get to its first own layer, and to its end."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks)
        self.glue: list[float] = []
        self.whole: list[float] = []
        self._start = 0.0

    def watch(self, first: Any) -> None:
        first.register_forward_pre_hook(lambda *_: self.glue.append(time.thread_time() - self._start))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._start = time.thread_time()
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.whole.append(time.thread_time() - self._start)


def glue(blocks: int = 48, stages: int = 4) -> float:
    """CPU time before the last stage's first layer, as a share of that stage's forward."""
    share: float = run_ranks(_glue, stages, blocks, stages, timeout=600)[-1]
    return share


def _glue(blocks: int, stages: int) -> float:
    join(stages)
    tokens = torch.randint(256, (4 * 8, 129))
    module = _Watched(blocks)
    if dist.get_rank() == stages - 1:
        module.watch(module.blocks[blocks - blocks // stages])
    ours(module, (tokens[:, :-1], tokens[:, 1:]), 8, 2, split=module.split(stages))
    if not module.glue:
        return 0.0
    return statistics.median(module.glue[-16:]) / statistics.median(module.whole[-16:])
