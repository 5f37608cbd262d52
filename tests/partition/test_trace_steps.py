"""What a trace refuses to cut, how the step may be run, and what is kept from one step to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pp.partition.trace import TraceError
from lightning_pp.partition.tree import Slot

from .tracing import Net, Own, Row, called, lives, trace

X = torch.arange(8.0).reshape(2, 4)


@dataclasses.dataclass
class Carried:
    hidden: Any


# -- reading values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h.sum().item(),
        lambda h: h if h.sum() > 0 else -h,
        lambda h: h[h > 0.5],
        lambda h: h.detach().numpy(),
        lambda h: h.tolist(),
    ],
    ids=["item", "if", "mask", "numpy", "tolist"],
)
def test_reading_a_layer_before_the_last_one(read):
    def forward(net, x):
        h = net.layers[0](x)
        read(h)
        return net.layers[1](h)

    with pytest.raises(
        TraceError, match=r"comes from layer 'layers.0' while layer 'layers.1' is still to run"
    ) as error:
        trace(Net(2, forward), X)
    assert "test_trace_steps.py:" in str(error.value)

    def late(net, x):
        h = net.layers[0](x)
        net.layers[1](x)
        read(h)
        return h

    assert trace(Net(2, late), X).end_needs == {(0, 0)}


def test_values_of_the_batch_may_be_read():
    def forward(net, x, mask):
        if bool(mask.all()):
            x = net.layers[1](x)
        return net.layers[0](x[mask])

    assert called(trace(Net(2, forward), X, torch.tensor([True, True]))) == ["layers.1", "layers.0"]
    assert called(trace(Net(2, forward), X, torch.tensor([True, False]))) == ["layers.0"]


def test_picking_positions_is_no_reading():
    def forward(net, x, lengths):
        h = net.layers[0](x)
        return net.layers[1](h[torch.arange(2), lengths][:, None].expand(2, 4))

    assert lives(trace(Net(2, forward), X, torch.tensor([1, 3]))) == [[], [0]]


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_dropout_draws_and_attention_without_it_does_not():
    attention = Own(lambda own, x: F.scaled_dot_product_attention(x[None], x[None], x[None] * own.weight)[0])
    found = trace(Row(nn.Dropout(0.5), attention, nn.Linear(4, 4)), X)
    assert [call.draws for call in found.calls] == [True, False, False]


def test_draws_of_glue():
    assert trace(Net(1, lambda net, x: net.layers[0](x + torch.rand(1))), X).draws
    import random

    found = trace(Net(1, lambda net, x: net.layers[0](x + random.random())), X)
    assert (found.draws, found.draws_python) == (False, True)


# -- kinds of running --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(context):
    def forward(net, x):
        with context():
            h = net.layers[0](x)
            h += 1
            net.seen = h.is_inference()
            return net.layers[1](h).sum()

    assert lives(trace(Net(2, forward), X, twice=True)) == [[], [0]]


def test_autocast_gives_low_precision():
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net.layers[1](net.layers[0](x)).float().sum()

    assert [call.leaves[0].dtype for call in trace(Net(2, forward), X).calls] == [torch.bfloat16] * 2


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpoints_of_the_user(reentrant):
    def forward(net, x):
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.sum()

    assert lives(trace(Net(3, forward), X)) == [[], [0], [1]]


def test_compiled_layers():
    net = Net(2)
    net.layers[0].compile(backend="eager")
    assert lives(trace(net, X)) == [[], [0]]
    assert net.layers[0](X).shape == (2, 4)
    torch._dynamo.reset()


class Routed(nn.Module):
    """Sends the rows with a positive sum through its weight."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.extra = extra

    def forward(self, x):
        rows = (x.sum(1) > 0).nonzero()[:, 0]
        if len(rows) > 100 or x.mean().item() > 1e9:
            return x
        out = x.clone().index_add(0, rows, x[rows] * self.weight)
        return out if self.extra is None else self.extra(self, out)


def test_a_layer_that_depends_on_values():
    found = trace(Row(nn.Linear(4, 4), Routed(), nn.Linear(4, 4)), X)
    assert lives(found) == [[], [0], [1]]
    assert found.calls[1].leaves[0].shape == (2, 4)


def test_a_layer_that_fails_is_named():
    def fail(own, x):
        raise RuntimeError("out of luck")

    with pytest.raises(TraceError, match=r"Layer 'blocks.1' \(Own\) could not be planned.*out of luck"):
        trace(Row(nn.Linear(4, 4), Own(fail)), X)


