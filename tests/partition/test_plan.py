"""Stages cut out of a trace: what they run, hold and hand on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_pp.partition.plan import (
    Segment,
    cut_by_balance,
    cut_by_names,
    follow,
    held_by_layers,
    owners,
    segments,
)
from lightning_pp.partition.trace import TraceError, trace_step

from .tracing import CPU, Net, switched, trace

X = torch.rand(2, 4)


def skip(net, x):
    a, b, c, d = net.layers
    first = a(x)
    return d(c(b(first)) + first)


@pytest.fixture
def traced():
    return trace(Net(4, skip), X)


def held(model):
    return held_by_layers(model, switched(model).layers)


def test_segments_hand_on_what_is_live(traced):
    assert segments(traced, (0, 1, 3, 4)) == (
        Segment(0, 1, (), ((0, 0),)),
        Segment(1, 3, ((0, 0),), ((0, 0), (2, 0))),
        Segment(3, 4, ((0, 0), (2, 0)), ()),
    )


def test_stages_without_calls_pass_on(traced):
    assert segments(traced, (0, 2, 2, 4))[1] == Segment(2, 2, ((0, 0), (1, 0)), ((0, 0), (1, 0)))
    last = segments(traced, (0, 4, 4))
    assert last[0].gives == last[1].takes == ((3, 0),)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.position = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.never = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)])
        self.idle = nn.Linear(2, 2)
        self.layers[2].bias = self.layers[0].bias

    def forward(self, x):
        x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight).sum() * self.scale


def test_owners():
    model = Tied()
    found = owners(trace(model, X), (0, 2, 4), held(model))
    assert found == {
        "embed.weight": (0, 1),
        "embed.bias": (0,),
        "position": (0,),
        "layers.0.weight": (0,),
        "layers.0.bias": (0, 1),
        **{f"layers.1.{name}": (1,) for name in ("weight", "bias")},
        **{f"layers.1.{name}": (1,) for name in ("running_mean", "running_var", "num_batches_tracked")},
        "layers.2.weight": (1,),
        "scale": (1,),
    }


def test_cut_by_names(traced):
    names = [f"layers.{i}" for i in range(4)]
    assert cut_by_names(traced, ["layers.1", "layers.3"], names) == (0, 1, 3, 4)
    assert cut_by_names(traced, [], names) == (0, 4)


def test_cut_by_names_takes_the_next_call_of_a_repeated_layer():
    found = trace(Net(2, lambda net, x: net.layers[0](net.layers[1](net.layers[0](x)))), X)
    assert cut_by_names(found, ["layers.1", "layers.0"], ["layers.0", "layers.1"]) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            ["layers.9"],
            "split=['layers.9']: there is no layer 'layers.9'. The layers are 'layers.0', 'layers.1', 'layers.2',"
            " 'layers.3', 'other'.",
        ),
        (
            ["other"],
            "split=['other']: 'other' is never called. The step calls, in this order: 'layers.0', 'layers.1',"
            " 'layers.2', 'layers.3'.",
        ),
        (
            ["layers.2", "layers.1"],
            "split=['layers.2', 'layers.1']: 'layers.1' does not come after the layer that begins stage 1. The step"
            " calls, in this order: 'layers.0', 'layers.1', 'layers.2', 'layers.3'.",
        ),
        (
            ["layers.0"],
            "split=['layers.0']: 'layers.0' does not come after the layer that begins stage 0. The step calls, in this"
            " order: 'layers.0', 'layers.1', 'layers.2', 'layers.3'.",
        ),
    ],
)
def test_names_that_do_not_cut(traced, split, message):
    with pytest.raises(ValueError, match="split") as error:
        cut_by_names(traced, split, [*(f"layers.{i}" for i in range(4)), "other"])
    assert str(error.value) == message


def test_cut_by_balance(traced):
    assert cut_by_balance(traced, 2, [1, 1, 1, 3]) == (0, 3, 4)
    assert cut_by_balance(traced, 2, [3, 1, 1, 1]) == (0, 1, 4)
    # in front of calls 2 and 3 cross two tensors, in front of call 1 one
    assert cut_by_balance(traced, 2, [4, 0, 0, 4]) == (0, 1, 4)


def test_memory_counts_what_early_stages_hold_in_flight(traced):
    costs, saved = [0.0] * 4, [1.0] * 4
    assert cut_by_balance(traced, 2, costs, (saved, 1)) == (0, 2, 4)
    assert cut_by_balance(traced, 2, costs, (saved, 8)) == (0, 1, 4)  # 2 * 1 against 3


# -- other step functions ----------------------------------------------------------------------------------------------


def followed(forward, count=4, bounds=(0, 2, 4)):
    net = Net(count)
    board = switched(net)
    training = trace_step(lambda: net(X), net, board, CPU)
    ownership = owners(training, bounds, held_by_layers(net, board.layers))
    other = trace_step(lambda: forward(net, X), net, board, CPU)
    return follow(other, ownership, held_by_layers(net, board.layers), len(bounds) - 1)


def test_following_the_same_step():
    assert followed(lambda net, x: net(x)) == (0, 2, 4)


def test_following_with_fewer_calls():
    assert followed(lambda net, x: net.layers[1](x)) == (0, 1, 1)
    assert followed(lambda net, x: net.layers[2](x)) == (0, 0, 1)
    assert followed(lambda net, x: x, bounds=(0, 1, 2, 4)) == (0, 0, 0, 0)


def test_following_in_another_order_within_a_stage():
    assert followed(lambda net, x: net.layers[2](net.layers[0](net.layers[1](x)))) == (0, 2, 3)


def test_following_backwards_is_refused():
    with pytest.raises(TraceError) as error:
        followed(lambda net, x: net.layers[0](net.layers[3](x)))
    assert str(error.value) == (
        "Layer 'layers.0' runs on stage(s) [0] in training, but this step calls it after 'layers.3' of stage 1. Call"
        " the layers in the order in which training_step calls them for the first batch; those that this one does not"
        " need lie on the last stage."
    )


def test_a_parameter_of_another_stage_at_the_end_is_refused():
    with pytest.raises(TraceError, match=r"The end of this step uses 'layers.0.weight', which training_step does not"):
        followed(lambda net, x: net(x) + net.layers[0].weight.sum())


def test_a_parameter_of_another_stage_in_front_of_a_layer_is_refused():
    with pytest.raises(TraceError, match=r"Layer 'layers.3' runs on stage\(s\) none together in training"):
        followed(lambda net, x: net.layers[3](x @ net.layers[0].weight))


def test_a_tied_layer_runs_at_its_first_stage_that_is_not_before():
    net = Net(3, lambda net, x: net.layers[0](net.layers[2](net.layers[1](net.layers[0](x)))))
    board = switched(net)
    names = held_by_layers(net, board.layers)
    ownership = owners(trace_step(lambda: net(X), net, board, CPU), (0, 2, 4), names)
    late = trace_step(lambda: net.layers[0](net.layers[2](X)), net, board, CPU)
    early = trace_step(lambda: net.layers[2](net.layers[0](X)), net, board, CPU)
    assert follow(late, ownership, names, 2) == (0, 0, 2)
    assert follow(early, ownership, names, 2) == (0, 1, 2)
