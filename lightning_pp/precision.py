"""What the precision plugins do per process and a pipeline must do over all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

__all__: list[str] = []

SUPPORTED = "'32-true', '64-true', 'bf16-true', '16-true' and 'bf16-mixed'"


def is_supported(plugin: Precision) -> bool:
    """Whether training in a pipeline gives with ``plugin`` what a single process gives."""
    if isinstance(plugin, MixedPrecision):
        return type(plugin) is MixedPrecision and plugin.scaler is None
    return type(plugin) in (Precision, DoublePrecision, HalfPrecision)


def clip_over_stages(
    plugin: Precision, counts_here: Callable[[Tensor], bool], group: Any, device: torch.device
) -> None:
    """Make ``plugin`` clip by the norm over all stages.

    Args:
        plugin: The Trainer's precision plugin.
        counts_here: Whether this rank is the one that counts a parameter (a tied one lies on several).
        group: All stages; None for a single one.
        device: Where gradients live.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(plugin.main_params(optimizer))
        norm = global_norm([p for p in parameters if counts_here(p)], group, device)
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], clip_val, norm)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]


def global_norm(parameters: Sequence[Tensor], group: Any, device: torch.device) -> Tensor:
    """The 2-norm of all stages' gradients; the same number on every stage.

    Args:
        parameters: Those that this rank counts.
        group: All stages; None for a single one.
        device: Where gradients live.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=device)
    if group is None:
        return norm
    dtype = norm.dtype
    square = norm.double().square()
    dist.all_reduce(square, group=group)
    return square.sqrt().to(dtype)
