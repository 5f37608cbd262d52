"""What each layer call of a trace costs, in the unit that the cut is balanced by."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition import tree
from lightning_pp.partition.calls import Trace
from lightning_pp.partition.switch import Switchboard

__all__: list[str] = []

#: timed runs of each layer; the median counts
_REPEATS = 5
#: weights, gradients and two optimizer states
_COPIES = 4


def call_costs(trace: Trace, board: Switchboard, balance: str) -> tuple[list[float], list[float]]:
    """The cost of each call, and the bytes that each saves for its backward.

    Args:
        trace: The step.
        board: The layers.
        balance: ``"flops"`` (forward once, backward as often as it computes a gradient), ``"params"`` (elements),
            ``"time"`` (seconds of forward and backward, as timed in the trace) or ``"memory"`` (bytes of weights,
            gradients and two optimizer states; a layer called twice counts at its first call).
    """
    saved = [float(call.saved_bytes) for call in trace.calls]
    if balance == "time":
        return [call.seconds for call in trace.calls], saved
    if balance == "flops":
        weights = _passes(trace, board)
        flops = [float(call.flops * weight) for call, weight in zip(trace.calls, weights, strict=True)]
        return (flops if sum(flops) else _elements(trace, board)), saved
    if balance == "params":
        return _elements(trace, board), saved
    assert balance == "memory", f"checked by the constructor: {balance}"
    sizes = [
        float(sum(p.nbytes * (_COPIES if p.requires_grad else 1) for p in board.layers[call.layer].parameters()))
        for call in trace.calls
    ]
    return _at_first_call(trace, sizes), saved


def _passes(trace: Trace, board: Switchboard) -> list[int]:
    """1 for the forward, 1 for the gradient of the weights, 1 for the gradient of the input, where each is needed."""
    carries: list[bool] = []
    weights = []
    for call in trace.calls:
        from_input = any(carries[index] for index, _ in call.needs) or bool(call.parameters)
        trains = any(p.requires_grad for p in board.layers[call.layer].parameters())
        weights.append(1 + trains + from_input)
        carries.append(trains or from_input)
    return weights


def _elements(trace: Trace, board: Switchboard) -> list[float]:
    sizes = [float(sum(p.numel() for p in board.layers[call.layer].parameters())) for call in trace.calls]
    return _at_first_call(trace, sizes)


def _at_first_call(trace: Trace, sizes: list[float]) -> list[float]:
    seen: set[str] = set()
    counted = []
    for call, size in zip(trace.calls, sizes, strict=True):
        counted.append(0.0 if call.layer in seen else size)
        seen.add(call.layer)
    return counted


def time_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> float:
    """Median seconds of forward and backward of ``layer`` (see :func:`time_passes`)."""
    return statistics.median(map(sum, time_passes(layer, args, kwargs, device)))


def time_passes(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, at_least: float = 0.0
) -> list[tuple[float, float]]:
    """Seconds of the forward and of the backward of an empty copy of ``layer``, timed a few times.

    Args:
        layer: The layer, anywhere (on meta too).
        args: Real tensors of the right shapes; those that require a gradient get one.
        kwargs: The same.
        device: Where to run.
        at_least: Seconds to spend on it: short layers are timed more often.
    """
    layer = copy.deepcopy(layer).to_empty(device=device)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, -0.02, 0.02)
        else:
            nn.init.zeros_(tensor)
    times: list[tuple[float, float]] = []
    while len(times) <= _REPEATS or sum(map(sum, times)) < at_least:
        own_args, own_kwargs = tree.map_leaves(_copied, (args, kwargs))
        _wait(device)
        start = time.perf_counter()
        outputs = tree.tensors_of(layer(*own_args, **own_kwargs))
        _wait(device)
        forward = time.perf_counter() - start
        roots = [output for output in outputs if output.requires_grad]
        grads = [torch.ones_like(root) for root in roots]
        _wait(device)
        start = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, grads)
        _wait(device)
        times.append((forward, time.perf_counter() - start))
    return times[1:]


def _copied(leaf: Any) -> Any:
    """A copy that the layer may write into, and that gets a gradient where the original would."""
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().clone()
    return copied.requires_grad_().clone() if leaf.requires_grad else copied


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
