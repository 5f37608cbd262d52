"""One ordinary Lightning file from all stages, that any number of stages resumes from."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader

from lightning_pp import PipelineStrategy
from lightning_pp.saving.folder_reader import Folder
from tests.checkpoints import Late, Resumable, SaveAt, Scheduled, assert_alike, by_number, load, train_all
from tests.launch import run_ranks
from tests.models import MODELS
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


def test_buffers_come_from_where_they_are_right(tmp_path: Path) -> None:
    """One that the end of the step updates is right on the last stage alone; BatchNorm's are on its layer's stage."""
    (plain,) = run_ranks(fit_and_save, 1, str(tmp_path / "plain"), 0, 2, None, "GlueBuffers", 1)
    paths = run_ranks(fit_and_save, 3, str(tmp_path / "piped"), 3, 2, None, "GlueBuffers", 1)
    ours, theirs = load(paths[0])["state_dict"], load(plain)["state_dict"]
    assert list(ours) == list(theirs)
    assert theirs["center"].abs().max() > 0.01
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-9, rtol=0)


def stop_and_resume(path: str, stages: int) -> list[Any]:
    """What a run sees that is resumed in the middle of an epoch."""
    seen = []
    for resume in (None, path):
        outcome = Outcome()
        strategy: Any = {"strategy": PipelineStrategy(stages=stages, microbatches=2)} if stages else {}
        trainer = Trainer(
            accelerator="cpu", devices=max(stages, 1), precision="64-true", max_epochs=1,
            callbacks=[Watcher(outcome), SaveAt(2, path)], **strategy, **QUIET,
        )  # fmt: skip
        batches = [[torch.full((4, 8), n / 7.0).double(), torch.ones(4, 3).double()] for n in range(1, 7)]
        trainer.fit(MODELS["MLP"]().double(), Resumable(batches), ckpt_path=resume)
        seen.append(outcome.batches)
    assert len(seen[0]) == 6
    return seen[1]


def test_a_loader_that_knows_where_it_is(tmp_path: Path) -> None:
    """Loaders are set up before Lightning has read their states out of the checkpoint."""
    (expected,) = run_ranks(stop_and_resume, 1, str(tmp_path / "plain.ckpt"), 0)
    assert len(expected) == 4
    for batches in run_ranks(stop_and_resume, 2, str(tmp_path / "piped.ckpt"), 2):
        assert batches == expected


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs, each with what was saved after step 4, in the middle of an epoch, and at the end."""
    root = tmp_path_factory.mktemp("runs")

    def job(kind: str, name: str, resume: str | None = None, **options: Any) -> tuple[str, str, dict[str, Any]]:
        return kind, str(root / name), {"resume": resume and str(root / resume), **options}

    def consolidate(folder: str) -> str:
        command = ["consolidate", str(root / folder), "--output_file", str(root / f"{folder}.file")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", command)
            runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
        return f"{folder}.file"

    folders = {"save_distributed_checkpoint": True}
    whole = {"model": "Late", "microbatches": 1}
    one = [job("plain", "plain"), job("plain", "resumed", "plain/mid.ckpt"), job("plain", "late", model="Late")]
    run_ranks(train_all, 1, one)
    two = [
        job("2", "two"),
        job("2", "folders", **folders),
        job("2", "dropping", model="Dropping"),
        job("2", "two from plain", "plain/mid.ckpt", **folders),
        job("2", "late two", **whole),
        job("2", "late folders", **whole, **folders),
        job("2", "late two from folder", "late folders/mid.ckpt", **whole),
    ]
    run_ranks(train_all, 2, two)
    run_ranks(train_all, 2, [job("ddp", "ddp"), job("ddp", "ddp from two", "two/mid.ckpt")])
    four = [
        job("4", "four from two", "two/mid.ckpt", schedule="gpipe"),
        job("4", "four from folder", "folders/mid.ckpt"),
        job("4", "four dropping", "dropping/mid.ckpt", model="Dropping"),
    ]
    run_ranks(train_all, 4, four)
    pairs = [
        job("2", "pairs", replicas=2),
        job("2", "pairs from two", "two/mid.ckpt", replicas=2),
        job("2", "pairs in folders from folder", "folders/mid.ckpt", replicas=2, **folders),
    ]
    run_ranks(train_all, 4, pairs)
    back = [job("2", "two from ddp", "ddp/mid.ckpt"), job("2", "two from pairs", "pairs/mid.ckpt")]
    run_ranks(train_all, 2, back)
    plain = [
        job("plain", "plain from two", "two/mid.ckpt"),
        job("plain", "plain from pairs", "pairs/mid.ckpt"),
        job("plain", "plain from folder", consolidate("folders/mid.ckpt")),
    ]
    run_ranks(train_all, 1, plain)
    for folder in ("folders", "two from plain", "pairs in folders from folder"):
        (root / folder / "end.ckpt").rename(root / folder / "end.folder")
        (root / consolidate(f"{folder}/end.folder")).rename(root / folder / "end.ckpt")
    return root


@pytest.mark.parametrize("name", ["two", "ddp", "pairs"])
@pytest.mark.parametrize("file", ["mid.ckpt", "end.ckpt"])
def test_the_file_is_that_of_the_plain_run(runs: Path, name: str, file: str) -> None:
    """DDP's for comparison: what it has in common with the plain run's, ours has."""
    ours, theirs = load(runs / name / file), load(runs / "plain" / file)
    assert_alike(ours, theirs)
    assert type(ours["state_dict"]) is type(theirs["state_dict"])
    assert ours["state_dict"]._metadata == theirs["state_dict"]._metadata
    tied = [ours["state_dict"][key].untyped_storage().data_ptr() for key in ("tok.weight", "head.weight")]
    assert tied[0] == tied[1], "a tied weight lies in the file once"


RESUMED = [
    "plain from two", "plain from pairs", "plain from folder", "ddp from two", "four from two", "four from folder",
    "pairs from two", "pairs in folders from folder", "two from plain", "two from ddp", "two from pairs",
]  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_any_run_resumes_from_any_other(runs: Path, name: str) -> None:
    """Weights, optimizer, schedule, loops, callbacks: from the middle of an epoch, as Lightning does it."""
    ours, theirs = load(runs / name / "end.ckpt"), load(runs / "resumed" / "end.ckpt")
    assert ours.keys() == theirs.keys()
    for file in (ours, theirs):
        file["state_dict"] = dict(file["state_dict"])
        file["optimizer_states"] = [by_number(state) for state in file["optimizer_states"]]
    assert_alike({key: ours[key] for key in theirs}, theirs)
    assert ours["callbacks"]["Counter"]["seen"] == 6


def test_dropout_goes_on_as_without_the_break(runs: Path) -> None:
    """Random numbers follow from the seed and the step, not from how often training was interrupted."""
    ours, theirs = load(runs / "four dropping" / "end.ckpt"), load(runs / "dropping" / "end.ckpt")
    assert_alike(ours["state_dict"], theirs["state_dict"])


def test_extra_state_and_models_that_are_built_late(runs: Path) -> None:
    """A layer's extra state comes from its stage, the module's own from the last stage, which runs all of its code."""
    theirs = dict(load(runs / "late" / "end.ckpt")["state_dict"])
    assert theirs["layers.2._extra_state"] == {"calls": 6}
    assert theirs["_extra_state"] == {"losses": 6}
    for name in ("late two", "late two from folder"):
        assert_alike(dict(load(runs / name / "end.ckpt")["state_dict"]), theirs)
        loaded = Late.load_from_checkpoint(runs / name / "end.ckpt")
        assert loaded.losses == 6
        torch.testing.assert_close(loaded.head.weight, theirs["head.weight"].float())
    folder = Folder(runs / "late folders" / "end.ckpt", weights_only=True).checkpoint()
    assert_alike(dict(folder["state_dict"]), theirs)
    assert folder["optimizer_states"][0].for_optimizer(loaded.configure_optimizers())["state"] == {}


def test_the_file_loads_without_the_strategy(runs: Path) -> None:
    module = Scheduled.load_from_checkpoint(runs / "two" / "end.ckpt")
    assert module.hparams["rate"] == 0.01
    assert module.head.weight is module.tok.weight
    assert_alike(dict(module.state_dict()), dict(load(runs / "plain" / "end.ckpt")["state_dict"]))


def test_a_folder_holds_everything_once(runs: Path) -> None:
    """Two ranks wrote a file each, a tied weight is in one of them, and further pipelines wrote nothing."""
    for name in ("folders", "pairs in folders from folder"):
        folder = runs / name / "end.folder"
        assert sorted(path.name for path in folder.iterdir()) == [
            ".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt",
        ]  # fmt: skip
        places = FileSystemReader(folder).read_metadata().storage_data
        where = {index.fqn: (info.relative_path, info.offset) for index, info in places.items()}
        assert where["model.tok.weight"] == where["model.head.weight"]
        assert len(set(where.values())) == len(where) - 1
        assert {path for path, _ in where.values()} == {"__0_0.distcp", "__1_0.distcp"}
        assert "optimizer_0.state.blocks.0.qkv.weight.exp_avg" in where
