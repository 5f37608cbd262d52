"""What the strategy costs where there is nothing to gain: one stage, against plain loops of the same module."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.contestants import QUIET, join, ours, torchs
from benchmarks.models import GPT
from lightning_pp import ActivationMemoryMonitor, BubbleMonitor, PipelineStrategy
from tests.launch import run_ranks

_MICROBATCHES = 64


class Tiny(LightningModule):
    """A block whose computation takes no time to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def per_micro_batch(rounds: int, steps: int = 30) -> dict[str, list[float]]:
    """Microseconds that a micro-batch costs beyond a plain loop of the same step, by round."""
    found: dict[str, list[float]] = run_ranks(_micro_batches, 1, rounds, steps, timeout=300)[0]
    return found


def _micro_batches(rounds: int, steps: int) -> dict[str, list[float]]:
    join(1)
    batch = torch.randn(2 * _MICROBATCHES, 8), torch.randn(2 * _MICROBATCHES, 8)
    found: dict[str, list[float]] = {"torch 1F1B": [], "1f1b": []}
    for _ in range(rounds):
        module = Tiny()
        plain = statistics.median(_plain_loop(module, batch, steps))
        peer = statistics.median(torchs(module.net, batch, _MICROBATCHES, steps, F.mse_loss))
        own = statistics.median(ours(module, batch, _MICROBATCHES, steps))
        found["torch 1F1B"].append((peer - plain) / _MICROBATCHES * 1e6)
        found["1f1b"].append((own - plain) / _MICROBATCHES * 1e6)
    return found


def _plain_loop(module: LightningModule, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = None
        start = time.perf_counter()
        parts = zip(*(part.tensor_split(_MICROBATCHES) for part in batch), strict=True)
        for index, part in enumerate(parts):
            (module.training_step(part, index) / _MICROBATCHES).backward()
        seconds.append(time.perf_counter() - start)
    return seconds


class _Stopwatch(Callback):
    """From one batch's end to the next one's: all that a batch takes."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def whole_batch(rounds: int, steps: int = 10) -> dict[str, list[float]]:
    """Seconds per batch of the GPT, plain and with the strategy in one stage and one micro-batch."""
    found: dict[str, list[float]] = run_ranks(_batches, 1, rounds, steps, timeout=600)[0]
    return found


def _batches(rounds: int, steps: int) -> dict[str, list[float]]:
    tokens = torch.randint(256, (16, 129))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found: dict[str, list[float]] = {"plain Trainer": [], "PipelineStrategy": []}
    for _ in range(rounds):
        for name, taken in found.items():
            watch = _Stopwatch()
            strategy: Any = "auto" if name == "plain Trainer" else PipelineStrategy(stages=1, microbatches=1)
            loader = DataLoader([batch] * (steps + 2), batch_size=None)
            trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[watch], **QUIET)
            trainer.fit(GPT(), loader)
            taken += [end - start for start, end in pairwise(watch.ends[1:])]
    return found


def monitors(rounds: int, steps: int = 4) -> dict[str, list[float]]:
    """Seconds per batch of the GPT in two stages, with nothing, and with each monitor measuring every batch."""
    ranks = run_ranks(_monitored, 2, rounds, steps, timeout=900)
    return {name: [max(batch) for batch in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def _monitored(rounds: int, steps: int) -> dict[str, list[float]]:
    join(2)
    tokens = torch.randint(256, (32, 129))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found: dict[str, list[float]] = {"no monitor": [], "BubbleMonitor": [], "ActivationMemoryMonitor": []}
    for _ in range(rounds):
        for name, taken in found.items():
            watch = _Stopwatch()
            callbacks: list[Callback] = [watch]
            if name == "BubbleMonitor":
                callbacks.insert(0, BubbleMonitor(every_n_steps=1))
            elif name == "ActivationMemoryMonitor":
                callbacks.insert(0, ActivationMemoryMonitor(every_n_steps=1))
            ours(GPT(), batch, 8, steps, 2, callbacks, split=["blocks.4"])
            taken += [end - start for start, end in pairwise(watch.ends[1:])]
    return found
