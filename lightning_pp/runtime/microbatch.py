"""A batch and its micro-batches: cutting, weighing, recognising, and putting results together again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.partition import tree

__all__: list[str] = []

_PLAIN = (type(None), bool, int, float, str)


def batch_size(batch: object) -> int | None:
    """Number of samples in ``batch``: the size that dim 0 of most of its tensors has.

    Where two sizes are equally frequent, the first tensor with two or more dims decides.

    Returns:
        None for a batch without a tensor that has a dim.

    Example:
        >>> batch_size({"positions": torch.arange(5), "x": torch.zeros(8, 5)})
        8
    """
    tensors = [tensor for tensor in tree.tensors_of(batch) if tensor.ndim]
    if not tensors:
        return None
    counts = Counter(tensor.shape[0] for tensor in tensors)
    most = max(counts.values())
    frequent = [tensor for tensor in tensors if counts[tensor.shape[0]] == most]
    return (next((tensor for tensor in frequent if tensor.ndim > 1), frequent[0])).shape[0]


def split(batch: object, num_microbatches: int) -> list[Any]:
    """Cut ``batch`` along dim 0 into at most ``num_microbatches`` parts whose sizes differ by at most one.

    Only tensors whose dim 0 is the batch size are cut; everything else stands in every part. Containers keep their type.
    A batch smaller than ``num_microbatches`` gives one part per sample.

    Example:
        >>> [part["x"].shape[0] for part in split({"x": torch.zeros(8, 2), "flag": True}, 3)]
        [3, 3, 2]
    """
    size = batch_size(batch)
    if not size or num_microbatches == 1:
        return [batch]
    tensors, structure = tree.flatten(batch)
    number = min(num_microbatches, size)
    pieces = [
        torch.tensor_split(tensor, number) if tensor.ndim and tensor.shape[0] == size else [tensor] * number
        for tensor in tensors
    ]
    return [tree.unflatten(list(part), structure) for part in zip(*pieces, strict=True)]


def signature(batch: object) -> tuple[Any, ...]:
    """What two micro-batches must share to be planned alike: structure, shapes, dtypes and plain values.

    Lists of as many plain values as there are samples (names, ids) are known by their type alone.
    """
    size = batch_size(batch)

    def of(value: object) -> Any:
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.dtype)
        return value if isinstance(value, _PLAIN) else type(value)

    def visit(value: object) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == size and not any(isinstance(v, Tensor) for v in value):
            return (type(value), len(value))
        if isinstance(value, (list, tuple)):
            return (type(value), *(visit(item) for item in value))
        if isinstance(value, dict):
            return (type(value), *((key, visit(item)) for key, item in value.items()))
        if isinstance(value, (Tensor, *_PLAIN)):
            return of(value)
        return (type(value), *(of(leaf) for leaf in tree.leaves(value)))

    return visit(batch)  # type: ignore[no-any-return]


def checksum(batch: object, device: torch.device) -> Tensor:
    """A number that differs where two stages hold different batches, or the same samples in another order.

    Returns:
        A float64 scalar on ``device``; computed without synchronising.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for position, tensor in enumerate(tree.tensors_of(batch), start=1):
        if tensor.numel() == 0 or tensor.is_complex():
            continue
        rows = tensor.detach().reshape(max(1, tensor.shape[0] if tensor.ndim else 1), -1).sum(1, dtype=torch.float64)
        ramp = torch.arange(1, rows.shape[0] + 1, dtype=torch.float64, device=rows.device)
        total = total + (position * torch.nan_to_num(rows, posinf=0.0, neginf=0.0).dot(ramp)).to(device)
    return total


def join(outputs: Sequence[Any], sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
    """One result from the results of all micro-batches, as the whole batch would have given it.

    Tensors and lists with one row per sample are joined along dim 0; numbers and tensors without dims become the mean
    by ``weights``; of anything else the last one stands.
    """
    if len(outputs) == 1:
        return outputs[0]
    per_part = [tree.leaves(output) for output in outputs]
    if len({len(part) for part in per_part}) != 1:
        return outputs[-1]
    joined = iter([_join_leaf(leaves, sizes, weights) for leaves in zip(*per_part, strict=True)])
    return tree.map_leaves(lambda leaf: next(joined), outputs[-1])


def _join_leaf(leaves: Sequence[Any], sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if all(leaf.ndim and leaf.shape[0] == size for leaf, size in zip(leaves, sizes, strict=True)):
            return torch.cat(list(leaves))
        if all(leaf.ndim == 0 and leaf.is_floating_point() for leaf in leaves):
            return weighted_mean(leaves, weights)
    if all(isinstance(leaf, float) for leaf in leaves):
        return sum(leaf * weight for leaf, weight in zip(leaves, weights, strict=True))
    return leaves[-1]


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of scalar tensors by ``weights`` (which sum to 1), in the values' dtype, computed in float64."""
    if len(values) == 1:
        return values[0]
    total = torch.stack([value.detach().double() for value in values])
    factors = torch.tensor(weights, dtype=torch.float64, device=total.device)
    return total.dot(factors).to(values[0].dtype)
