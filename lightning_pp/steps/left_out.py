"""Training steps that return None: Lightning leaves such a batch out, and all stages must know it beforehand.

They do where shapes and plain values of the batch say so, as plans are made by these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pp.partition.calls import LEFT_OUT
from lightning_pp.runtime.planner import StepPlan

__all__: list[str] = []


def is_left_out(name: str, plans: Sequence[StepPlan], whole: Callable[[], StepPlan], num_replicas: int) -> bool:
    """Whether a training step leaves its batch out; the forward runs all the same, as without the strategy.

    Args:
        name: Of the module's class.
        plans: Of the micro-batches.
        whole: Plans the step for the whole batch, which may be too small in parts only.
        num_replicas: Number of pipelines.

    Raises:
        MisconfigurationException: Micro-batches differ in it, or the other pipelines would train.
    """
    number = sum(plan.trace.returns_none for plan in plans)
    if not number:
        return False
    if number < len(plans) or (len(plans) > 1 and not whole().trace.returns_none):
        others = "a loss for others" if number < len(plans) else "a loss for the whole batch"
        raise MisconfigurationException(
            f"{name}.training_step must return the loss, or None for a batch and each of its micro-batches; it returns"
            f" None for {number} of {len(plans)} micro-batches, and {others}. {LEFT_OUT}"
        )
    if num_replicas > 1:
        raise MisconfigurationException(
            f"{name}.training_step returns None, and {num_replicas} pipelines sum their gradients: as in any"
            " distributed training, none of them can leave out a batch. Leave it out in the dataset or its sampler."
        )
    return True


def check_results(name: str, results: Sequence[Any]) -> None:
    """Check that a step did return None.

    Raises:
        MisconfigurationException: It did not.
    """
    if any(result is not None for result in results):
        raise MisconfigurationException(
            f"{name}.training_step returned None for this batch when it was planned, and now it returns a"
            f" {next(type(result) for result in results if result is not None).__name__}. {LEFT_OUT}"
        )
