"""Layers whose activations are recomputed: the second run leaves nothing behind, and only what is named runs twice."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.callbacks.test_memory import HELD, Unforecast, bytes_of, peaks, row
from tests.models import MLP
from tests.training import Table, assert_same, plain


class _Caching(nn.Module):
    """Adds its output to the cache that it is given, and reads what is there: the length tells how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: dict[str, list[Tensor]]) -> Tensor:
        mine = cache.setdefault("kept", [])
        mine.append(x.detach() * len(mine))
        return self.linear(x).tanh() * sum(kept.sum() for kept in mine).sigmoid()


class Cached(MLP):
    """A cache that belongs to one layer's call, as decoders hand them on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(_Caching() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.net:
            x = layer(x, {})
        return F.mse_loss(self.head(x), y)


ROWS = Table({"cached": {"name": "MLP", "cls": Cached, "strategy": {"activation_checkpointing": True}}})


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_cache_is_filled_once(stages: int) -> None:
    assert_same(ROWS.plain("cached"), ROWS.piped("cached", stages))


def test_only_what_is_named_is_recomputed_and_containers_name_what_is_in_them() -> None:
    """A list of layers once recomputed every layer with parameters, and a container nothing."""
    one, everything = ({"activation_checkpointing": [name]} for name in ("net.1", "net"))
    runs = Table(
        {
            "one": row(3, 3, "1f1b", **one) | {"callbacks": (Unforecast,)},
            "all": row(3, 3, "1f1b", **everything) | {"callbacks": (Unforecast,)},
        }
    )
    samples, _ = HELD[3][3, "1f1b"]
    # stage 1 is net.1 alone: it keeps what it received; the other stages keep all
    assert peaks(runs.piped("one", 3)[0].extra["memory"][0], 3) == bytes_of(samples, [20, 4, 6 + 21 + 3])
    assert peaks(runs.piped("all", 3)[0].extra["memory"][0], 3) == bytes_of(samples, [0, 4, 6 + 5 + 3])


class _Cache:
    """A user's own."""

    def __init__(self, *kept: Tensor) -> None:
        self.kept = list(kept)


class _Told(nn.Module):
    """Takes tensors by position, by keyword, in containers, and in a cache that it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor, extra: dict[str, Any], cache: _Cache) -> Tensor:
        factor, (shift, _) = extra["factor"], extra["others"]
        h = self.linear(x * scale).tanh()
        cache.kept.append(torch.cat([h, h, h], 1))
        return h * factor.sum(1, keepdim=True) + shift + cache.kept[0].sum(1, keepdim=True)


class Told(MLP):
    """Each layer gets tensors of its own, which the code between the layers makes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(_Told() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.net:
            extra = {"factor": torch.full((len(x), 5), 0.3), "others": [torch.full((len(x), 1), 0.1), "text"]}
            x = layer(x, scale=torch.full((len(x), 2), 0.5).mean(1, keepdim=True), extra=extra, cache=_Cache(2 * y))
        return F.mse_loss(self.head(x), y)


#: numbers for each sample that a layer gets beside its input, and those that it leaves in the cache
BESIDE = (1 + 5 + 1 + 3) + 24
#: numbers held for each sample: what went into the layers (into the first one, the batch), and the prediction
TOLD = {1: [BESIDE + 3 * (8 + BESIDE) + 8 + 3], 2: [BESIDE + 8 + BESIDE, 2 * (8 + BESIDE) + 8 + 3]}


def test_all_that_the_second_run_needs_is_counted() -> None:
    """A checkpoint saves arguments by position for the backward, and keeps all others without anybody's knowledge."""
    for stages, split in ((1, []), (2, ["net.2"])):
        told = {
            "cls": Told,
            "strategy": {"activation_checkpointing": True, "split": split},
            "trainer": {"max_epochs": 1},
        }
        runs = Table({"told": {"name": "Told", **told, "callbacks": (Unforecast,)}})
        assert_same(plain("Told", cls=Told, trainer={"max_epochs": 1}), runs.piped("told", stages))
        samples, _ = HELD[stages][3, "1f1b"]
        first, *_, last = runs.piped("told", stages)[0].extra["memory"]
        assert peaks(first, stages) == bytes_of(samples, TOLD[stages])
        assert peaks(last, stages) == bytes_of([4, 2][2 - stages :], TOLD[stages])
