"""Layers that keep something for their own next call: a cache of keys and values, a counter, a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pp.partition.plan import cut_by_balance
from lightning_pp.partition.trace import TraceError

from .tracing import Own, called, trace

X = torch.arange(12.0).reshape(3, 4)


class Cache:
    """What a library hands to every layer of a model, and no container that torch knows."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.last: Any = None


def into_list(cache: Any, x: torch.Tensor) -> torch.Tensor:
    cache.entries.append(x)
    return torch.cat(cache.entries)


def into_dict(cache: Any, x: torch.Tensor) -> torch.Tensor:
    cache.by_name["x"] = torch.cat([*cache.by_name.values(), x])
    return cache.by_name["x"]


def into_attribute(cache: Any, x: torch.Tensor) -> torch.Tensor:
    cache.last = x if cache.last is None else torch.cat([cache.last, x])
    return cache.last


KINDS = pytest.mark.parametrize("put", [into_list, into_dict, into_attribute])


class Block(nn.Module):
    """Adds its input to a cache, its own or one that it is given, and uses all that is in there."""

    def __init__(self, put: Any, by_values: bool = False, own: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.put = put
        self.by_values = by_values
        self.cache = Cache() if own else None

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        seen = self.put(self.cache or cache, x * self.weight)
        if self.by_values:  # which no fake tensor bears
            seen = seen[(seen.sum(1) > -1e9).nonzero()[:, 0]]
        return x + seen.sum(0)


class Model(nn.Module):
    """Calls its layers ``times`` times with one cache for each layer, and then its head."""

    def __init__(self, *blocks: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 4)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        caches = [Cache() for _ in self.blocks]
        x = self.first(x)
        for _ in range(self.times):
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache)
        return self.head(x).sum()


@KINDS
@pytest.mark.parametrize("own", [False, True])
def test_a_layer_that_fails_as_a_fake_has_changed_nothing(put: Any, own: bool) -> None:
    """It was run a second time, for real, with what the first try had left in its cache: here one with other rows."""
    sizes = []

    def counted(cache: Any, x: torch.Tensor) -> torch.Tensor:
        seen = put(cache, x)
        sizes.append(len(seen))
        return seen

    model = Model(Block(counted, by_values=True, own=own))
    trace(model, X)
    assert sizes == [3, 3]
    if own:
        assert not vars(model.blocks[0].cache)["entries"]


@KINDS
@pytest.mark.parametrize("by_values", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_calls_that_share_a_cache_stay_on_one_stage(put: Any, by_values: bool, own: bool) -> None:
    """The second call used what the first had left on another stage, where it was empty: a wrong result."""
    model = Model(Block(put, by_values, own), Block(put, by_values, own), times=2)
    found = trace(model, X)
    assert called(found) == ["first", *["blocks.0", "blocks.1"] * 2, "head"]
    assert found.starts() == [0, 1, 5, 6]
    assert cut_by_balance(found, 3, [1.0] * 6) == (0, 1, 5, 6)
    assert cut_by_balance(found, 2, [1.0, 1.0, 1.0, 1.0, 1.0, 9.0]) == (0, 5, 6)
    found.refuse_divided((0, 1, 5, 6))
    for bounds in [(0, 2, 6), (0, 3, 6), (0, 4, 6)]:
        with pytest.raises(TraceError, match=r"calls layer 'blocks\.\d' more than once, and a later call uses what"):
            found.refuse_divided(bounds)
    with pytest.raises(TraceError, match="use fewer stages"):
        found.refuse_divided(cut_by_balance(found, 4, [1.0] * 6))


def test_what_a_layer_that_needs_real_values_puts_into_an_object() -> None:
    """It was the one way around: neither another layer nor the step was told that it would be missing."""

    class Reading(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = Cache()
            x = self.blocks[0](self.first(x), cache)
            return x.sum() + cache.last.sum()

    class Sharing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = Cache()
            return self.blocks[1](self.blocks[0](x, cache), cache).sum()

    for model in (Reading, Sharing):
        with pytest.raises(TraceError, match=r"layer .blocks.0. has put aside"):
            trace(model(Block(into_attribute, by_values=True), Block(into_attribute, by_values=True)), X)


def test_a_layer_that_is_called_twice_and_keeps_nothing_may_be_cut() -> None:
    shared = Own(lambda own, x, cache: x * own.weight)
    assert trace(Model(shared, shared, times=2), X).starts() == list(range(7))


def test_a_table_and_a_buffer_may_be_used_on_several_stages() -> None:
    """Every stage makes the table, and every stage that runs the layer has its buffers."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.table: Any = None

        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(x.shape[1], dtype=x.dtype)
            return self.norm(x) + self.table

    assert trace(Model(Normed(), times=2), X).starts() == list(range(5))


def test_a_state_that_a_layer_keeps_for_the_next_step_is_its_own() -> None:
    """One call in each step, both on the same stage."""

    def block(own: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
        before = getattr(own, "before", None)
        own.before = (x * own.weight).detach()
        return x * 1 if before is None else x + before

    assert trace(Model(Own(block), Own(block)), X, twice=True).starts() == list(range(5))


def test_a_state_that_goes_round_two_calls_keeps_them_together() -> None:
    """The first call of a step uses what the second call of the step before has left."""

    def block(own: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
        own.calls = getattr(own, "calls", 0) + 1
        before = getattr(own, "before", None) if own.calls % 2 else None
        if own.calls % 2 == 0:
            own.before = (x * own.weight).detach()
        return x * own.weight if before is None else x * own.weight + before

    found = trace(Model(Own(block), times=2), X, twice=True)
    assert called(found) == ["first", "blocks.0", "blocks.0", "head"]
    assert found.starts() == [0, 1, 3, 4]
    with pytest.raises(TraceError, match=r"calls layer 'blocks\.0' more than once"):
        found.refuse_divided((0, 2, 4))
