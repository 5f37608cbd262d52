"""Loss scaling: one decision on skipped steps, and so one scale, for all stages.

A GradScaler looks for overflows in the gradients of its own process. What it finds is put together over the stages at
the one place where it looks, ``_unscale_grads_``: so every path agrees, that of optimizers which unscale inside of
``step`` as well, and a stage without gradients takes part too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.cpu.amp.grad_scaler import GradScaler as CpuScaler
from torch.cuda.amp.grad_scaler import GradScaler as CudaScaler
from torch.optim import Optimizer

from lightning_pp.launch.collective import all_reduce

__all__: list[str] = []

_SEARCH = "_unscale_grads_"


def is_known(scaler: Any) -> bool:
    """Whether ``scaler`` looks for overflows where :func:`agree` expects it to."""
    return type(scaler) in (GradScaler, CpuScaler, CudaScaler)


def agree(scaler: GradScaler, group: Any) -> None:
    """Make ``scaler`` skip a step on all stages where one of them has an overflow.

    Its settings and its state stay as they are.

    Args:
        scaler: The precision plugin's.
        group: All stages, for device memory.
    """
    search: Callable[..., dict[torch.device, Tensor]] = getattr(type(scaler), _SEARCH)

    def search_all_stages(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = search(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        overflow = found_inf.clone()  # zero, and all that a stage without gradients has
        for here in found.values():
            overflow = torch.maximum(overflow, here.to(overflow.device))
        all_reduce(overflow, group, dist.ReduceOp.MAX)
        return {overflow.device: overflow}

    vars(scaler)[_SEARCH] = search_all_stages


def release(scaler: GradScaler) -> None:
    """Let ``scaler`` look in its own process again."""
    vars(scaler).pop(_SEARCH, None)
