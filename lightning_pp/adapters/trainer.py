"""Lightning's own callbacks, fitted to a model whose stages lie on several processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter, ThroughputMonitor
from torch.overrides import TorchFunctionMode

from lightning_pp import compat
from lightning_pp.adapters import averages, logged, summary
from lightning_pp.pipeline import Pipeline
from lightning_pp.runtime.mesh import Mesh

__all__: list[str] = []


def install(
    trainer: Trainer, module: LightningModule, mesh: Mesh, current: Callable[[], Pipeline], gather: averages.Gather
) -> None:
    """Fit the Trainer's callbacks, when the model has been cut; those that are fitted already stay as they are.

    Args:
        trainer: Whose run begins.
        module: The user's module.
        mesh: This process's position.
        current: Gives the pipeline of the run under way.
        gather: Gathers a state dict over the stages.
    """
    callbacks = compat.callbacks(trainer)
    compat.silence_sync_dist_advice()
    logged.install(trainer, current().metrics, lambda: current().metrics)
    averages.release(trainer, module, current().ownership)
    if not any(isinstance(callback, averages.WholeAverages) for callback in callbacks):
        callbacks.append(averages.WholeAverages(gather))
    summary.install(callbacks, current)
    for callback in callbacks:
        for cls, fit in _ADAPTERS:
            if isinstance(callback, cls):
                fit(callback, mesh)


def _finetuning(callback: Any, mesh: Mesh) -> None:
    """Lightning compares the values of parameters to see whether an optimizer has them; most are not here."""
    if mesh.num_stages > 1 and "finetune_function" not in vars(callback):
        callback.finetune_function = partial(_by_identity, callback.finetune_function)


def _by_identity(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _EqualIfSame():
        return function(*args, **kwargs)


class _EqualIfSame(TorchFunctionMode):
    """Answers ``torch.equal`` by identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal:
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))


def _prediction_writer(callback: Any, mesh: Mesh) -> None:
    """All stages have the predictions; the first one writes them."""
    if mesh.position > 0:
        callback.write_on_batch_end = callback.write_on_epoch_end = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _throughput(callback: Any, mesh: Mesh) -> None:
    """The stages of a pipeline are one device that is as fast as all of them."""
    for throughput in compat.throughputs(callback):
        throughput.world_size = mesh.num_replicas
        if callback.available_flops is not None:
            throughput.available_flops = callback.available_flops * mesh.num_stages


_ADAPTERS: tuple[tuple[type[Callback], Callable[[Any, Mesh], None]], ...] = (
    (BaseFinetuning, _finetuning),
    (BasePredictionWriter, _prediction_writer),
    (ThroughputMonitor, _throughput),
)
