"""Lightning's callbacks do in a pipeline what they do without: the same numbers on all ranks, the same checkpoints."""

import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import GPT, MLP
from tests.training import QUIET

IS_NEW = hasattr(pl_callbacks, "WeightAveraging")
"""Lightning 2.6 or newer."""


class Scheduled(MLP):
    """Two groups and a scheduler."""

    lr = 0.05

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[:3].parameters()}, {"params": self.net[3:].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Backbone(MLP):
    """A backbone that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[:5]
        self.head = self.net[5:]
        del self.net

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])


class UnfreezesTail(BaseFinetuning):
    """Freezes all but the head, and unfreezes the end of the backbone in the second epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[4:], optimizer, lr=0.02)  # type: ignore[index]


class Normed(MLP):
    """With BatchNorm, whose statistics averaging has to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


class Observed(Callback):
    """Losses, learning rates and validation losses as they come."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.seen.append([float(outputs["loss"]), trainer.accumulate_grad_batches, trainer.global_step, *rates])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append([float(value) for value in trainer.callback_metrics.values()])


@dataclass(frozen=True)
class Row:
    """One combination of callbacks, and what of them has to be equal besides losses, weights and checkpoints."""

    cls: type[MLP]
    callbacks: Callable[[], list[Callback]]
    state: Callable[[list[Callback]], Any] = lambda callbacks: None
    options: Any = None
    microbatches: int = 3
    resumes: bool = False
    stages: int = 2


def _monitors() -> list[Callback]:
    more: list[Callback] = [DeviceStatsMonitor(cpu_stats=True)] if find_spec("psutil") is not None else []
    if IS_NEW:  # older ones fail without the strategy, too, where validation sees smaller batches
        more.append(ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])))
    return [
        EarlyStopping("val_loss", patience=2, min_delta=0.02),
        LearningRateMonitor(log_momentum=True),
        GradientAccumulationScheduler({1: 2, 3: 1}),
        Timer({"hours": 1}),
        *more,
        TQDMProgressBar(),
        LambdaCallback(on_train_epoch_end=lambda trainer, module: module.log("epoch_was", trainer.current_epoch * 1.0)),
    ]


def _monitored(found: list[Callback]) -> Any:
    stopping, rates = found[0], found[1]
    assert isinstance(stopping, EarlyStopping)
    assert isinstance(rates, LearningRateMonitor)
    return [stopping.stopped_epoch, float(stopping.best_score), rates.lrs, rates.last_momentum_values]


def _found_rates(found: list[Callback]) -> Any:
    finder = found[0]
    assert isinstance(finder, LearningRateFinder)
    assert finder.optimal_lr is not None
    return [finder.optimal_lr.results, finder.optimal_lr.suggestion(2)]


ROWS: dict[str, Row] = {
    "monitors": Row(
        Scheduled, _monitors, _monitored, {"max_epochs": 6, "enable_progress_bar": True, "log_every_n_steps": 1}
    ),
    "backbone": Row(Backbone, lambda: [BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False)], stages=4),
    "part of a backbone": Row(Backbone, lambda: [UnfreezesTail()], resumes=True),
    "stochastic average": Row(
        MLP, lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2)], resumes=True
    ),
    "with batch norm": Row(Normed, lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=2)], microbatches=1),
    "learning rate": Row(Scheduled, lambda: [LearningRateFinder(num_training_steps=12)], _found_rates),
}
if IS_NEW:
    ROWS["average"] = Row(MLP, lambda: [pl_callbacks.WeightAveraging()], resumes=True, stages=4)
    ROWS["moving average"] = Row(Normed, lambda: [pl_callbacks.EMAWeightAveraging(decay=0.7)], microbatches=1)


def train(name: str, stages: int, folder: Path) -> dict[str, Any]:
    """Train, and go on from the last checkpoint with new objects where the row says so."""
    row = ROWS[name]
    saved = ModelCheckpoint(folder / "saved", "{epoch}", "val_loss", save_top_k=2, save_last=True)
    found = run(row, stages, folder, {}, [saved])
    found["best"] = [Path(saved.best_model_path).name, float(saved.best_model_score)]
    found["top"] = {Path(path).name: float(score) for path, score in saved.best_k_models.items()}
    if row.resumes:
        found["resumed"] = run(row, stages, folder, {"max_epochs": 6}, [], folder / "saved/last.ckpt")
        found["parameters"] = {
            f"{when}/{key}": value
            for when, part in (("first", found), ("resumed", found["resumed"]))
            for key, value in part.pop("parameters").items()
        }
    return found


