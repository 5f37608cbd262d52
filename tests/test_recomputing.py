"""Layers whose activations are recomputed: the second run leaves nothing behind, and only what is named runs twice."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from tests.callbacks.test_memory import HELD, Unforecast, bytes_of, peaks, row
from tests.models import MLP
from tests.training import Table, assert_same


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
