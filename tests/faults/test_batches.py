"""Batches, and micro-batches of one batch, that are not built alike: planned anew, or refused on all ranks alike."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.launch import run_ranks
from tests.models import MLP
from tests.training import Table, assert_same, fit

SIZE = 7
Kind = tuple[str, ...]
#: the structures that follow each other in an epoch
KINDS: dict[str, Kind] = {
    "a key more": ("x", "x weight", "x", "x weight"),
    "None": ("x weight", "x none", "x weight"),
    "a tuple": ("x", "tuple", "x", "list"),
    "a string": ("x name=a", "x name=b", "x name=a", "x"),
    "names": ("x names", "x", "x names"),
    "nested": ("x", "nested", "x weight"),
    "another size": ("x", "x small", "x weight small", "x wide"),
    "another dtype": ("x", "x single", "x"),
    "another order": ("x", "reversed", "x"),
}


def batch(kind: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    size = 4 if "small" in kind else SIZE

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    x, y, weight = rand(size, 16 if "wide" in kind else 8), rand(size, 3), rand(size)
    if "single" in kind:
        x = x.half()
    if kind in ("tuple", "list"):
        return (x, y) if kind == "tuple" else [x, y]
    if kind == "nested":
        return {"inputs": {"x": x}, "y": y}
    if kind == "reversed":
        return {"y": y, "x": x}
    found: dict[str, Any] = {"x": x, "y": y}
    found |= {"weight": weight} if "weight" in kind else {}
    found |= {"weight": None} if "none" in kind else {}
    found |= {"name": kind[-1]} if "name=" in kind else {}
    return found | ({"names": [f"sample {index}" for index in range(size)]} if "names" in kind else {})


class Loader:
    """Gives the batches of one epoch; can be sent to another process."""

    def __init__(self, kinds: Kind) -> None:
        self.kinds = kinds

    def __call__(self) -> Any:
        kept = [batch(kind, seed) for seed, kind in enumerate(self.kinds)]
        return DataLoader(kept, batch_size=None)  # type: ignore[arg-type]


class TakesAll(MLP):
    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, (tuple, list)):
            batch = {"x": batch[0], "y": batch[1]}
        x = batch["inputs"]["x"] if "inputs" in batch else batch["x"]
        squares = (self.net(x.to(self.dtype)[:, :8]) - batch["y"]).square().mean(1)
        if batch.get("weight") is not None:
            squares = squares * batch["weight"].sigmoid()
        factor = {"a": 1.0, "b": 0.5, None: 1.0}[batch.get("name")]
        return squares.mean() * factor + len(batch.get("names", ())) * 0.0


class Mixed(TakesAll):
    """Its micro-batches are not built alike."""

    def split_batch(self, batch: Any, number: int) -> list[Any]:
        x, y, weight = batch["x"], batch["y"], batch["weight"]
        return [
            {"x": x[:2], "y": y[:2], "weight": weight[:2]},
            {"y": y[2:4], "weight": weight[2:4], "inputs": {"x": x[2:4]}},
            {"x": x[4:], "y": y[4:], "weight": weight[4:], "name": "a"},
        ]


ROWS = Table(
    {
        **{key: {"name": "MLP", "cls": TakesAll, "loader": Loader(kinds)} for key, kinds in KINDS.items()},
        "mixed": {"name": "MLP", "cls": Mixed, "loader": Loader(("x weight",) * 3)},
    }
)


@pytest.mark.parametrize("key", ROWS.keys)
def test_what_differs_is_planned_anew(key: str) -> None:
    assert_same(ROWS.plain(key), ROWS.piped(key, 3))


# --- what the step cannot take ---


class TakesOne(MLP):
    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch["x"]), batch["y"])


class HasMore(TakesAll):
    """Takes a layer for one structure that it did not need for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Tensor:
        if "weight" in batch:
            batch["x"] = self.extra(batch["x"])
        return super().loss(batch)


REFUSED: dict[str, tuple[type[MLP], Kind, str]] = {
    "a key that is missing": (TakesOne, ("x", "nested"), "KeyError: 'x'"),
    "a tuple that was a dict": (TakesOne, ("x", "tuple"), "TypeError: list indices must be"),
    "a layer that only another structure needs": (HasMore, ("x", "x weight"), "after 'extra' of stage 2"),
}


def all_refused(names: list[str]) -> list[str]:
    answers = []
    for name in names:
        cls, kinds, _ = REFUSED[name]
        try:
            fit("MLP", {"stages": 3, "microbatches": 3}, devices=3, cls=cls, loader=Loader(kinds))
            answers.append("not refused")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    return answers


@pytest.fixture(scope="module")
def answers() -> list[list[str]]:
    return run_ranks(all_refused, 3, list(REFUSED), timeout=110)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_step_cannot_take_is_said_on_all_ranks(name: str, answers: list[list[str]]) -> None:
    for rank in answers:
        answer = rank[list(REFUSED).index(name)]
        assert answer.startswith("MisconfigurationException: training_step: "), answer
        assert re.search(REFUSED[name][2], answer), answer
