"""Processes that were not started alike are told so before the first step, all of them, by the name of what differs."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_pp import PipelineStrategy
from lightning_pp.launch.agreement import differences
from tests.launch import run_ranks
from tests.models import MLP
from tests.training import QUIET


class Wider(MLP):
    pass


def start(case: str, folder: str) -> str:
    """What a process says that is the odd one out on rank 1."""
    is_odd = os.environ["LOCAL_RANK"] == "1"
    strategy: dict[str, Any] = {"stages": 2, "microbatches": 3}
    trainer: dict[str, Any] = {"max_epochs": 1}
    module: Callable[[], Any] = MLP
    if case == "seed":
        seed_everything(int(is_odd))
    if is_odd:
        strategy |= {"arguments": {"microbatches": 4}, "stages": {"stages": 1}, "two": {"balance": "params"}}.get(
            case, {}
        )
        trainer |= {"trainer": {"accumulate_grad_batches": 2}, "two": {"max_epochs": 3}}.get(case, {})
        module = Wider if case == "class" else MLP
    if case == "code":
        module = edited(folder, is_odd)
    version = torch.__version__
    if is_odd and case == "version":
        torch.__version__ = "9.9"  # type: ignore[assignment]
    try:
        model = module()
        if is_odd and case == "shape":
            model.net[2] = torch.nn.Linear(8, 5)
        Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(**strategy), **trainer, **QUIET).fit(
            model, MLP.loader()
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.__version__ = version
    return "not refused"


def edited(folder: str, is_odd: bool) -> Any:
    """The same class from a file that one machine has in another version."""
    path = Path(folder, f"{int(is_odd)}", "edited_model.py")
    path.parent.mkdir()
    path.write_text(f"from tests.models import MLP\n\n\nclass Edited(MLP):\n    factor = {2 if is_odd else 1}\n")
    sys.path.insert(0, str(path.parent))
    return importlib.import_module("edited_model").Edited


def start_all(cases: list[str], folder: str) -> list[str]:
    return [start(case, folder) for case in cases]


CASES = {
    "arguments": r"PipelineStrategy\(microbatches=\) is 3 on rank 0 and 4 on rank 1\. Every",
    "stages": r"PipelineStrategy\(stages=\) is 2 on rank 0 and 1 on rank 1",
    "trainer": r"Trainer\(accumulate_grad_batches=\) is 1 on rank 0 and 2 on rank 1",
    "two": r"PipelineStrategy\(balance=\) is 'flops' .*; Trainer\(max_epochs=\) is 1 on rank 0 and 3 on rank 1",
    "class": r"the model's class is MLP on rank 0 and Wider on rank 1",
    "shape": r"parameter 'net\.2\.weight' is \[.*\] on rank 0 and \[5, 8\] on rank 1",
    "code": r"the file of Edited is version \w+ on rank 0 and version \w+ on rank 1",
    "version": r"torch is .* on rank 0 and 9\.9 on rank 1",
    "seed": r"seed_everything is 0 on rank 0 and 1 on rank 1",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return run_ranks(start_all, 2, list(CASES), str(tmp_path_factory.mktemp("code")), timeout=110)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_differs(case: str, said: list[list[str]]) -> None:
    """The processes stay connected, and start alike or not once more."""
    for rank in said:
        text = rank[list(CASES).index(case)]
        assert text.startswith("MisconfigurationException: The processes were not started alike: "), text
        assert re.search(CASES[case], text), text


def test_random_numbers_that_differ_are_only_warned_of() -> None:
    given = [{"a": "1", "torch.initial_seed()": "5"}, {"a": "1", "torch.initial_seed()": "6"}]
    different, seeds = differences(given)
    assert not different
    assert seeds == "torch.initial_seed() is 5 on rank 0 and 6 on rank 1"


def test_what_one_rank_does_not_have_differs() -> None:
    assert differences([{"a": "1"}, {"a": "1", "b": "2"}])[0] == "b is nothing on rank 0 and 2 on rank 1"
    assert differences([{"a": "1"}, {"a": "1"}, {"a": "3"}])[0] == "a is 1 on rank 0 and 3 on rank 2"
