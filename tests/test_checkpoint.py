"""One ordinary Lightning file from all stages, that any number of stages resumes from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import GPT, MODELS
from tests.training import QUIET, Outcome, Watcher


def fit_and_save(
    folder: str, stages: int, epochs: int, resume: str | None = None, model: str = "GPT", microbatches: int = 3
) -> str:
    """Train until ``epochs``; returns the file that the checkpoint callback wrote."""
    torch.manual_seed(5)
    strategy: dict[str, Any] = (
        {} if not stages else {"strategy": PipelineStrategy(stages=stages, microbatches=microbatches)}
    )
    keeper = ModelCheckpoint(dirpath=folder, filename="model", save_last=False)
    options = {**QUIET, "enable_checkpointing": True}
    trainer = Trainer(
        accelerator="cpu", devices=max(stages, 1), precision="64-true", max_epochs=epochs, callbacks=[keeper],
        **strategy, **options,
    )  # fmt: skip
    module = MODELS[model]().double()  # Lightning loads a checkpoint before the precision plugin converts the module
    trainer.fit(module, MODELS[model].loader(), ckpt_path=resume)
    return keeper.best_model_path


def load(path: str) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def test_the_file_is_that_of_the_plain_run(tmp_path: Path) -> None:
    (plain,) = run_ranks(fit_and_save, 1, str(tmp_path / "plain"), 0, 2)
    for stages in (2, 4):
        paths = run_ranks(fit_and_save, stages, str(tmp_path / str(stages)), stages, 2)
        assert len(set(paths)) == 1
        ours, theirs = load(paths[0]), load(plain)
        assert list(ours) == list(theirs)
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        assert not any(value.is_meta for value in ours["state_dict"].values())
        for name, value in theirs["state_dict"].items():
            torch.testing.assert_close(ours["state_dict"][name], value, atol=1e-9, rtol=0)
        ours_state, theirs_state = ours["optimizer_states"][0], theirs["optimizer_states"][0]
        assert ours_state["param_groups"] == theirs_state["param_groups"]
        assert list(ours_state["state"]) == list(theirs_state["state"])
        for index, state in theirs_state["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(ours_state["state"][index][key], value, atol=1e-9, rtol=0)


def test_buffers_come_from_where_they_are_right(tmp_path: Path) -> None:
    """One that the end of the step updates is right on the last stage alone; BatchNorm's are on its layer's stage."""
    (plain,) = run_ranks(fit_and_save, 1, str(tmp_path / "plain"), 0, 2, None, "GlueBuffers", 1)
    paths = run_ranks(fit_and_save, 3, str(tmp_path / "piped"), 3, 2, None, "GlueBuffers", 1)
    ours, theirs = load(paths[0])["state_dict"], load(plain)["state_dict"]
    assert list(ours) == list(theirs)
    assert theirs["center"].abs().max() > 0.01
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-9, rtol=0)


def test_the_file_loads_without_the_strategy(tmp_path: Path) -> None:
    path = run_ranks(fit_and_save, 2, str(tmp_path), 2, 1)[0]
    module = GPT.load_from_checkpoint(path)
    assert module(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


class Resumable:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        while self.position < 6:
            self.position += 1
            yield [torch.full((4, 8), self.position / 7.0).double(), torch.ones(4, 3).double()]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class SaveInTheMiddle(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def stop_and_resume(path: str, stages: int) -> list[Any]:
    """What a run sees that is resumed in the middle of an epoch."""
    seen = []
    for resume in (None, path):
        outcome = Outcome()
        strategy: Any = {"strategy": PipelineStrategy(stages=stages, microbatches=2)} if stages else {}
        trainer = Trainer(
            accelerator="cpu", devices=max(stages, 1), precision="64-true", max_epochs=1,
            callbacks=[Watcher(outcome), SaveInTheMiddle(path)], **strategy, **QUIET,
        )  # fmt: skip
        trainer.fit(MODELS["MLP"]().double(), Resumable(), ckpt_path=resume)
        seen.append(outcome.batches)
    assert len(seen[0]) == 6
    return seen[1]


def test_a_loader_that_knows_where_it_is(tmp_path: Path) -> None:
    """Loaders are set up before Lightning has read their states out of the checkpoint."""
    (expected,) = run_ranks(stop_and_resume, 1, str(tmp_path / "plain.ckpt"), 0)
    assert len(expected) == 4
    for batches in run_ranks(stop_and_resume, 2, str(tmp_path / "piped.ckpt"), 2):
        assert batches == expected


@pytest.mark.parametrize("path", [(2, 4, 0), (0, 3, 2), (4, 1, 2)])
def test_any_number_of_stages_resumes(tmp_path: Path, path: tuple[int, ...]) -> None:
    """0 stands for the plain Trainer."""
    (straight,) = run_ranks(fit_and_save, 1, str(tmp_path / "straight"), 0, len(path))
    resume = None
    for epochs, stages in enumerate(path, start=1):
        folder = str(tmp_path / f"{epochs}")
        resume = run_ranks(fit_and_save, max(stages, 1), folder, stages, epochs, resume)[0]
    assert resume is not None
    ours, theirs = load(resume), load(straight)
    assert ours["global_step"] == theirs["global_step"]
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, atol=1e-9, rtol=0)
