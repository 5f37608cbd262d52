"""One test for each bug that was found, with its story."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_pp.partition.switch import Switchboard
from lightning_pp.partition.trace import TraceError

from .test_trace_steps import Routed
from .tracing import Net, Own, Row, called, lives, trace

X = torch.arange(8.0).reshape(2, 4)


def test_the_last_token_may_be_picked():
    """Indexing with whole numbers carries torch's tag for masks, and was refused as reading values."""

    def forward(net, x, last):
        return net.layers[1](net.layers[0](x)[torch.arange(2), :, last])

    found = trace(Net(2, forward), torch.rand(2, 4, 4), torch.tensor([1, 3]))
    assert lives(found) == [[], [0]]


@pytest.mark.parametrize("read", [lambda h: h.detach().numpy() * 2, lambda h: h.tolist()])
def test_numpy_and_lists_are_no_way_around(read):
    """``.numpy()`` and ``.tolist()`` run no operator: their values reached a later layer without crossing the cut."""
    with pytest.raises(TraceError, match=r"reads a value that comes from layer 'layers.0'"):
        trace(Net(2, lambda net, x: net.layers[1](torch.as_tensor(read(net.layers[0](x))))), X)


@pytest.mark.parametrize("initial", [0.0, None])
def test_an_auxiliary_loss_in_an_attribute(initial):
    """A loss that blocks leave in an attribute was taken for a constant: it was missing from the last stage's sum."""

    def block(own, x):
        own.aux = x.mean() * own.weight.sum()
        return x * own.weight

    class Model(Row):
        def forward(self, x):
            return super().forward(x).sum() + sum(block.aux for block in self.blocks)

    model = Model(Own(block), Own(block))
    for own in model.blocks:
        own.aux = initial
    with pytest.raises(TraceError, match=r"The step uses a tensor that layer 'blocks.0' has put aside.*test_bugs.py"):
        trace(model, X)


def test_an_auxiliary_loss_of_a_layer_that_depends_on_values():
    """The same for a layer that was run as an empty copy: the attribute appeared on the copy only."""

    def keep(own, out):
        own.aux = out.mean()
        own.all = [out.sum()]
        return out

    class Model(Row):
        def forward(self, x):
            return super().forward(x).sum() + self.blocks[0].aux

    model = Model(Routed(keep), nn.Linear(4, 4))
    model.blocks[0].aux = 0.0
    with pytest.raises(TraceError, match=r"'blocks.0' has put aside"):
        trace(model, X)
    assert model.blocks[0].aux == 0.0


def test_a_list_that_layers_add_to():
    """Layers got a copy of the list, so the step found it empty in the trace, and full of stale values later."""

    def block(own, x, losses):
        losses.append(x.mean())
        return x * own.weight

    class Model(Row):
        def __init__(self, use):
            super().__init__(Own(block), Own(block))
            self.use = use

        def forward(self, x):
            losses: list[Any] = []
            for own in self.blocks:
                x = own(x, losses)
            return x.sum() + (sum(losses) if self.use else 0)

    with pytest.raises(TraceError, match=r"'blocks.0' has put aside"):
        trace(Model(use=True), X)
    assert lives(trace(Model(use=False), X)) == [[], [0]]


@dataclasses.dataclass
class State:
    h: Any


class Plain:
    def __init__(self, h: Any) -> None:
        self.h = h


@pytest.mark.parametrize("kind", [State, Plain, lambda h: {"h": h}], ids=["dataclass", "object", "dict"])
def test_a_state_that_layers_change(kind):
    """Nothing is returned, everything happens inside of the argument: the second layer seemed to need nothing."""

    def block(own, state):
        if isinstance(state, dict):
            state["h"] = state["h"] * own.weight
        else:
            state.h = state.h * own.weight

    class Model(Row):
        def forward(self, x):
            state = kind(x)
            for own in self.blocks:
                own(state)
            return x

    with pytest.raises(TraceError, match=r"layer 'blocks.0' has put aside"):
        trace(Model(Own(block), Own(block)), X)


def test_values_that_validation_keeps():
    """Only training_step is traced twice; what a validation step collects was not live to its end, and was zeros."""

    def forward(net, x):
        h = net.layers[0](x)
        net.collected.append(h)
        return net.layers[2](net.layers[1](h)).sum()

    net = Net(3, forward)
    net.collected = []
    assert trace(net, X).end_needs == {(0, 0), (2, 0)}


def test_a_kept_value_that_decides():
    """A condition on the loss of the step before went unnoticed: stages would have taken different branches."""

    def forward(net, x):
        if net.last_loss is not None and net.last_loss.item() > 0.5:
            x = x * 2
        net.last_loss = net.layers[1](net.layers[0](x)).sum().detach()
        return net.last_loss

    net = Net(2, forward)
    net.last_loss = None
    with pytest.raises(TraceError, match=r"self.last_loss carries a value.*before its layers: .*test_bugs.py"):
        trace(net, X, twice=True)


