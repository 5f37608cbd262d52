"""Averaged copies of the model that callbacks keep: each rank averages what it holds.

``WeightAveraging``, ``EMAWeightAveraging`` and ``StochasticWeightAveraging`` copy the module before it is cut. When it
is cut, the copy gives up what the module gives up, and keeps pace with it parameter by parameter. A checkpoint gets the
whole average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.weights.absent import absent
from lightning_pp.weights.exchange import exchange
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []

#: ``state_dict of this rank -> state_dict of the whole model, on rank 0``
Gather = Callable[[Mapping[str, Any]], dict[str, Any]]


def release(trainer: Trainer, module: LightningModule, ownership: Ownership) -> None:
    """Put what other stages own on the meta device, in all averages."""
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def replacement(name: str, tensor: Tensor) -> Tensor | None:
        if not ownership.is_here(name):
            return None if tensor.is_meta else absent(tensor, ownership.absence(name))
        return values[name].detach().clone() if tensor.is_meta else None

    for callback in compat.callbacks(trainer):
        average = compat.averaged_model(callback)
        if average is not None:
            exchange(average, (), replacement)
            vars(average)["to"] = partial(_move_present, average)


def _move_present(model: nn.Module, device: torch.device) -> nn.Module:
    """``model.to(device)``, which torch refuses where there is nothing to move."""
    exchange(model, (), lambda _, tensor: None if tensor.is_meta or tensor.device == device else tensor.to(device))
    return model


class WholeAverages(Callback):
    """Puts the whole average into a checkpoint; to stand behind the callbacks that average.

    Args:
        gather: Gathers a state dict over the stages.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for callback in compat.callbacks(trainer):
            if compat.averaged_model(callback) is None:
                continue
            state = checkpoint.get("callbacks", {}).get(callback.state_key, {})
            if "average_model_state" in state:
                state["average_model_state"] = self._gather(state["average_model_state"])
            elif "averaging_state" in checkpoint:
                checkpoint["state_dict"] = self._gather(checkpoint["state_dict"])
                if "current_model_state" in checkpoint:
                    checkpoint["current_model_state"] = self._gather(checkpoint["current_model_state"])
