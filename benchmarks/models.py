"""What is trained: stages that sleep known times, and a small GPT, each whole and cut for a peer."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_gpt import Block


class Slept:
    """How long sleeps have really taken; they last a little longer than asked for."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: tuple[float, float], slept: Slept) -> Tensor:
        ctx.seconds, ctx.slept = seconds, slept
        start = time.perf_counter()
        time.sleep(seconds[0])
        slept.forward.append(time.perf_counter() - start)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start = time.perf_counter()
        time.sleep(ctx.seconds[1])
        ctx.slept.backward.append(time.perf_counter() - start)
        return grads[0], None, None


class SleepyBlock(nn.Module):
    """Takes ``seconds`` in forward and backward, and next to no work."""

    def __init__(self, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds
        self.slept = Slept()

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x * self.weight, self.seconds, self.slept)
        return slept


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """A loss that costs nothing: only the first numbers count."""
    return F.mse_loss(output[:, :8], target)


class Sleepers(LightningModule):
    """One sleeping block per stage, and a loss that costs nothing."""

    def __init__(self, stages: int, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SleepyBlock(seconds) for _ in range(stages)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return mean_square(self.blocks(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, context, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions[:, : tokens.shape[1]]


class GPT(LightningModule):
    """A decoder-only transformer over bytes, as one writes it without a thought of pipelines."""

    def __init__(self, blocks: int = 8, width: int = 256, context: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width, context)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return next_token_loss(self(tokens), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def stage(self, index: int, number: int) -> nn.Sequential:
        """The layers of one of ``number`` equal stages."""
        size = len(self.blocks) // number
        layers: list[nn.Module] = list(self.blocks[index * size : (index + 1) * size])
        if index == 0:
            layers.insert(0, self.embedding)
        if index == number - 1:
            layers += [self.norm, self.head]
        return nn.Sequential(*layers)

    def split(self, number: int) -> list[str]:
        """The names at which the same stages begin, for ``PipelineStrategy(split=...)``."""
        size = len(self.blocks) // number
        return [f"blocks.{stage * size}" for stage in range(1, number)]
