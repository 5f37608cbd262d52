"""Lightning's callbacks and plugins for checkpoints, and everything that follows a fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_pp import PipelineStrategy
from tests.checkpoints import Scheduled, assert_alike, load
from tests.launch import run_ranks
from tests.training import QUIET


class WithTest(Scheduled):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class Keeps(Callback):
    """A large state, of which each rank has one."""

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": torch.arange(5)}


def chain(folder: str, kind: str) -> dict[str, Any]:
    """Fit, test the best, save, validate the last, go on from the last; what was seen on the way."""
    torch.manual_seed(5)
    options: dict[str, Any] = {"devices": 1}
    if kind != "plain":
        strategy = PipelineStrategy(stages=2, microbatches=3, save_distributed_checkpoint=kind == "folder")
        options = {"devices": 2, "strategy": strategy}
    if kind == "async":
        options["plugins"] = [AsyncCheckpointIO()]
    best = ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss", mode="max", save_last=True)
    often = ModelCheckpoint(
        folder, "often-{step}", every_n_train_steps=2, save_top_k=-1, save_weights_only=True, monitor=None
    )
    trainer = Trainer(
        accelerator="cpu", precision="64-true", max_epochs=3, callbacks=[best, often, Keeps()], num_sanity_val_steps=0,
        **options, **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    module, train, test = WithTest(), Scheduled.batches(10), Scheduled.batches(7)
    trainer.fit(module, train, test)
    seen: dict[str, Any] = {"best": best.best_model_path, "score": float(best.best_model_score or 0)}
    seen["test"] = trainer.test(module, test, ckpt_path="best", verbose=False)
    trainer.save_checkpoint(f"{folder}/after_test.ckpt", weights_only=True)
    seen["last"] = trainer.validate(module, test, ckpt_path="last", verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, train, test, ckpt_path="last")
    seen["steps"] = trainer.global_step
    seen["end"] = trainer.validate(module, test, verbose=False)
    seen["weights"] = trainer.test(module, test, ckpt_path=f"{folder}/often-step=4.ckpt", verbose=False)
    return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_ranks(chain, 1, str(folder), "plain")[0]


#: older versions of the plugin end with the first run
ENDS = pytest.mark.skipif(not hasattr(AsyncCheckpointIO, "_ensure_setup"), reason="cannot save after its first run")


@pytest.mark.parametrize("kind", ["folder", pytest.param("async", marks=ENDS)])
def test_everything_that_follows_a_fit(tmp_path: Path, plain: tuple[Path, dict[str, Any]], kind: str) -> None:
    """On all ranks the same numbers and files as without the strategy."""
    theirs, expected = plain
    assert expected["test"] != expected["end"], "the best is not the last"
    for seen in run_ranks(chain, 2, str(tmp_path), kind):
        assert_alike({**seen, "best": Path(seen["best"]).name}, {**expected, "best": Path(expected["best"]).name})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in theirs.iterdir())
    assert all(path.is_dir() == (kind == "folder") for path in tmp_path.iterdir())
    if kind == "async":
        for name in ("last.ckpt", "often-step=4.ckpt", "after_test.ckpt"):
            ours, reference = load(tmp_path / name), load(theirs / name)
            for file in (ours, reference):
                file.pop("callbacks", None)  # paths
                file["state_dict"] = dict(file["state_dict"])  # the plugin for threads has copied it
            assert_alike(ours, reference)
