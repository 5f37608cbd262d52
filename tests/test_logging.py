"""Everything that can be logged: the plain run's values on all ranks, at every batch and at the end."""

import contextlib
import csv
import io
import os
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
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


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "step": {"on_step": True, "on_epoch": False},
    "epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True, "prog_bar": True},
    "hidden": {"logger": False, "on_epoch": True},
    "synced": {"sync_dist": True, "on_step": True, "on_epoch": True},
    "sum": {"reduce_fx": "SUM", "on_step": True, "on_epoch": True},
    "max": {"reduce_fx": "max", "on_step": True, "on_epoch": True},
    "min": {"reduce_fx": torch.min, "on_step": True, "on_epoch": True},
    "sum_too": {"reduce_fx": sum, "on_epoch": True},
    "average": {"reduce_fx": "avg", "on_epoch": True},
    "one_name": {"add_dataloader_idx": True, "on_epoch": True},
    "first_rank": {"rank_zero_only": True, "on_epoch": True},
    "graph": {"enable_graph": True, "on_epoch": True},
}
HOOKS = ["on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"]
HOOKS += ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"]
HOOKS += ["on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"]
HOOKS += ["on_validation_epoch_end"]


class LogsValues(Labelled):
    """Numbers and tensors, with every option of ``self.log``, in every hook that may log."""

    num_calls = 0

    def log_all(self, prefix: str, values: Tensor) -> None:
        merged = {"sum": values.sum(), "max": values.max(), "min": values.min(), "sum_too": values.abs().sum()}
        for name, options in FORMS.items():
            self.log(f"{prefix}{name}", merged.get(name, values.mean()), **options)
        self.log(f"{prefix}sized", values.mean(), batch_size=2 * len(values), on_epoch=True)
        self.log(f"{prefix}int", 3, True, True, on_epoch=True)
        self.log(f"{prefix}flag", True)
        self.log(f"{prefix}numpy", np.float32(0.5), on_epoch=True)
        self.log(f"{prefix}integers", (values > 0).sum(), reduce_fx="sum", on_epoch=True)
        self.log_dict({f"{prefix}a": values.square().mean(), f"{prefix}b": values.mean() ** 1}, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.log_all("", out.mean(1))
        if batch_idx == 1:
            self.log("sometimes", out.mean(), on_epoch=True)
        return F.cross_entropy(out, batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        out = self.net(batch[0]).mean(1)
        self.log_all("val_", out)
        self.log(f"only_{dataloader_idx}", out.mean(), add_dataloader_idx=False)


def _logging(hook: str) -> Any:
    def log_here(self: LogsValues, *args: Any) -> None:
        self.num_calls += 1
        self.log(f"in_{hook}", float(self.num_calls), prog_bar=True)

    return log_here


for _hook in HOOKS:
    setattr(LogsValues, _hook, _logging(_hook))


class TellsLoggers(Labelled):
    """Talks to the logger itself, and prints, with values of the first and the last stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[:2](batch[0])
        out = self.net[2:](hidden)
        assert isinstance(self.logger, CSVLogger)
        self.logger.log_metrics({"hidden": hidden.mean(), "out": out.mean()}, step=100 + batch_idx)
        self.logger.experiment.log_metrics({"experiment": out.mean()}, step=200 + batch_idx)
        self.print(f"batch {batch_idx} of version {self.logger.version}")
        return F.cross_entropy(out, batch[1])


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


def _share(loader: DataLoader[Any], replicas: int) -> DataLoader[Any]:
    """Every so manieth sample of each batch."""
    first = int(os.environ["LOCAL_RANK"]) % replicas
    batches = [[tensor[first::replicas] for tensor in batch] for batch in loader]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def log(
    cls: type[Labelled], stages: int, microbatches: int, loaders: int, replicas: int = 1, **options: Any
) -> list[dict[str, float]]:
    torch.manual_seed(5)
    module = cls()
    snapshots = Snapshots()
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=microbatches)
    trainer = Trainer(
        accelerator="cpu",
        devices=max(stages, 1) * replicas,
        precision="64-true",
        max_epochs=2,
        callbacks=[CountsBatches(), snapshots],
        use_distributed_sampler=False,
        **{**QUIET, "enable_progress_bar": True, "log_every_n_steps": 2, **options},
    )
    validation = [_share(cls.loader(seed, 11), replicas) for seed in range(loaders)]
    trainer.fit(module, _share(cls.loader(), replicas), validation or None)
    if loaders:
        snapshots.seen += trainer.validate(module, validation, verbose=False)
    return snapshots.seen


def rows_written(folder: Path) -> list[dict[str, float | None]]:
    """What the CSV logger wrote, by the one rank that did."""
    (path,) = folder.glob("lightning_logs/*/metrics.csv")
    with path.open() as file:
        return [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]


def assert_same_values(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys(), f"snapshot {number}"
        for name, value in theirs.items():
            wanted = value if value is None else pytest.approx(value, abs=1e-9, nan_ok=True)
            assert ours[name] == wanted, f"{name} in snapshot {number}"


def loggers(folder: Path) -> list[Any]:
    has_tensorboard = find_spec("tensorboard") is not None
    return [CSVLogger(folder), *([TensorBoardLogger(folder, "events")] if has_tensorboard else [])]


def events_written(folder: Path) -> list[Any]:
    """What TensorBoard would show: tags, steps and values, file by file."""
    found = []
    for path in sorted(folder.glob("events/*/events*"), key=lambda path: path.stat().st_mtime_ns):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(path))
        events.Reload()
        found += [{f"{tag}/{e.step}": e.value for e in events.Scalars(tag)} for tag in sorted(events.Tags()["scalars"])]
    return found


@cache
def plainly(cls: type[Labelled]) -> tuple[Any, Any, Any]:
    """What the run without the strategy shows and writes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (seen,) = run_ranks(log, 1, cls, 0, 1, 2, logger=loggers(folder))
        return seen, rows_written(folder), events_written(folder)


@pytest.mark.parametrize(("cls", "stages"), [(ValidatesMetrics, 2), (LogsValues, 4)])
def test_everything_that_can_be_logged(cls: type[Labelled], stages: int, tmp_path: Path) -> None:
    """Metrics called, logged and computed in every way; values logged with every option in every hook."""
    expected, rows, events = plainly(cls)
    for found in run_ranks(log, stages, cls, stages, 5, 2, logger=loggers(tmp_path)):
        assert_same_values(found, expected)
    assert_same_values(rows_written(tmp_path), rows)
    assert_same_values(events_written(tmp_path), events)


@pytest.mark.parametrize("cls", [ValidatesMetrics, LogsValues])
def test_side_by_side(cls: type[Labelled]) -> None:
    """Two pipelines of two stages: values of both batches, but for what steps compute so far and what hooks log."""
    own = {"so_far", "seen", "seen_at_validation"}
    expected, _, _ = plainly(cls)
    for found in run_ranks(log, 4, cls, 2, 3, 2, replicas=2):
        ours, theirs = (
            [{k: v for k, v in one.items() if k not in own and not k.startswith("in_")} for one in each]
            for each in (found, expected)
        )
        assert_same_values(ours, theirs)


def tell(stages: int, microbatches: int, folder: Path) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        log(TellsLoggers, stages, microbatches, 0, logger=CSVLogger(folder), enable_progress_bar=False)
    return [line for line in printed.getvalue().splitlines() if line.startswith("batch")]


def test_what_steps_tell_loggers(tmp_path: Path) -> None:
    """Once for every micro-batch, from the last stage, on rank 0; nothing of what planning makes up."""
    (lines,) = run_ranks(tell, 1, 0, 1, tmp_path / "plain")
    assert len(lines) == 6
    assert run_ranks(tell, 2, 2, 1, tmp_path / "piped") == [lines, []]
    rows = rows_written(tmp_path / "plain")
    assert sum(row["experiment"] is not None for row in rows) == 6
    assert_same_values(rows_written(tmp_path / "piped"), rows)
    assert [len(lines) for lines in run_ranks(tell, 2, 2, 2, tmp_path / "more")] == [12, 0]
