"""Plans a LightningModule's training step for a new shape, with layers that need not be run and without."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pp.partition import tree
from lightning_pp.partition.alike import Alike
from lightning_pp.partition.layers import find_layers
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.trace import Trace, trace_step

CPU = torch.device("cpu")


def replanned(module: LightningModule, batch: Any, layers: Any = None) -> tuple[Trace, Trace]:
    """What a trace of two samples of ``batch`` says after one of three, and what a trace says that runs all layers."""
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module.train()
    board = Switchboard(find_layers(module, layers))
    board.install()
    alike = Alike()

    def traced(size: int, **options: Any) -> Trace:
        def step() -> Any:
            return module.training_step(tree.map_leaves(cut, batch), 0)

        def cut(leaf: Any) -> Any:
            return leaf[:size] if isinstance(leaf, Tensor) and leaf.ndim else leaf

        return trace_step(step, module, board, CPU, **options)

    try:
        traced(3, twice=True, alike=alike)
        return traced(2, measured=False, alike=alike), traced(2, measured=False)
    finally:
        board.remove()
