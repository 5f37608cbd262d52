"""Stages of a real model, one after the other in one process: each is the step with other layers switched off."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pp.partition.layers import find_layers
from lightning_pp.partition.plan import segments
from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.trace import trace_step
from lightning_pp.runtime import rng
from lightning_pp.runtime.layout import Layout
from lightning_pp.runtime.planner import Cut, CutOptions, Planner
from lightning_pp.runtime.stage import ChangedStepError, Stage
from tests.runtime.ranks import CPU


class Net(nn.Module):
    """A skip from the first block to the loss, noise in the glue, dropout in the last block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.last = nn.Sequential(nn.Dropout(dropout), nn.Linear(3, 2))
        self.noise = dropout > 0
        self.called: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.blocks[0](x)
        for number, block in enumerate(self.blocks[1:]):
            self.called.append(number)
            x = block(x).relu_()
        if self.noise:
            x = x + torch.randn(x.shape)
        return self.last(x + skip).pow(2).mean()


@pytest.fixture
def net() -> Iterator[Callable[[float], tuple[Net, Switchboard]]]:
    boards = []

    def make(dropout: float = 0.0) -> tuple[Net, Switchboard]:
        torch.manual_seed(0)
        model = Net(dropout)
        board = Switchboard(find_layers(model, None))
        board.install()
        boards.append(board)
        return model, board

    yield make
    for board in boards:
        board.remove()


def run_cut(model: Net, board: Switchboard, bounds: tuple[int, ...], x: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """All stages in a row; returns the loss, with gradients in ``.grad``, and what crossed the cuts."""
    trace = trace_step(lambda: model(x), model, board, CPU)
    stage = Stage(board)
    saved, crossed, received = [], [], []
    result: Any = None
    for segment in segments(trace, bounds):
        layout = Layout(trace, segment, CPU)

        def step() -> Any:
            rng.start_stream(7, False)
            return model(x)

        result, gives = stage.forward(layout, step, received)
        saved.append((layout, received, gives))
        received = [tensor.detach().requires_grad_() for tensor in gives]
        crossed.append(gives)
    assert stage.frame is None
    grads: list[Any] = [torch.ones(())]
    for number, (layout, inputs, gives) in enumerate(reversed(saved)):
        stage.backward(layout, [result] if number == 0 else gives, grads)
        grads = [tensor.grad for tensor in inputs]
    return result.detach(), crossed


def gradients(model: Net) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("bounds", [(0, 6), (0, 2, 6), (0, 1, 2, 6), (0, 1, 3, 4, 6), (0, 3, 3, 6)])
def test_stages_compute_what_the_step_does(net: Any, bounds: tuple[int, ...]) -> None:
    model, board = net()
    assert trace_step(lambda: model(torch.ones(5, 3)), model, board, CPU).layers[0] == "blocks.0"
    number = len(trace_step(lambda: model(torch.ones(5, 3)), model, board, CPU).calls)
    bounds = (*bounds[:-1], number)
    x = torch.rand(5, 3)
    whole = model(x)
    whole.backward()
    expected = gradients(model)
    loss, crossed = run_cut(model, board, bounds, x)
    assert torch.equal(loss, whole.detach())
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [len(gives) for gives in crossed] == [1 if bound == 1 else 2 for bound in bounds[1:-1]] + [0]


def test_random_numbers_do_not_depend_on_the_cut(net: Any) -> None:
    model, board = net(0.5)
    x = torch.rand(5, 3)
    number = len(trace_step(lambda: model(x), model, board, CPU).calls)
    one, _ = run_cut(model, board, (0, number), x)
    reference = gradients(model)
    for bounds in [(0, 2, number), (0, 1, 3, number)]:
        loss, _ = run_cut(model, board, bounds, x)
        assert torch.equal(loss, one)
        for ours, theirs in zip(gradients(model), reference, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_a_stage_ends_where_the_next_begins(net: Any) -> None:
    model, board = net()
    x = torch.rand(5, 3)
    trace = trace_step(lambda: model(x), model, board, CPU)
    first, _ = segments(trace, (0, 2, len(trace.calls)))
    model.called.clear()
    result, gives = Stage(board).forward(Layout(trace, first, CPU), lambda: model(x), [])
    assert result is None
    assert model.called == [0, 1]  # the second is the call that ended it
    assert all(tensor.requires_grad for tensor in gives)


def test_another_order_of_layers_is_refused(net: Any) -> None:
    model, board = net()
    x = torch.rand(5, 3)
    trace = trace_step(lambda: model(x), model, board, CPU)
    layout = Layout(trace, segments(trace, (0, len(trace.calls)))[0], CPU)
    with pytest.raises(
        ChangedStepError, match=r"called layer 'blocks.2' where 'blocks.0' was planned \(layer call 0\)"
    ):
        Stage(board).forward(layout, lambda: model.blocks[2](x), [])
    with pytest.raises(ChangedStepError, match=r"The step ended where 'blocks.1' was planned \(layer call 1\)"):
        Stage(board).forward(layout, lambda: model.blocks[0](x), [])


# --- planning ---


def planner_for(net: Any) -> tuple[Planner, Net]:
    model, board = net()
    return Planner(model, board, [0, 1], CPU, frozenset()), model


def test_a_plan_is_made_once_per_signature(net: Any) -> None:
    planner, model = planner_for(net)
    trace = planner.decide("step", lambda: model(torch.ones(4, 3)), CutOptions(2, 4, None, "flops"), lambda cut: cut)
    one = planner.plan("step", "four", lambda: model(torch.ones(4, 3)))
    assert planner.plan("step", "four", lambda: 1 / 0) is one
    assert one.bounds[0] == 0
    assert one.bounds[-1] == len(trace.calls)
    assert sorted(one.signature_plan.layouts) == [0, 1]
    assert not one.draws
    planner.forget()
    assert planner.plan("step", "four", lambda: model(torch.ones(4, 3))) is not one


def test_more_stages_than_layers_are_refused(net: Any) -> None:
    planner, model = planner_for(net)
    with pytest.raises(ValueError, match=r"stages=9, but Net.step calls only \d layer\(s\): blocks.0, .* Use at most"):
        planner.decide("step", lambda: model(torch.ones(4, 3)), CutOptions(9, 4, None, "flops"), lambda cut: cut)


def test_all_ranks_take_the_cut_they_agree_on(net: Any) -> None:
    planner, model = planner_for(net)
    trace_bounds: list[tuple[int, ...]] = []

    def agree(cut: Cut) -> Cut:
        trace_bounds.append(cut.bounds)
        return Cut((0, 1, cut.bounds[-1]), cut.ownership, cut.touched, cut.calls, cut.step)

    planner.decide("step", lambda: model(torch.ones(4, 3)), CutOptions(2, 4, None, "flops"), agree)
    assert planner.plan("step", "four", lambda: model(torch.ones(4, 3))).bounds == (0, 1, trace_bounds[0][-1])


def test_what_nobody_needs_lies_on_the_last_stage() -> None:
    cut = Cut((0, 1, 2), {"a": (0,), "b": (0, 1)}, frozenset({"mask"}), ("x", "y"), "training_step")
    assert [cut.stages_of(name, False, 2) for name in ("a", "b", "unused")] == [(0,), (0, 1), (1,)]
    assert [cut.stages_of(name, True, 2) for name in ("a", "mask", "loose")] == [(0,), (0, 1), (0, 1)]
