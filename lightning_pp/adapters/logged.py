"""The Trainer's side of metrics: those that callbacks hold, and those that Lightning computes when an epoch ends."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.metrics.links import metrics_in
from lightning_pp.metrics.shared import SharedMetrics

__all__: list[str] = []


def install(trainer: Trainer, metrics: SharedMetrics, current: Callable[[], SharedMetrics]) -> None:
    """Share the metrics of callbacks, and compute logged metrics before any callback asks for them.

    Args:
        trainer: Whose run begins.
        metrics: The module's.
        current: Gives those of the run under way, in later runs too.
    """
    callbacks = compat.callbacks(trainer)
    for callback in callbacks:
        metrics.share(metrics_in(type(callback).__name__, callback))
    if not any(isinstance(callback, EarlyValues) for callback in callbacks):
        callbacks.insert(0, EarlyValues(current))


class EarlyValues(Callback):
    """Computes what was logged as a metric object on all ranks, before any callback asks for its value.

    A progress bar asks on rank 0 alone, and the last stage, which has the value, would be somewhere else by then.
    """

    def __init__(self, current: Callable[[], SharedMetrics]) -> None:
        self._current = current

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._current().prefetch(compat.logged_metrics(trainer))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._current().prefetch(compat.logged_metrics(trainer))

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._current().prefetch(compat.logged_metrics(trainer))
