"""What the precision plugins do per process and a pipeline must do over all stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_pp.optimization import scaler
from lightning_pp.optimization.clipping import StageClipping
from lightning_pp.optimization.norms import StageNorms

__all__: list[str] = []

_SUPPORTED = "'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' and '16-mixed'"


def check(plugin: Precision) -> None:
    """Check that training in a pipeline gives with ``plugin`` what a single process gives.

    Raises:
        MisconfigurationException: It does not.
    """
    if type(plugin) not in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
        raise MisconfigurationException(
            f"PipelineStrategy does not support {type(plugin).__name__} (precision={plugin.precision!r}). Supported are"
            f" {_SUPPORTED}, with Lightning's own plugins for them."
        )
    own = getattr(plugin, "scaler", None)
    if own is not None and not scaler.is_known(own):
        raise MisconfigurationException(
            f"PipelineStrategy does not support a {type(own).__module__}.{type(own).__qualname__} as loss scaler, whose"
            " decisions all stages would have to share. Give MixedPrecision(scaler=...) a torch.amp.GradScaler, with"
            " any settings."
        )


def step_context(plugin: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a step. The plugins that are supported wrap this one for each kind of step, and add nothing.

    It is entered for every micro-batch on every stage, so that it matters how long that takes.
    """
    return plugin.forward_context


def loss_scaling(plugin: Precision) -> Callable[[Tensor], Tensor] | None:
    """What multiplies a loss by the present scale; None where nothing does."""
    own = getattr(plugin, "scaler", None)
    return None if own is None else own.scale


class StepAgreement:
    """What the stages agree on between a backward pass and the optimizer's step, while a pipeline trains.

    Args:
        plugin: The Trainer's precision plugin.
        norms: Takes norms over all stages.
        group: All stages, for device memory; None for a single one.
        host_group: The same for host memory.
    """

    def __init__(self, plugin: Precision, norms: StageNorms, group: Any, host_group: Any) -> None:
        self.norms = norms
        self._plugin = plugin
        self._scaler = getattr(plugin, "scaler", None)
        self._clipping: StageClipping | None = None

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            norms.clip(plugin.main_params(optimizer), clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
        if group is not None:
            self._clipping = StageClipping(norms, host_group)
            if self._scaler is not None:
                scaler.agree(self._scaler, group)

    def check(self) -> None:
        """Find out, after hooks that may have clipped, whether they did so on all stages."""
        if self._clipping is not None:
            self._clipping.check()

    def release(self) -> None:
        """Leave the plugin, and torch, as they were."""
        vars(self._plugin).pop("clip_grad_by_norm", None)
        if self._clipping is not None:
            self._clipping.remove()
            if self._scaler is not None:
                scaler.release(self._scaler)