def test_numbers_that_depend_on_values():
    """A layer that counts was run on made-up values, and their count went into the plan."""
    with pytest.raises(TraceError, match=r"Layer 'blocks.0' returns the int 2, and what it does depends on the values"):
        trace(Row(Routed(lambda own, out: (out, int((out > -1e9).all(1).sum())))), X)
    flag = trace(Row(Routed(lambda own, out: (out, None, "name"))), X)
    assert called(flag) == ["blocks.0"]


def test_a_parameter_of_another_layer_in_an_empty_copy():
    """An empty copy lost sight of the parameters it shares with the rest of the model."""
    embedding = nn.Linear(4, 4)
    head = Routed(lambda own, out: F.linear(out, own.other[0].weight))
    head.other = [embedding]
    before = embedding.weight.clone()
    found = trace(Row(embedding, head), X)
    assert found.calls[1].parameters == {"blocks.0.weight"}
    assert torch.equal(embedding.weight, before)


def test_a_parameter_that_python_reads():
    """A scale taken out by ``.item()`` left no source in the tensors; stages without it would have read 0."""

    class Model(Net):
        def __init__(self):
            super().__init__(2)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.layers[1](self.layers[0](x) * self.scale.item())

    found = trace(Model(), X)
    assert [call.parameters for call in found.calls] == [{"scale"}, {"scale"}]
    assert found.end_parameters == {"scale"}


def test_parameters_are_not_written_by_a_step():
    """An average of weights kept by the step itself would have been updated on the last stage only."""

    def forward(net, x):
        loss = net.layers[0](x).sum()
        with torch.no_grad():
            net.layers[1].weight.mul_(0.9).add_(net.layers[0].weight, alpha=0.1)
        return loss

    net = Net(2, forward)
    before = net.layers[1].weight.clone()
    with pytest.raises(TraceError, match=r"The step writes into parameter 'layers.1.weight': .*test_bugs.py"):
        trace(net, X)
    assert torch.equal(net.layers[1].weight, before)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_follow_layers(in_place):
    """A running center of outputs is right on the last stage alone; the trace says so."""

    class Model(Net):
        def __init__(self):
            super().__init__(2)
            self.register_buffer("center", torch.zeros(4))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            out = self.layers[0](x)
            self.steps += 1
            if in_place:
                self.center.lerp_(out.detach().mean(0), 0.1)
            else:
                self.center = self.center * 0.9 + out.detach().mean(0) * 0.1
            return self.layers[1](x).sum()

    model = Model()
    found = trace(model, X, twice=True)
    assert found.updated == {"center"}
    assert found.end_needs == {(0, 0), (1, 0)}
    assert torch.equal(model.center, torch.zeros(4))


def test_dicts_of_modules_are_not_layers():
    """An ``nn.ModuleDict`` in an ``nn.ModuleList`` was taken for a layer: never called, so nothing was cut."""
    blocks = nn.ModuleList(nn.ModuleDict({"linear": nn.Linear(4, 4), "act": nn.ReLU()}) for _ in range(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for block in self.blocks:
                x = block["act"](block["linear"](x))
            return x

    assert called(trace(Model(), X)) == ["blocks.0.linear", "blocks.1.linear"]


def test_a_class_that_registers_its_subclasses():
    """Switching made a subclass, which such a class refused, or took into its registry."""
    registry = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, key):
            registry.append(key)

    layer = Registered(4, 4)
    Switchboard({"layer": layer}).install()
    assert isinstance(layer, Registered)
    assert registry == []


class OwnReduce(nn.Linear):
    def __reduce__(self):
        return OwnReduce, (self.in_features, self.out_features)


def test_a_layer_with_its_own_way_of_being_copied():
    """A ``__reduce__`` that gives no state could not be unpacked."""
    layer = OwnReduce(4, 3)
    Switchboard({"layer": layer}).install()
    assert type(copy.deepcopy(layer)) is OwnReduce


def test_another_number_of_outputs_the_second_time():
    """... ended in an error of ``zip`` that explained nothing."""

    def block(own, x):
        own.calls = getattr(own, "calls", 0) + 1
        return (x * own.weight,) * own.calls

    with pytest.raises(TraceError, match="returns 1 tensors the first time the step runs, and then 2"):
        trace(Row(Own(block)), X, twice=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_batches_in_evaluation():
    """``nn.TransformerEncoder`` makes nested tensors of them, which have no sizes to plan with."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x, mask):
            return self.encoder(x, src_key_padding_mask=mask).sum()

    mask = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        found = trace(Model().eval(), torch.rand(2, 3, 8), mask)
    assert lives(found) == [[], [0]]
    assert torch.backends.mha.get_fastpath_enabled()


def test_packed_sequences_between_layers():
    """Their class cannot be built from anything but tensors, so that none could be taken apart."""
    rnns = [nn.LSTM(4, 4), nn.LSTM(4, 4)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnns = nn.ModuleList(rnns)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            for rnn in self.rnns:
                packed, _ = rnn(packed)
            return nn.utils.rnn.pad_packed_sequence(packed)[0].sum()

    found = trace(Model(), torch.rand(3, 2, 4), torch.tensor([2, 3]))
    assert [call.needs for call in found.calls] == [set(), {(0, 0)}]
    assert found.end_needs == {(1, 0)}
