"""A trace leaves the model, the batch and every random state as they were."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import MeanMetric

from lightning_pp.partition import tree
from lightning_pp.partition.trace import TraceError, trace_step

from .tracing import CPU, Net, Own, Row, switched, trace

X = torch.arange(8.0).reshape(2, 4)


class Meter:
    """As in many training scripts."""

    def __init__(self) -> None:
        self.total, self.history = 0.0, []

    def update(self, value: float) -> None:
        self.total += value
        self.history.append(value)


def test_attributes():
    def forward(net, x):
        loss = net.layers[0](x).sum()
        net.count += 1
        net.losses.append(loss.detach())
        net.nested["a"]["b"].append(1)
        net.kinds.add(2)
        net.last.append(3)
        net.counter["x"] += 1
        net.meter.update(loss.item())
        net.layers[0].extra = x
        net.new = {"loss": loss}
        vars(net).pop("old", None)
        return loss

    net = Net(1, forward)
    net.count, net.losses, net.nested, net.kinds, net.old = 0, [], {"a": {"b": []}}, {1}, "old"
    net.last, net.counter, net.meter = deque([1, 2], maxlen=2), Counter(x=1), Meter()
    losses, inner = net.losses, net.nested["a"]["b"]
    trace(net, X, twice=True)
    assert (net.count, net.nested, net.kinds, net.old) == (0, {"a": {"b": []}}, {1}, "old")
    assert net.losses is losses
    assert losses == []
    assert net.nested["a"]["b"] is inner
    assert (net.last, net.counter) == (deque([1, 2]), Counter(x=1))
    assert vars(net.meter) == {"total": 0.0, "history": []}
    assert not hasattr(net, "new")
    assert not hasattr(net.layers[0], "extra")


def test_buffers_of_layers_and_of_glue():
    class Model(Row):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.norm = nn.BatchNorm1d(4, affine=False)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return super().forward(self.norm(x))

    model = Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trace(model, X, twice=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tensors_of_the_batch_and_of_metrics():
    metric = MeanMetric()
    metric.update(3.0)

    def forward(net, x):
        x[0].mul_(2)
        x += 1
        out = net.layers[0](x)
        net.metric.update(out.detach().sum())
        net.state += out.detach().sum()
        return out

    net = Net(1, forward)
    net.metric, net.state = metric, torch.ones(())
    state, x = net.state, X.clone()
    trace(net, x, twice=True)
    assert torch.equal(x, X)
    assert net.state is state
    assert state == 1
    assert metric.compute() == 3


def test_random_states():
    def forward(net, x):
        x = x + torch.rand(1) + random.random() + numpy.random.rand()
        x = x + net.own.random() + net.numpys.random() + torch.rand(1, generator=net.generator)
        return nn.functional.dropout(net.layers[0](x)).sum()

    net = Net(1, forward)
    net.own, net.numpys, net.generator = random.Random(1), numpy.random.default_rng(1), torch.Generator().manual_seed(1)

    def draw():
        draws = torch.rand(1), random.random(), numpy.random.rand(), net.own.random(), net.numpys.random()
        return [float(value) for value in (*draws, torch.rand(1, generator=net.generator))]

    def seed():
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        net.own.seed(1)
        net.generator.manual_seed(1)

    seed()
    expected = draw()
    seed()
    net.numpys = numpy.random.default_rng(1)
    trace(net, X, twice=True)
    assert draw() == expected


def test_gradients_flags_and_hooks():
    net = Net(2, lambda net, x: net.layers[1].requires_grad_(False)(net.layers[0](x)).sum())
    net.layers[0](X).sum().backward()
    net.layers[0].register_forward_hook(lambda *args: None)
    grads = [parameter.grad for parameter in net.parameters()]
    trace(net, X, twice=True)
    assert all(a is b for a, b in zip(grads, [parameter.grad for parameter in net.parameters()], strict=True))
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert len(net.layers[0]._forward_hooks) == 1


def test_no_fake_tensor_stays_in_a_layer():
    def forward(own, x):
        own.cache = x * own.weight
        return own.cache + 1

    net = Row(Own(forward), Own(forward))
    net.blocks[0].cache = None
    trace(net, X, twice=True)
    assert net.blocks[0].cache is None
    assert not hasattr(net.blocks[1], "cache")
    everything = [tree.tensors_of(dict(vars(module))) for module in net.modules()]
    assert not any(isinstance(tensor, FakeTensor) for tensors in everything for tensor in tensors)


def test_after_a_refusal_too():
    def forward(net, x):
        net.count = 1
        x += 1
        net.layers[0](x).item()

    net, x = Net(1, forward), X.clone()
    board = switched(net)
    with pytest.raises(TraceError):
        trace_step(lambda: net(x), net, board, CPU)
    assert not hasattr(net, "count")
    assert torch.equal(x, X)
    assert board.handler is None
    assert not {"numpy", "tolist"} & set(vars(torch.Tensor))


def test_stand_ins_are_gone():
    with torch.device("meta"):
        net = Net(2, lambda net, x: net.layers[1](net.layers[0](x) @ net.layers[1].weight))
    before = dict(net.named_parameters())
    trace(net, X)
    assert all(parameter is before[name] for name, parameter in net.named_parameters())
