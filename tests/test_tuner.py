"""The Tuner: learning rates are found as in the plain run, batch sizes are refused."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import MLP, regression_data
from tests.test_callbacks import close
from tests.training import QUIET


class Tuned(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.5
        self.batch_size = 4

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(regression_data(), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(stages: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(4)
    module = Tuned()
    strategy: Any = {"strategy": PipelineStrategy(stages=stages, microbatches=3)} if stages else {}
    options: dict[str, Any] = {"precision": "64-true", "default_root_dir": folder, **QUIET, **strategy}
    trainer = Trainer(accelerator="cpu", devices=max(stages, 1), max_epochs=6, **options)
    finder = Tuner(trainer).lr_find(module, num_training=30, early_stop_threshold=None)
    assert finder is not None
    trainer.fit(module)
    found = {"results": finder.results, "suggestion": finder.suggestion(), "lr": module.lr}
    found["final"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["left"] = [path.name for path in folder.iterdir()]
    return found


def test_learning_rate(tmp_path: Path) -> None:
    """The curve, the suggestion, and the training that follows with it; no file is left behind."""
    for name in ("plain", "piped"):
        (tmp_path / name).mkdir()
    (expected,) = run_ranks(tuned, 1, 0, tmp_path / "plain")
    assert expected["lr"] == expected["suggestion"] != 0.5
    for found in run_ranks(tuned, 2, 2, tmp_path / "piped"):
        close(found, expected)


def scaled(folder: Path) -> str:
    strategy = PipelineStrategy(stages=2, microbatches=2)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=folder, **QUIET)
    try:
        Tuner(trainer).scale_batch_size(Tuned())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def test_batch_sizes_are_not_scaled(tmp_path: Path) -> None:
    for text in run_ranks(scaled, 2, tmp_path):
        assert text.startswith("MisconfigurationException: PipelineStrategy does not support the callback BatchSizeF")
