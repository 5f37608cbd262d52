"""Puts the parts that the ranks hold together into one ordinary Lightning checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

__all__: list[str] = []

#: rank that assembles and writes
_WRITER = 0


def gather_state_dict(state_dict: Mapping[str, Any], provider: Callable[[str], int], group: Any) -> dict[str, Any]:
    """The whole model's state on rank 0; other ranks get their own part back.

    Args:
        state_dict: This rank's, with everything it does not hold on the meta device.
        provider: The global rank that holds a name.
        group: All ranks, for host memory.
    """
    rank = dist.get_rank()
    whole: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            whole[name] = value
            continue
        source = provider(name)
        if source == _WRITER or rank not in (source, _WRITER):
            whole[name] = value
        elif rank == source:
            dist.send(value.detach().cpu().contiguous(), _WRITER, group=group)
            whole[name] = value
        else:
            received = torch.empty(value.shape, dtype=value.dtype)
            dist.recv(received, source, group=group)
            whole[name] = received
    return whole


def gather_optimizer_state(optimizer: Optimizer, first_owner: Callable[[Tensor], int], group: Any) -> dict[str, Any]:
    """The whole optimizer's state dict on rank 0; other ranks get their own part back.

    Args:
        optimizer: With the same parameters in the same order on every rank.
        first_owner: The global rank whose state of a parameter counts.
        group: All ranks, for host memory.
    """
    rank, size = dist.get_rank(), dist.get_world_size(group)
    own = optimizer.state_dict()
    parameters = [parameter for param_group in optimizer.param_groups for parameter in param_group["params"]]
    mine = {
        index: state
        for index, state in own["state"].items()
        if not parameters[index].is_meta and first_owner(parameters[index]) == rank
    }
    described: list[Any] = [None] * size
    dist.all_gather_object(described, {index: _described(state) for index, state in mine.items()}, group=group)
    if rank != _WRITER:
        for state in mine.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    dist.send(value.detach().cpu().contiguous(), _WRITER, group=group)
        return own
    merged = {index: dict(state) for index, state in mine.items()}
    for source in range(size):
        if source != _WRITER:
            for index, description in described[source].items():
                merged[index] = {key: _received(value, source, group) for key, value in description.items()}
    return {**own, "state": dict(sorted(merged.items()))}


def load_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a whole optimizer's state and keep what belongs to parameters that are here.

    ``load_state_dict`` puts each state where its parameter is, so on the right device, or on the meta device.
    """
    optimizer.load_state_dict(state_dict)
    for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
        del optimizer.state[parameter]


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: ("tensor", tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ("value", value)
        for key, value in state.items()
    }


def _received(description: tuple[Any, ...], source: int, group: Any) -> Any:
    if description[0] == "value":
        return description[1]
    tensor = torch.empty(description[1], dtype=description[2])
    dist.recv(tensor, source, group=group)
    return tensor
