"""What a trace says of a step, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_pp.partition.trace import Argument, TraceError
from lightning_pp.partition.tree import Slot

from .tracing import Net, Own, Row, called, lives, trace

X = torch.arange(8.0).reshape(2, 4)


# -- calls, needs and live sets ----------------------------------------------------------------------------------------


def test_a_chain():
    found = trace(Net(3), X)
    assert called(found) == ["layers.0", "layers.1", "layers.2"]
    assert [call.needs for call in found.calls] == [set(), {(0, 0)}, {(1, 0)}]
    assert lives(found) == [[], [0], [1]]
    assert found.end_needs == {(2, 0)}
    assert found.layers == ("layers.0", "layers.1", "layers.2")
    assert found.calls[0].leaves[0].shape == (2, 4)
    assert found.bytes_at(1) == 2 * 4 * 4
    assert not found.draws
    assert not found.draws_python


def test_a_skip_is_live_until_its_last_use():
    def forward(net, x):
        a, b, c, d = net.layers
        first = a(x)
        return d(c(b(first)) + first)

    assert lives(trace(Net(4, forward), X)) == [[], [0], [0, 1], [0, 2]]


def test_long_skips():
    def forward(net, x):
        skips = []
        for layer in net.layers[:3]:
            x = layer(x)
            skips.append(x)
        for layer in net.layers[3:]:
            x = layer(x * skips.pop())
        return x

    assert lives(trace(Net(6, forward), X)) == [[], [0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4]]


def test_encoder_output_goes_to_every_decoder_layer():
    def forward(net, x):
        memory = net.layers[1](net.layers[0](x))
        y = net.layers[2](x + memory)
        y = net.layers[3](y + memory)
        return net.layers[4](y + memory)

    assert lives(trace(Net(5, forward), X)) == [[], [0], [1], [1, 2], [1, 3]]


def test_what_the_loss_uses_is_live_to_the_end():
    def forward(net, x):
        a = net.layers[0](x)
        return net.layers[2](net.layers[1](a)).sum() + a.pow(2).sum()

    assert lives(trace(Net(3, forward), X)) == [[], [0], [0, 1]]


def test_a_layer_called_twice_is_two_calls():
    found = trace(Net(2, lambda net, x: net.layers[0](net.layers[1](net.layers[0](x)))), X)
    assert called(found) == ["layers.0", "layers.1", "layers.0"]
    assert found.layers == ("layers.0", "layers.1")


def test_a_batch_value_is_no_need():
    found = trace(Net(2, lambda net, x: net.layers[1](net.layers[0](x) + x.cumsum(0))), X)
    assert lives(found) == [[], [0]]


@st.composite
def graphs(draw):
    """For each layer, and for the end, the earlier layers it adds up."""
    count = draw(st.integers(1, 7))
    return [draw(st.sets(st.integers(0, number - 1)) if number else st.just(set())) for number in range(count + 1)]


@given(graphs())
@settings(deadline=None, max_examples=40)
def test_live_sets_of_any_graph(graph):
    *inputs, end = graph

    def forward(net, x):
        outputs = []
        for layer, needed in zip(net.layers, inputs, strict=True):
            outputs.append(layer(x + sum(outputs[number] for number in needed)))
        return sum(outputs[number] for number in end) + x

    found = trace(Net(len(inputs), forward), X)
    expected = [
        [output for output in range(cut) if output in end or any(output in later for later in inputs[cut:])]
        for cut in range(len(inputs))
    ]
    assert lives(found) == expected
    assert [found.bytes_at(cut) for cut in range(len(inputs))] == [32 * len(live) for live in expected]


# -- parameters in glue ------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.position = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        x = self.layers[0](x)
        x = self.layers[1](x + self.position.view(1, 4) + self.table)
        x = self.layers[2](x + x.new_zeros(4) + self.unused.new_ones(4))
        return F.linear(x, self.layers[0].weight).sum() * self.scale


def test_who_consumes_a_parameter_in_glue_needs_it():
    found = trace(Positions(), X)
    assert [call.parameters for call in found.calls] == [set(), {"position", "table"}, set()]
    assert found.end_parameters == {"layers.0.weight", "scale"}
    assert found.touched == {"position", "table", "unused", "layers.0.weight", "scale"}


def test_parameters_on_meta_trace_like_real_ones():
    real = trace(Positions(), X)
    with torch.device("meta"):
        absent = Positions()
    assert trace(absent, X) == real
    assert all(parameter.is_meta for parameter in absent.parameters())


def test_meta_and_real_transformer_blocks_cost_the_same():
    def make():
        return Row(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))

    with torch.device("meta"):
        absent = make()
    x = torch.rand(2, 3, 8)
    real = trace(make(), x)
    assert trace(absent, x) == real
    assert all(call.draws and call.flops > 0 and call.saved_bytes > 0 for call in real.calls)


def test_parameters_of_another_layer_used_inside_a_layer():
    embedding = nn.Linear(4, 4)
    head = Own(lambda own, x: F.linear(x, embedding.weight) * own.weight)
    found = trace(Row(embedding, head), X)
    assert found.calls[1].parameters == {"blocks.0.weight"}


# -- in place and views ------------------------------------------------------------------------------------------------


def test_writing_into_an_output_is_noted():
    def forward(net, x):
        h = net.layers[0](x)
        h += 1
        view = net.layers[1](h).view(-1)
        view[0].mul_(2)
        return net.layers[2](view.view(2, 4))

    found = trace(Net(3, forward), X)
    assert [call.leaves[0].written for call in found.calls] == [True, True, False]
    assert lives(found) == [[], [0], [1]]


def test_writing_one_output_into_another():
    def forward(net, x):
        a, b = net.layers[0](x), net.layers[1](x)
        a[0] = b[0]
        return net.layers[2](a)

    assert lives(trace(Net(3, forward), X)) == [[], [0], [0, 1]]


def test_a_layer_that_writes_into_its_argument():
    found = trace(Row(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), X)
    relu = found.calls[1]
    assert relu.writes == (0,)
    assert relu.structure == Argument(0, True)
    assert [leaf.shape for leaf in relu.leaves] == [(2, 4)]
    assert [call.leaves[0].written for call in found.calls] == [True, False, False]
    assert lives(found) == [[], [0], [1]]  # the old value is gone behind the ReLU


def test_a_layer_that_writes_into_a_part_of_its_argument():
    def forward(own, x):
        x[:, 0].mul_(2)

    def glue(net, x):
        net.kept = x if x is not None else net.kept
        return net.kept

    found = trace(Row(nn.Linear(4, 4), Own(forward), nn.Linear(4, 4), glue=glue), X)
    assert found.calls[1].writes == (0,)
    assert found.calls[2].needs == {(1, 0)}


# -- structures --------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Carried:
    hidden: Any
    note: str = "text"


class Opaque:
    """Nothing that anybody has registered."""


@pytest.mark.parametrize(
    ("forward", "structure"),
    [
        (lambda own, x: x * own.weight, Slot(0)),
        (lambda own, x: {"a": x * own.weight, "b": [None, True, 3]}, {"a": Slot(0), "b": [None, True, 3]}),
        (lambda own, x: Pair(x * own.weight, x), Pair(Slot(0), Argument(0, True))),
        (lambda own, x: Carried(x * own.weight), Carried(Slot(0))),
        (lambda own, x: (x > 0, x.shape, x.dtype, 2.5), (Slot(0), torch.Size([2, 4]), torch.float32, 2.5)),
        (lambda own, x: x, Argument(0, True)),
        (lambda own, x: None, None),
    ],
)
def test_structures_of_outputs(forward, structure):
    assert trace(Row(Own(forward)), X).calls[0].structure == structure


def test_an_object_that_is_passed_through():
    opaque = Opaque()
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Own(lambda own, x, other, flag: (x * own.weight, other, flag))

        def forward(self, x):
            x, other, flag = self.layer(x, opaque, flag=True)
            seen.append((other, flag))
            return x

    assert trace(Model(), X).calls[0].structure == (Slot(0), Argument(1, False), True)
    assert seen == [(opaque, True)]


def test_passing_through_keeps_the_source():
    found = trace(Row(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)), X)
    assert found.calls[2].needs == {(0, 0)}
    assert found.calls[1].leaves == ()


def test_an_object_of_an_unknown_class_is_refused():
    with pytest.raises(TraceError, match=r"Layer 'blocks.0' returns a .*test_trace.*Opaque, which cannot cross"):
        trace(Row(Own(lambda own, x: (x, Opaque()))), X)


def test_bool_and_int_outputs_keep_their_dtype():
    found = trace(Row(Own(lambda own, x: (x > 0, x.long(), x.bfloat16(), x.to(torch.complex64)))), X)
    assert [leaf.dtype for leaf in found.calls[0].leaves] == [
        torch.bool,
        torch.int64,
        torch.bfloat16,
        torch.complex64,
    ]
