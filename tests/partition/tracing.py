"""Traces small modules: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition.layers import find_layers
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.trace import Trace, trace_step

CPU = torch.device("cpu")


def switched(model: nn.Module, wanted: Any = None) -> Switchboard:
    board = Switchboard(find_layers(model, wanted))
    board.install()
    return board


def trace(model: nn.Module, *args: Any, wanted: Any = None, **options: Any) -> Trace:
    """The trace of ``model(*args)``."""
    board = switched(model, wanted)
    try:
        return trace_step(lambda: model(*args), model, board, CPU, **options)
    finally:
        board.remove()


def called(found: Trace) -> list[str]:
    return [call.layer for call in found.calls]


def lives(found: Trace) -> list[list[int]]:
    """The calls whose outputs cross the cut in front of each call; for layers with one output."""
    for call in range(len(found.calls)):
        assert all(leaf == 0 for _, leaf in found.live(call))
    return [[output for output, _ in found.live(call)] for call in range(len(found.calls))]


class Net(nn.Module):
    """``count`` linear layers ``layers.0`` ... and a forward that the test gives."""

    def __init__(self, count: int, forward: Callable[..., Any] | None = None, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.function = forward

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args) if self.function else chain(self, *args)


def chain(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x.sum()


class Own(nn.Module):
    """A layer with a parameter whose forward is given."""

    def __init__(self, forward: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Row(nn.Module):
    """Layers ``blocks.0`` ... called one after the other; ``glue(net, x)`` runs before each, if given."""

    def __init__(self, *blocks: nn.Module, glue: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.glue = glue

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x if self.glue is None else self.glue(self, x))
        return x
