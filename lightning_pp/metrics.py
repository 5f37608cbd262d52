"""torchmetrics in a module: updated where the step ends, the last stage; computed there, and known on all ranks.

Between steps every rank runs the same hooks, so ``compute`` is called on all of them, and the last stage's value is the
true one. Inside a step only the last stage calls it, and gets its own value. torchmetrics' own synchronisation would
gather from processes that have seen nothing, or wait for ones that never ask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pp.partition import tree

__all__: list[str] = []


class SharedMetrics:
    """Makes the metrics of ``module`` give the last stage's values on every rank.

    Args:
        module: The user's module.
        group: All ranks of the pipeline, for host memory.
        source: Global rank of the last stage.
        in_step: Whether a step function is running.
        device: Where values go.
    """

    def __init__(
        self, module: LightningModule, group: Any, source: int, in_step: Callable[[], bool], device: torch.device
    ) -> None:
        self._group = group
        self._source = source
        self._in_step = in_step
        self._device = device
        self._originals: list[tuple[Metric, Any, Any]] = []
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._originals.append((metric, metric.compute, metric.distributed_available_fn))
                metric.compute = self._shared(metric.compute)  # type: ignore[method-assign]
                metric.distributed_available_fn = _never

    def release(self) -> None:
        """Give the metrics their own ways back."""
        for metric, compute, available in self._originals:
            metric.compute = compute  # type: ignore[method-assign]
            metric.distributed_available_fn = available
        self._originals.clear()

    def _shared(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute)
        def shared(*args: Any, **kwargs: Any) -> Any:
            if self._in_step():
                return compute(*args, **kwargs)
            box = [None]
            if dist.get_rank() == self._source:
                box = [_moved(compute(*args, **kwargs), torch.device("cpu"))]
            dist.broadcast_object_list(box, src=self._source, group=self._group)
            return _moved(box[0], self._device)

        return shared


def _moved(value: Any, device: torch.device) -> Any:
    return tree.map_leaves(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, value)


def _never() -> bool:
    return False
