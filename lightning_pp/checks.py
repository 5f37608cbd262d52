"""Refuses, before the first step, what a pipeline cannot honour; each message says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pp.compat import callbacks, is_overridden, takes_iterator
from lightning_pp.optimization import precision
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []

#: callbacks by the name of their class, which not every version of Lightning has
_CALLBACKS = {
    "ModelPruning": "it rewrites parameters that lie on other stages",
    "BatchSizeFinder": "one rank that runs out of memory would leave the others waiting",
}

#: optimizers of torch and of well-known packages that mix parameters, by how the names of their classes begin
_OPTIMIZERS = {
    "LBFGS": "its line search needs all parameters",
    "Prodigy": "it estimates one step size from all gradients",
    "DAdapt": "it estimates one step size from all gradients",
    "DoG": "it estimates one step size from all gradients",
    "SAM": "it moves all parameters by one norm of all gradients",
    "ASAM": "it moves all parameters by one norm of all gradients",
}


def check_run(trainer: Trainer, module: LightningModule, num_stages: int, num_replicas: int) -> None:
    """Check everything about a run that does not need a batch.

    Raises:
        MisconfigurationException: Something would be wrong or ignored.
    """
    _check_module(module)
    precision.check(trainer.precision_plugin)
    if num_replicas > 1:
        _check_gradients_are_dense(module, num_replicas)
    if num_stages == 1:
        return
    for callback in callbacks(trainer):
        for cls in type(callback).__mro__:
            why = _CALLBACKS.get(cls.__name__)
            if why is not None:
                raise MisconfigurationException(
                    f"PipelineStrategy does not support the callback {type(callback).__name__}: {why}. Remove it."
                )


def check_copies(trainer: Trainer, module: LightningModule) -> None:
    """Check, before callbacks copy the model, that it is there to be copied.

    Raises:
        MisconfigurationException: An earlier run has left each process its own stage.
    """
    if not any(parameter.is_meta for parameter in module.parameters()) or Ownership.of(module) is None:
        return
    for callback in callbacks(trainer):
        if any(cls.__name__ == "WeightAveraging" for cls in type(callback).__mro__):
            raise MisconfigurationException(
                f"{type(callback).__name__} copies the whole model when a run begins, and this {type(module).__name__}"
                " was cut into stages by an earlier run. Save a checkpoint, and load it into a new module."
            )


def _check_module(module: LightningModule) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"PipelineStrategy does not support manual optimization, and {name} sets"
            " `automatic_optimization = False`. The backward passes belong to the pipeline's schedule: let Lightning"
            " optimize (one optimizer, the loss returned from training_step)."
        )
    if is_overridden("backward", module):
        raise MisconfigurationException(
            f"{name} overrides `backward`, which a pipeline cannot call: it runs one backward per micro-batch and"
            " stage. Put loss scaling into training_step and gradient changes into `on_after_backward`."
        )
    for path, inner in module.named_modules():
        if isinstance(inner, DistributedDataParallel) or type(inner).__name__.startswith(("FSDP", "FullySharded")):
            raise MisconfigurationException(
                f"{name}.{path} is wrapped in {type(inner).__name__}. Give PipelineStrategy the plain module."
            )
        if any(torch.nn.parameter.is_lazy(p) for p in inner.parameters(recurse=False)):
            raise MisconfigurationException(
                f"{name}.{path} has lazy parameters, whose shapes are not known yet. Run one batch through the model"
                " before `fit`, or give the sizes."
            )


def check_takes_batches(trainer: Trainer, module: LightningModule) -> None:
    """Check that ``training_step`` is given batches, and not the loader's iterator.

    Raises:
        MisconfigurationException: It takes the iterator.
    """
    if takes_iterator(trainer):
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step takes `dataloader_iter`. A pipeline cuts the batch itself: take"
            " `batch, batch_idx`."
        )


def _check_gradients_are_dense(module: LightningModule, num_replicas: int) -> None:
    for path, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            raise MisconfigurationException(
                f"{type(module).__name__}.{path} makes sparse gradients, which PipelineStrategy cannot sum over"
                f" {num_replicas} replicas. Use sparse=False, or as many devices as stages."
            )


def check_optimizers(optimizers: list[Any], num_stages: int) -> None:
    """Check what ``configure_optimizers`` returned."""
    if num_stages == 1:
        return
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for cls in type(optimizer).__mro__:
            why = next((why for start, why in _OPTIMIZERS.items() if cls.__name__.startswith(start)), None)
            if why is not None:
                raise MisconfigurationException(
                    f"PipelineStrategy does not support {name}: {why}, and a stage has only its own. Use an optimizer"
                    " that updates each parameter from its own gradient."
                )
        if any(group.get("max_grad_norm") for group in optimizer.param_groups):
            raise MisconfigurationException(
                f"{name} clips by the norm of the gradients that it is given, and in a pipeline those are one stage's:"
                " give it max_grad_norm=None (or 0), and use Trainer(gradient_clip_val=...)."
            )


def warn_about_batch_norm(module: nn.Module, num_microbatches: int, warn: Callable[[str], None]) -> None:
    """Say once that batch statistics are those of micro-batches."""
    if num_microbatches == 1:
        return
    for name, inner in module.named_modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.training and inner.track_running_stats:
            warn(
                f"{name!r} is a {type(inner).__name__}: in a pipeline it normalises each micro-batch by its own"
                " statistics, so results depend on `microbatches`. Use GroupNorm or LayerNorm, or microbatches=1, where"
                " that matters."
            )
            return