def run(
    row: Row, stages: int, folder: Path, options: dict[str, Any], more: list[Callback], ckpt_path: Any = None
) -> dict[str, Any]:
    torch.manual_seed(4)
    module = row.cls()
    observed, used = Observed(), row.callbacks()
    options = {**QUIET, "max_epochs": 4, **(row.options or {}), **options}
    options |= {"callbacks": [observed, *used, *more], "enable_checkpointing": True, "logger": CSVLogger(folder)}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=row.microbatches)
    trainer = Trainer(
        accelerator="cpu", devices=max(stages, 1), precision="64-true", default_root_dir=folder, **options
    )
    trainer.fit(module, module.loader(), module.loader(), ckpt_path=ckpt_path)
    return {
        "seen": observed.seen,
        "state": row.state(used),
        "epoch": [trainer.current_epoch, trainer.global_step],
        "parameters": {n: p.tolist() for n, p in module.named_parameters() if not p.is_meta},
    }


def close(found: Any, expected: Any, path: str = "") -> None:
    """Compare nested values, tensors and arrays included."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            close(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"{path}/{number}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-9), path
    else:
        assert found == expected, path


@pytest.mark.parametrize("name", ROWS)
def test_callbacks(name: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(train, 1, name, 0, tmp_path / "plain")
    stages = ROWS[name].stages
    found = run_ranks(train, stages, name, stages, tmp_path / "piped")
    parameters: dict[str, Any] = {}
    for one in found:
        parameters |= one.pop("parameters")
        close(one, {key: value for key, value in expected.items() if key != "parameters"})
    close(parameters, expected["parameters"])
    files = sorted(path.name for path in (tmp_path / "plain/saved").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "piped/saved").iterdir())
    for file in files:
        ours, theirs = (torch.load(tmp_path / k / "saved" / file, weights_only=False) for k in ("piped", "plain"))
        for saved in (ours, theirs):
            saved["callbacks"] = {k: v for k, v in saved["callbacks"].items() if k.startswith("Stochastic")}
        assert list(ours) == list(theirs)
        close(ours, theirs, file)


class Writes(BasePredictionWriter):
    """Writes into files that do not bear the rank's number."""

    folder: Path

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
        batch, number, loader = rest
        with (self.folder / f"{loader}_{number}.pt").open("xb") as file:  # fails where another process has written
            torch.save([prediction, indices, len(batch[0])], file)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        with (self.folder / "all.pt").open("xb") as file:
            torch.save([predictions, indices], file)


class Predicts(GPT):
    """Predicts a nested structure, and can be summed up with sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 7, dtype=torch.long)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        return {"best": logits.argmax(-1), "pair": (logits.mean(), [batch_idx, dataloader_idx])}


def show_and_predict(stages: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(4)
    folder.mkdir(exist_ok=True)
    text = io.StringIO()
    logging.getLogger("lightning.pytorch").addHandler(logging.StreamHandler(text))
    writer = Writes("batch_and_epoch")
    writer.folder = folder
    options: dict[str, Any] = {**QUIET, "enable_model_summary": True, "callbacks": [writer, ModelSummary(2)]}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=3, split=["blocks.2"])
    trainer = Trainer(accelerator="cpu", devices=max(stages, 1), precision="64-true", max_epochs=1, **options)
    module = Predicts()
    trainer.fit(module, module.loader())
    predictions = trainer.predict(module, [module.loader(), module.loader()])
    module.example_input_array = None
    found = summarize(module, max_depth=-1)
    counts = [found.total_parameters, found.trainable_parameters, found.model_size, *found.param_nums]
    return {"predictions": predictions, "counts": counts, "summary": text.getvalue()}


def test_summary_and_predictions(tmp_path: Path) -> None:
    """The whole model's numbers on every rank, with stages; predictions on all ranks, written once."""
    (expected,) = run_ranks(show_and_predict, 1, 0, tmp_path / "plain")
    first, last = run_ranks(show_and_predict, 2, 2, tmp_path / "piped")
    for found in (first, last):
        close(found["predictions"], expected["predictions"])
        close(found["counts"], expected["counts"])
    rows = {}
    for name, outcome in {"plain": expected, "piped": first}.items():
        lines = [line.split("|") for line in outcome["summary"].splitlines() if " | " in line]
        rows[name] = [[cell.strip() for cell in line] for line in lines]
    assert [row.pop(4) for row in rows["piped"]] == ["Stage", "0-1", "0-1", "0", "0", "1", "1", "1", "0-1"]
    if "FLOPs" in rows["plain"][0]:
        flops = rows["plain"][0].index("FLOPs")
        rows["plain"][2][flops] = rows["piped"][2][flops]  # of a list of blocks: Lightning shows none, we those inside
    assert rows["piped"] == rows["plain"]
    assert "Total params" in first["summary"]
    assert "Total params" not in last["summary"]
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) == 2 * 3 + 1
    for file in files:
        close(*(torch.load(tmp_path / name / file, weights_only=False) for name in ("piped", "plain")), file)
