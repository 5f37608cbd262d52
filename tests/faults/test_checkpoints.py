"""Checkpoints that cannot be used: the file is named, on every rank, and nobody waits for another."""

import json
import os
import pickle
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import MLP
from tests.training import QUIET

UNREADABLE = r"RuntimeError: .*%s.ckpt \([\d,]+ bytes\) cannot be read as a checkpoint"
CASES = {
    "cut short": UNREADABLE % "broken",
    "empty": UNREADABLE % "empty",
    "text": UNREADABLE % "text",
    "of another model": r"Missing key\(s\) in state_dict",
    "no checkpoint at all": r"foreign.ckpt is no checkpoint of a Trainer: it has \['weights'\], but not",
    "not there": r"not there.ckpt",
    "of another library": UNREADABLE % "safetensors",
    "code": r"Weights only load failed",
    "code in a bare pickle": UNREADABLE % "pickle",
}
FOLDER = r"RuntimeError: .*%s cannot be read as a checkpoint .* copy the whole folder again"
FOLDERS = {name: FOLDER % name for name in ("metadata_cut", "trainer_cut", "part_cut", "part_missing", "part_swapped")}


class Code:
    """Leaves a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def resume_all(folder: str) -> list[str]:
    """What each bad file is answered with; the whole one is resumed from at last."""
    path = Path(folder)

    def trainer(epochs: int) -> Trainer:
        strategy = PipelineStrategy(stages=2, microbatches=3)
        return Trainer(accelerator="cpu", devices=2, max_epochs=epochs, strategy=strategy, **QUIET)

    whole = path / "whole.ckpt"
    first = trainer(1)
    first.fit(MLP().float(), MLP.loader())
    first.save_checkpoint(whole)
    if first.is_global_zero:
        content = whole.read_bytes()
        (path / "broken.ckpt").write_bytes(content[: len(content) // 2])
        (path / "empty.ckpt").write_bytes(b"")
        (path / "text.ckpt").write_text("not a checkpoint")
        other = torch.load(whole, weights_only=True)
        other["state_dict"] = {f"other.{name}": value for name, value in other["state_dict"].items()}
        torch.save(other, path / "other.ckpt")
        torch.save({"weights": torch.zeros(3)}, path / "foreign.ckpt")
        header = json.dumps({"net.0.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (path / "safetensors.ckpt").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        torch.save({**other, "loops": Code(path / "has_run")}, path / "code.ckpt")
        (path / "pickle.ckpt").write_bytes(pickle.dumps(Code(path / "has_run")))
    first.strategy.barrier()
    answers = []
    for name in ("broken", "empty", "text", "other", "foreign", "not there", "safetensors", "code", "pickle"):
        if name == "code":  # as Trainer.fit(weights_only=True), which not every version has
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        try:
            trainer(2).fit(MLP().float(), MLP.loader(), ckpt_path=str(path / f"{name}.ckpt"))
            answers.append("was taken")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
    last: Any = trainer(2)
    last.fit(MLP().float(), MLP.loader(), ckpt_path=str(whole))
    return [*answers, f"steps {last.global_step} of {2 * first.global_step}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[str]]:
    return run_ranks(resume_all, 2, str(folder), timeout=110)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_that_cannot_be_used(case: str, answers: list[list[str]]) -> None:
    for rank in answers:
        answer = rank[list(CASES).index(case)]
        assert answer != "was taken"
        assert re.search(CASES[case], answer), answer


def test_the_whole_one_is_resumed_from_after_all_of_them(answers: list[list[str]]) -> None:
    for rank in answers:
        assert rank[-1] == "steps 6 of 6", rank


def test_no_code_of_a_file_has_run(folder: Path, answers: list[list[str]]) -> None:
    """Where torch is told not to load it; a reader that does not care would run it."""
    assert not (folder / "has_run").exists()
    pickle.loads((folder / "pickle.ckpt").read_bytes())
    assert (folder / "has_run").exists()


# --- folders ---


def resume_from_folders(folder: str) -> list[str]:
    """What each folder with a bad file is answered with; the whole one is resumed from at last."""
    path = Path(folder)

    def trainer(epochs: int) -> Trainer:
        strategy = PipelineStrategy(stages=2, microbatches=3, save_distributed_checkpoint=True)
        return Trainer(accelerator="cpu", devices=2, max_epochs=epochs, strategy=strategy, **QUIET)

    first = trainer(1)
    first.fit(MLP().float(), MLP.loader())
    first.save_checkpoint(path / "whole")
    if first.is_global_zero:
        for name in FOLDERS:
            shutil.copytree(path / "whole", path / name)
        cut(path / "metadata_cut" / ".metadata")
        cut(path / "trainer_cut" / "meta.pt")
        cut(path / "part_cut" / "__1_0.distcp")
        (path / "part_missing" / "__0_0.distcp").unlink()
        shutil.copy(path / "whole" / "__0_0.distcp", path / "part_swapped" / "__1_0.distcp")
    first.strategy.barrier()
    answers = []
    for name in FOLDERS:
        try:
            trainer(2).fit(MLP().float(), MLP.loader(), ckpt_path=str(path / name))
            answers.append("was taken")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    last: Any = trainer(2)
    last.fit(MLP().float(), MLP.loader(), ckpt_path=str(path / "whole"))
    return [*answers, f"steps {last.global_step} of {2 * first.global_step}"]


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture(scope="module")
def folder_answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return run_ranks(resume_from_folders, 2, str(tmp_path_factory.mktemp("folders")), timeout=110)


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_cannot_be_used(case: str, folder_answers: list[list[str]]) -> None:
    """A rank that could read its own part is told by the other one."""
    found = [rank[list(FOLDERS).index(case)] for rank in folder_answers]
    assert "was taken" not in found
    for answer in found:
        assert re.search(FOLDERS[case], answer, re.DOTALL), found


def test_the_whole_folder_is_resumed_from_after_all_of_them(folder_answers: list[list[str]]) -> None:
    for rank in folder_answers:
        assert rank[-1] == "steps 6 of 6", rank