def test_glue_that_fails_is_told():
    def forward(net, x):
        net.layers[0](x)
        raise KeyError("labels")

    with pytest.raises(TraceError, match=r"failed after layer 'layers.0' with KeyError: 'labels'"):
        trace(Net(1, forward), X)


# -- from one step to the next -----------------------------------------------------------------------------------------


def test_other_layers_the_second_time():
    def forward(net, x):
        net.count = getattr(net, "count", 0) + 1
        return net.layers[net.count % 2](x)

    with pytest.raises(TraceError, match="calls other layers the second time it runs"):
        trace(Net(2, forward), X, twice=True)
    net = Net(2, forward)
    assert called(trace(net, X)) == ["layers.1"]
    assert not hasattr(net, "count")


def test_a_hidden_state_that_is_carried_on():
    def forward(net, x):
        hidden = net.hidden.detach() if hasattr(net, "hidden") else x
        net.hidden = net.layers[0](x + hidden)
        return net.layers[1](net.hidden).sum()

    with pytest.raises(TraceError, match=r"self\.hidden carries a value.*into layer 'layers.0' of the next") as error:
        trace(Net(2, forward), X, twice=True)
    assert "Set it to None" in str(error.value)


def test_simple_lstm_of_lightning():
    from tests.models import LSTM

    with pytest.warns(UserWarning, match="dropout option"):
        model = LSTM()
    ids = torch.randint(0, 11, (2, 6))
    model.forward = lambda ids: model.training_step((ids, ids), 0)
    with pytest.raises(TraceError, match=r"self\.hidden carries a value"):
        trace(model, ids, twice=True)


@pytest.mark.parametrize("twice", [False, True])
def test_a_kept_value_lives_to_the_end(twice):
    def forward(net, x):
        net.hidden = net.layers[0](x)
        return net.layers[2](net.layers[1](net.hidden)).sum()

    found = trace(Net(3, forward), X, twice=twice)
    assert found.end_needs == {(0, 0), (2, 0)}
    assert lives(found) == [[], [0], [0, 1]]


def test_a_kept_value_may_be_read_at_the_end():
    def forward(net, x):
        h = net.layers[0](x)
        loss = net.layers[1](h).sum()
        previous = getattr(net, "previous", None)
        net.previous = h.detach()
        return loss if previous is None else loss + (previous - h).pow(2).mean()

    assert trace(Net(2, forward), X, twice=True).end_needs == {(0, 0), (1, 0)}


def test_a_thousand_calls_are_quick():
    import time

    from lightning_pp.partition.trace import Call, Leaf, Trace

    leaf = (Leaf((2, 4), torch.float32),)
    calls = tuple(
        Call("x", Slot(0), leaf, (), frozenset((j, 0) for j in range(max(0, i - 20), i)), frozenset(), False, 1, 1)
        for i in range(1000)
    )
    found = Trace(calls, frozenset({(999, 0)}), frozenset(), frozenset(), False, False)
    start = time.perf_counter()
    assert [found.bytes_at(call) for call in range(1000)] == [32 * min(call, 20) for call in range(1000)]
    assert time.perf_counter() - start < 2


# -- objects that layers share --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Carried, lambda h: {"h": h}], ids=["dataclass", "dict"])
def test_a_state_that_layers_change_and_return(kind):
    """A common style; without the return value, it is refused (see test_bugs)."""

    def block(own, state):
        if isinstance(state, dict):
            state["h"] = state["h"] * own.weight
        else:
            state.hidden = state.hidden * own.weight
        return state

    class Model(Row):
        def forward(self, x):
            state = super().forward(kind(x))
            return state["h"] if isinstance(state, dict) else state.hidden

    found = trace(Model(Own(block), Own(block)), X, twice=True)
    assert lives(found) == [[], [0]]
    assert found.end_needs == {(1, 0)}


def test_a_table_shared_by_layers_may_be_kept():
    """Rotary tables are made by the first layer and found by the others; they depend on nothing but sizes."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = None
            self.register_buffer("frequencies", torch.ones(4))

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(len(x), device=x.device).type_as(x)[:, None] * self.frequencies
            return x * self.table

    class Block(nn.Module):
        def __init__(self, rotary):
            super().__init__()
            self.linear, self.rotary = nn.Linear(4, 4), rotary

        def forward(self, x):
            return self.linear(self.rotary(x))

    rotary = Rotary()
    assert lives(trace(Row(Block(rotary), Block(rotary)), X, twice=True)) == [[], [0]]
    assert rotary.table is None
