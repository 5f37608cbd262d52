"""What a call costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pp.partition.cost import call_costs, time_call
from lightning_pp.partition.trace import trace_step

from .tracing import CPU, Row, switched, trace

X = torch.rand(6, 4)


def row() -> Row:
    return Row(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))


def costs(model: nn.Module, balance: str, **options):
    board = switched(model)
    found = trace_step(lambda: model(X), model, board, CPU, **options)
    return call_costs(found, board, balance)


def test_flops_of_forward_and_backward():
    flops, saved = costs(row(), "flops")
    forward = [2 * 6 * 4 * 8, 0, 2 * 6 * 8 * 2]
    assert flops == [2 * forward[0], 0, 3 * forward[2]]  # nobody asks for the gradient of the first input
    assert saved[1] == 6 * 8 * 4  # the ReLU keeps its result


def test_frozen_layers_cost_their_forward():
    model = row()
    model.blocks[0].requires_grad_(False)
    flops, saved = costs(model, "flops")
    assert flops[0] == 2 * 6 * 4 * 8
    assert flops[2] == 2 * (2 * 6 * 8 * 2)
    assert saved[0] == 0


def test_a_frozen_layer_hands_gradients_through():
    model = row()
    model.blocks[2].requires_grad_(False)
    assert costs(model, "flops")[0][2] == 2 * (2 * 6 * 8 * 2)


def test_without_flops_the_parameters_count():
    model = Row(nn.LayerNorm(4), nn.Tanh())
    assert costs(model, "flops")[0] == [8, 0]


def test_params_count_at_the_first_call():
    linear = nn.Linear(4, 4)
    model = Row(linear, nn.Tanh(), linear)
    assert costs(model, "params")[0] == [20, 0, 0]
    assert costs(model, "flops")[0][2] > 0


def test_memory_of_weights_gradients_and_two_optimizer_states():
    model = row()
    model.blocks[2].requires_grad_(False)
    model.blocks[0].double()
    model.glue = lambda net, x: x.to(net.blocks[0].weight.dtype) if x.shape[1] == 4 else x.float()
    weights, saved = costs(model, "memory")
    assert weights == [4 * 40 * 8, 0, 16 * 4]
    assert saved[0] == 6 * 4 * 8


def test_time_is_measured_once_for_each_call():
    asked = []

    def clock(layer, args, kwargs, device):
        asked.append((type(layer).__name__, tuple(args[0].shape), device))
        return float(len(asked))

    seconds, _ = costs(row(), "time", time_call=clock, twice=True)
    assert seconds == [1.0, 2.0, 3.0]
    assert asked == [("Linear", (6, 4), CPU), ("ReLU", (6, 8), CPU), ("Linear", (6, 8), CPU)]


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Identity()])
def test_timing_leaves_the_layer_alone(layer):
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    assert time_call(layer, (X,), {}, CPU) > 0
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_timing_of_a_layer_on_meta():
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    assert time_call(layer, (X,), {}, CPU) > 0
    assert layer.weight.is_meta


def test_saved_bytes_count_a_storage_once_and_no_weights():
    call = trace(Row(nn.Linear(4, 4)), X).calls[0]
    assert call.saved_bytes == 6 * 4 * 4
