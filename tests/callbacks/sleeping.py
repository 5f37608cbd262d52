"""A module whose layers take known times."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.models import Module, regression_data


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grads[0].clone(), None, None


class SleepyLayer(nn.Module):
    """A linear layer that takes ``forward`` and ``backward`` seconds more."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(self.linear(x), *self.seconds)
        return slept


class Sleepy(Module):
    """Layers of known times: one stage each, where the split says so."""

    forward_seconds: tuple[float, ...] = (0.06, 0.06, 0.06, 0.06)
    backward_seconds: tuple[float, ...] = (0.12, 0.12, 0.12, 0.12)
    steps = 6

    def __init__(self) -> None:
        super().__init__()
        times = zip(self.forward_seconds, self.backward_seconds, strict=True)
        self.net = nn.Sequential(*(SleepyLayer(f, b) for f, b in times))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x)[:, :3], y)

    @classmethod
    def loader(cls) -> DataLoader[Any]:
        return DataLoader(regression_data(8 * cls.steps), batch_size=8)


class UnequalSleepy(Sleepy):
    """The middle stage takes longest."""

    forward_seconds = (0.04, 0.06, 0.02)
    backward_seconds = (0.06, 0.14, 0.04)


class UnequalReplicas(Sleepy):
    """Two stages; the second pipeline takes twice as long as the first, whose times these are."""

    forward_seconds = (0.03, 0.05)
    backward_seconds = (0.06, 0.1)
    steps = 8  # of which each pipeline takes half

    def __init__(self) -> None:
        factor = 1 + int(os.environ["LOCAL_RANK"]) % 2
        self.forward_seconds = tuple(factor * seconds for seconds in self.forward_seconds)
        self.backward_seconds = tuple(factor * seconds for seconds in self.backward_seconds)
        super().__init__()
