"""Everything that can be logged: the plain run's values on all ranks, at every batch and at the end."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import (
    CatMetric,
    MeanAbsoluteError,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MetricTracker,
    R2Score,
    SumMetric,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import MLP, generator
from tests.training import QUIET


def double(metric: Any) -> Any:
    return metric.set_dtype(torch.float64)


def coarse(values: Tensor) -> Tensor:
    """Values that torchmetrics' aggregators, which add up in float32 on the way, add without an error."""
    return (values.detach() * 64).round() / 64


class Labelled(MLP):
    """Three classes; 19 samples in batches of 8, 8 and 3, the last smaller than the number of micro-batches."""

    @staticmethod
    def loader(seed: int = 3, samples: int = 19) -> DataLoader[Any]:
        source = generator(seed)
        x = torch.randn(samples, 8, generator=source)
        return DataLoader(TensorDataset(x, torch.randint(0, 3, (samples,), generator=source)), batch_size=8)


class LogsMetrics(Labelled):
    """Metrics of many kinds, called and logged in the ways that torchmetrics documents."""

    def __init__(self) -> None:
        super().__init__()
        self.rmse = double(MeanSquaredError(squared=False))
        self.f1 = double(MulticlassF1Score(3))
        self.logged_f1 = double(MulticlassF1Score(3))
        self.updated_r2 = double(R2Score())
        self.so_far = double(MeanSquaredError(squared=False))
        self.weighted = double(MeanMetric())
        self.twice = double(MeanAbsoluteError())
        self.combined = double(SumMetric()) + double(SumMetric())
        self.grouped = MetricCollection(
            {"top1": MulticlassAccuracy(3), "top2": MulticlassAccuracy(3, top_k=2), "f1": MulticlassF1Score(3)},
            prefix="grouped_",
        )
        self.apart = MetricCollection(
            [MulticlassPrecision(3), MulticlassF1Score(3)], compute_groups=False, postfix="_a"
        )
        double(self.grouped)
        double(self.apart)
        self.classes = ClasswiseWrapper(double(MulticlassAccuracy(3, average=None)), prefix="class_")
        self.early = double(SumMetric())
        self.unregistered = [double(SumMetric())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.early(coarse(x[:, 0]))
        hidden = self.net[:2](x)
        out = self.net[2:](hidden)
        target = F.one_hot(y, 3).to(out)
        self.log("rmse", self.rmse(out, target), on_step=True, on_epoch=True, prog_bar=True)
        self.f1(out, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log_dict({"step_f1": self.logged_f1(out, y)})
        self.updated_r2.update(out[:, 0], target[:, 0])
        self.log("r2", self.updated_r2, on_step=False, on_epoch=True, prog_bar=True, logger=False)
        self.so_far.update(out[:, 1], target[:, 1])
        self.log("so_far", self.so_far.compute())
        self.weighted.update(coarse(hidden[:, 0]), weight=y)
        self.log("weighted", self.weighted, on_epoch=True)
        self.log("first_call", self.twice(out, target))
        self.log("second_call", self.twice(out, -target))
        self.log("twice", self.twice)
        self.combined.update(coarse(hidden).sum())
        self.grouped.update(out, y)
        self.log_dict(self.grouped, on_step=False, on_epoch=True)
        self.log_dict(self.apart(out, y), on_step=True, on_epoch=True)
        self.log_dict(self.classes(out, y))
        self.unregistered[0].update(coarse(out).sum())
        self.log("same", out.mean())
        self.log("same", out.mean() + 1)
        return F.cross_entropy(out, y)

    def on_train_epoch_end(self) -> None:
        self.log("combined", self.combined.compute())
        self.log("early", self.early)
        self.log("unregistered", self.unregistered[0].compute())
        self.log("at_the_end", self.so_far.compute())
        for metric in (self.rmse, self.logged_f1, self.combined, self.apart, self.classes, *self.unregistered):
            metric.reset()


class ValidatesMetrics(LogsMetrics):
    """Metrics in validation with two loaders, and some that training uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = torch.nn.ModuleList(double(MeanMetric()) for _ in range(2))
        self.auroc = double(BinaryAUROC())
        self.cat = double(CatMetric())
        self.best = MinMaxMetric(double(MeanSquaredError()))
        self.tracker = MetricTracker(double(MetricCollection([MeanAbsoluteError(), MeanSquaredError()])))

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        x, y = batch
        out = self.net(x)
        target = F.one_hot(y, 3).to(out)
        self.losses[dataloader_idx].update(coarse(F.cross_entropy(out, y, reduction="none")))
        self.log("loss", self.losses[dataloader_idx], prog_bar=True)
        self.log("val_rmse", self.rmse(out, target), add_dataloader_idx=True)
        if dataloader_idx == 1:
            self.auroc.update(out[:, 0], (y == 0).long())
            self.log("auroc", self.auroc, add_dataloader_idx=False)
        self.cat.update(coarse(out[:, 0]))
        self.best.update(out, target)
        self.tracker.update(out, target)

    def on_validation_epoch_end(self) -> None:
        self.log("median", self.cat.compute().median())
        self.cat.reset()
        self.log_dict(self.best.compute())
        self.best._base_metric.reset()
        self.log_dict({f"tracked_{name}": value.sum() for name, value in self.tracker.compute_all().items()})
        self.log("validated_rmse", self.rmse.compute())
        self.rmse.reset()


class CountsBatches(Callback):
    """Holds a metric of its own, and logs from a callback's hooks."""

    def __init__(self) -> None:
        self.seen = SumMetric().set_dtype(torch.float64)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.seen.update(coarse(outputs["loss"]))
        pl_module.log("seen", self.seen.compute())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("seen_at_validation", self.seen.compute())


class Snapshots(Callback):
    """Notes all three dictionaries after every batch and every validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Trainer) -> None:
        for found in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            self.seen.append({name: float(value) for name, value in found.items()})

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)


def log(cls: type[Labelled], stages: int, microbatches: int, loaders: int, **options: Any) -> Any:
    torch.manual_seed(5)
    module = cls()
    snapshots = Snapshots()
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=microbatches)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.pop("devices", max(stages, 1)),
        precision="64-true",
        max_epochs=2,
        callbacks=[CountsBatches(), snapshots],
        **{**QUIET, "enable_progress_bar": True, "log_every_n_steps": 1, **options},
    )
    validation = [cls.loader(seed, 11) for seed in range(loaders)]
    trainer.fit(module, cls.loader(), validation or None)
    if loaders:
        snapshots.seen += trainer.validate(module, validation, verbose=False)
    return snapshots.seen


def assert_same_values(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys(), f"snapshot {number}"
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, abs=1e-9, nan_ok=True), f"{name} in snapshot {number}"


def test_metrics_called_logged_and_computed_in_every_way() -> None:
    (expected,) = run_ranks(log, 1, ValidatesMetrics, 0, 1, 2)
    for found in run_ranks(log, 2, ValidatesMetrics, 2, 5, 2):
        assert_same_values(found, expected)
