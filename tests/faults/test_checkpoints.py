"""Checkpoints that cannot be used: the file is named, on every rank, and nobody waits for another."""

import re
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
}


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
    first.strategy.barrier()
    answers = []
    for name in ("broken", "empty", "text", "other", "foreign", "not there"):
        try:
            trainer(2).fit(MLP().float(), MLP.loader(), ckpt_path=str(path / f"{name}.ckpt"))
            answers.append("was taken")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    last: Any = trainer(2)
    last.fit(MLP().float(), MLP.loader(), ckpt_path=str(whole))
    return [*answers, f"steps {last.global_step} of {2 * first.global_step}"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return run_ranks(resume_all, 2, str(tmp_path_factory.mktemp("checkpoints")), timeout=110)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_that_cannot_be_used(case: str, answers: list[list[str]]) -> None:
    for rank in answers:
        answer = rank[list(CASES).index(case)]
        assert answer != "was taken"
        assert re.search(CASES[case], answer), answer


def test_the_whole_one_is_resumed_from_after_all_of_them(answers: list[list[str]]) -> None:
    for rank in answers:
        assert rank[-1] == "steps 6 of 6", rank
