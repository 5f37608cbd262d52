"""Gradient checkpoints of the user's around layers that a step calls more than once, and the code beside them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from tests.launch import Failed, try_ranks
from tests.models import MLP
from tests.training import Table, assert_same, fit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Again(MLP):
    """Five layers, one of which is called again and again; ``body`` says how."""

    def __init__(self, body: Callable[["Again", Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.net = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def layer(self, number: int, x: Tensor) -> Tensor:
        layer: nn.Module = self.net[number]
        return layer(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.head(self.body(self, x)), y)


def each_call(model: Again, x: Tensor, reentrant: bool) -> Tensor:
    """A layer that all others share, as in ALBERT."""
    x = model.layer(0, x)
    for _ in range(4):
        x = checkpoint(model.net[1], x, use_reentrant=reentrant)
    return model.layer(2, x)


def code_beside(model: Again, x: Tensor) -> Tensor:
    """What is computed behind a layer is saved on the next stage, and computed again there."""

    def part(x: Tensor, number: int) -> Tensor:
        return x + torch.sigmoid(model.layer(1, x) * number) * model.scale

    x = model.layer(0, x)
    for number in range(4):
        x = checkpoint(part, x, number, use_reentrant=False)
    return model.layer(2, x)


def first_call(model: Again, x: Tensor, reentrant: bool) -> Tensor:
    """Only the first of two calls is checkpointed: the second one's stage runs that checkpoint as well."""
    x = checkpoint(model.net[1], model.layer(0, x), use_reentrant=reentrant)
    return model.layer(1, model.layer(3, model.layer(2, x.sin())))


def first_call_and_code(model: Again, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: model.layer(1, x).sin(), model.layer(0, x), use_reentrant=False)
    return model.layer(1, model.layer(3, model.layer(2, x)))


def two_calls(model: Again, x: Tensor) -> Tensor:
    """One checkpoint over both, and over any cut between them."""

    def body(x: Tensor) -> Tensor:
        for number in (0, 1, 2, 1, 3):
            x = torch.sigmoid(x + model.layer(number, x))
        return x

    return checkpoint(body, model.layer(0, x), use_reentrant=False)  # type: ignore[no-any-return]


def nested(model: Again, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.sigmoid(model.layer(1, x)) * model.scale

    def outer(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + checkpoint(inner, model.layer(2, x).sin(), use_reentrant=False)
        return x

    return checkpoint(outer, model.layer(0, x), use_reentrant=False)  # type: ignore[no-any-return]


def hook_inside(model: Again, x: Tensor) -> Tensor:
    """It is set where the checkpoint runs again, which all stages behind it do."""

    def part(x: Tensor) -> Tensor:
        h = model.layer(1, x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return h

    x = checkpoint(part, model.layer(0, x), use_reentrant=True)
    return model.layer(3, model.layer(2, x.sin()))


def parameter_in_front(model: Again, x: Tensor, reentrant: bool) -> Tensor:
    """On the stage behind, the parameter is not there, and what it is used for is computed again."""

    def part(x: Tensor) -> Tensor:
        h = model.layer(1, x * model.scale)
        return h if reentrant else h.sin()

    x = checkpoint(part, model.layer(0, x), use_reentrant=reentrant)
    return model.layer(3, model.layer(2, x))


BODIES: dict[str, Callable[[Again, Tensor], Tensor]] = {
    "each call, reentrant": partial(each_call, reentrant=True),
    "each call": partial(each_call, reentrant=False),
    "code beside": code_beside,
    "first call, reentrant": partial(first_call, reentrant=True),
    "first call": partial(first_call, reentrant=False),
    "first call and code": first_call_and_code,
    "two calls": two_calls,
    "nested": nested,
    "hook inside": hook_inside,
    "parameter in front, reentrant": partial(parameter_in_front, reentrant=True),
    "parameter in front": partial(parameter_in_front, reentrant=False),
}


def rows() -> dict[str, Any]:
    common = {"name": "Again", "trainer": {"max_epochs": 1}}
    found = {key: {**common, "cls": partial(Again, body)} for key, body in BODIES.items()}
    recomputed = {key: row | {"strategy": {"activation_checkpointing": True}} for key, row in found.items()}
    return found | {f"{key}, recomputed": row for key, row in recomputed.items()}


ROWS = Table(rows())
REENTRANT = {key for key in BODIES if "reentrant" in key} | {"hook inside"}
#: one checkpoint that is not reentrant in another one
NESTED = {"nested"} | {f"{key}, recomputed" for key in BODIES if key not in REENTRANT}


def bears_nested_checkpoints() -> bool:
    """Whether torch runs them again after a step of another default dtype; 2.6 does not, without a pipeline either."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    try:
        y = checkpoint(lambda x: checkpoint(torch.sin, x, use_reentrant=False), x, use_reentrant=False)
    finally:
        torch.set_default_dtype(torch.float32)
    try:
        y.sum().backward()
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("key", rows())
def test_a_layer_that_is_called_more_than_once(key: str, stages: int) -> None:
    """On a stage that has the layer for a later call, an earlier one was once computed again, with nothing said."""
    if key in NESTED and not bears_nested_checkpoints():
        pytest.skip("torch itself fails on nested checkpoints in float64")
    assert_same(ROWS.plain(key), ROWS.piped(key, stages))


def residual(model: Again, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: x + model.layer(1, x), model.layer(0, x), use_reentrant=True)
    return model.layer(2, x)


def scaled(model: Again, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: model.layer(1, x) * model.scale, model.layer(0, x), use_reentrant=True)
    return model.layer(2, x)


def hooked_behind(model: Again, x: Tensor) -> Tensor:
    x = checkpoint(model.net[1], model.layer(0, x), use_reentrant=True)
    x.register_hook(lambda grad: grad * 0.5)
    return model.layer(2, x)


def written_behind(model: Again, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: model.layer(1, x), model.layer(0, x), use_reentrant=True)
    return model.layer(2, x.add_(1.0))


@pytest.mark.parametrize("body", [residual, scaled, hooked_behind, written_behind])
def test_what_a_reentrant_checkpoint_computes_with_stays_in_it(body: Callable[[Again, Tensor], Tensor]) -> None:
    """A layer in it has no gradient but through it, so the stages before the cut once got none, or a part of it."""
    given: dict[str, Any] = {"cls": partial(Again, body), "devices": 2, "trainer": {"max_epochs": 1}}
    for result in try_ranks(fit, 2, "Again", strategy={"stages": 2, "split": ["net.2"]}, **given):
        assert isinstance(result, Failed)
        assert "MisconfigurationException: A cut in front of layer 'net.2' lies behind" in result.text
        assert "around layer 'net.1'" in result.text
        assert "Use use_reentrant=False" in result.text


@pytest.mark.parametrize("body", [residual, scaled])
def test_with_a_cut_elsewhere_it_is_the_plain_run(body: Callable[[Again, Tensor], Tensor]) -> None:
    runs = Table({"run": {"name": "Again", "cls": partial(Again, body), "strategy": {"split": ["head"]}}})
    assert_same(runs.plain("run"), runs.piped("run", 2))
