"""A batch and its micro-batches: cutting, weighing, recognising, and putting results together again."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_pp.partition import tree

__all__: list[str] = []

_PLAIN = (type(None), bool, int, float, str)
#: how many numbers of a tensor a checksum looks at
_SAMPLED = 2**15

#: how deep inside of an object tensors are looked for
_DEPTH = 3


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

    Only tensors whose dim 0 is the batch size are cut; everything else stands in every part. Containers keep their
    type. A batch smaller than ``num_microbatches`` gives one part per sample.

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


def sizes(batch: object, num_parts: int) -> list[int | None]:
    """How many samples each of the parts has that :func:`split` makes of ``batch``.

    Example:
        >>> sizes({"x": torch.zeros(8, 2), "flag": True}, 3)
        [3, 3, 2]
    """
    size = batch_size(batch)
    if not size or num_parts == 1:
        return [size]
    return [size // num_parts + (index < size % num_parts) for index in range(num_parts)]


def signature(batch: object) -> tuple[Any, ...]:
    """What two micro-batches must share to be planned alike: structure, shapes, dtypes and plain values.

    Lists of as many plain values as there are samples (names, ids) are known by their type and length alone, and
    objects that are neither containers nor plain values by their type and the tensors that they hold. Of an array of
    numpy only shape and dtype count.
    """
    return _signature(batch, batch_size(batch))


def _signature(value: object, size: int | None) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, _PLAIN):
        # a NaN differs from itself, and True equals 1
        return (type(value), value if value == value else "nan")
    if isinstance(value, (list, tuple)):
        if len(value) == size and all(isinstance(item, _PLAIN) for item in value):
            return (type(value), len(value))
        return (type(value), *(_signature(item, size) for item in value))
    if isinstance(value, Mapping):
        return (type(value), *((key, _signature(item, size)) for key, item in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return (type(value), *((name, _signature(getattr(value, name, None), size)) for name in names))
    if isinstance(value, np.ndarray):
        return (type(value), value.shape, value.dtype.str)
    found = tree.tensors_of(value) or _held(value, _DEPTH)
    return (type(value), *((tuple(leaf.shape), leaf.dtype) for leaf in found))


def _held(value: object, depth: int) -> list[Tensor]:
    """The tensors in the attributes of an object that is no container: a batch class of the user, or of a library."""
    if depth == 0 or isinstance(value, type) or not (hasattr(value, "__dict__") or hasattr(type(value), "__slots__")):
        return []
    slots = (name for cls in type(value).__mro__ for name in _slots(cls))
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(
        getattr(value, "__dict__", {})
    )
    leaves = [leaf for name in sorted(attributes) for leaf in tree.leaves(attributes[name])]
    return [tensor for leaf in leaves for tensor in ([leaf] if isinstance(leaf, Tensor) else _held(leaf, depth - 1))]


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def checksum(batch: object, device: torch.device) -> Tensor:
    """A number that differs where two stages hold different batches, or the same samples in another order.

    Of large tensors it looks at some numbers of each row, at the same places on all stages. Objects are opened as far
    as :func:`signature` opens them. Plain numbers count, as they may decide what a step does, but no strings: paths may
    differ between machines.

    Returns:
        A float64 scalar on ``device``; computed without synchronising.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    leaves = tree.leaves(batch)
    for position, tensor in enumerate(_all_tensors(leaves), start=1):
        if tensor.numel() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
            continue
        rows = _sample(tensor.detach()).sum(1, dtype=torch.float64)
        ramp = torch.arange(1, rows.shape[0] + 1, dtype=torch.float64, device=rows.device)
        total = total + (position * torch.nan_to_num(rows, posinf=0.0, neginf=0.0).dot(ramp)).to(device)
    numbers = [leaf for leaf in leaves if isinstance(leaf, (bool, int, float))]
    if not numbers:
        return total
    digest = zlib.crc32(repr(numbers[:_SAMPLED]).encode()) / 2**32
    return total * (1.0 + digest) + digest


def _all_tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``leaves``, those in objects that are no containers too, and of arrays a part."""
    found = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            part = leaf.reshape(-1)[:: -(-leaf.size // _SAMPLED) or 1]
            found.append(torch.from_numpy(part.astype(np.float64)))
        elif not isinstance(leaf, _PLAIN):
            found += _held(leaf, _DEPTH)
    return found


def _sample(tensor: Tensor) -> Tensor:
    """All numbers of a small tensor in rows, and of a large one some of each row: it costs time in every step."""
    rows = tensor.reshape(max(1, tensor.shape[0] if tensor.ndim else 1), -1)
    step = -(-tensor.numel() // _SAMPLED)
    return rows[:: -(-step // rows.shape[1])] if step >= rows.shape[1] else rows[:, ::step]


def join(outputs: Sequence[Any], sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
    """One result from the results of all micro-batches, as the whole batch would have given it.

    Tensors and lists with one row or item per sample are joined along dim 0; numbers and tensors without dims become
    the mean by ``weights``; of anything else the last one stands. A list of as many tensors as there are samples, each
    with one row per sample, is taken for a few results that stand side by side, and so is every tuple.

    Example:
        >>> join([{"ids": ["a", "b"], "loss": 1.0}, {"ids": ["c"], "loss": 4.0}], [2, 1], [2 / 3, 1 / 3])
        {'ids': ['a', 'b', 'c'], 'loss': 2.0}
    """
    if len(outputs) == 1:
        return outputs[0]
    if _are_rows(outputs, sizes):
        return [item for output in outputs for item in output]
    opened = [_open(output) for output in outputs]
    last, build = opened[-1]
    if build is None:
        return _join_leaf(outputs, sizes, weights)
    if any(type(output) is not type(outputs[-1]) for output in outputs) or any(
        children.keys() != last.keys() for children, _ in opened
    ):
        return outputs[-1]
    return build({key: join([children[key] for children, _ in opened], sizes, weights) for key in last})


def _are_rows(outputs: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Whether ``outputs`` are lists with one item per sample."""
    if not all(type(output) is list for output in outputs):
        return False
    if any(len(output) != size for output, size in zip(outputs, sizes, strict=True)):
        return False
    tensors = [(t, size) for output, size in zip(outputs, sizes, strict=True) for t in tree.tensors_of(output)]
    return not tensors or any(t.ndim == 0 or t.shape[0] != size for t, size in tensors)


def _open(value: Any) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any] | None]:
    """The items of a container by key and what builds one like it; None for a leaf."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if not (len(children) == 1 and children[0] is value):
        keys = list(value) if isinstance(value, Mapping) else range(len(children))
        return dict(zip(keys, children, strict=True)), lambda new: pytree.tree_unflatten(list(new.values()), spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names}, partial(_with_fields, value)
    if isinstance(value, Mapping):
        return dict(value), partial(_with_items, value)
    return {}, None


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    new = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(new, name, item)  # a frozen dataclass refuses setattr, and its copy is ours alone
    return new


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    new = copy.copy(value)
    for key, item in items.items():
        new[key] = item
    return new


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
    """The mean of one-element tensors by ``weights`` (which sum to 1), in the values' dtype, computed in float64."""
    if len(values) == 1:
        return values[0]
    total = torch.stack([value.reshape(()) for value in values]).detach().double()
    factors = torch.tensor(weights, dtype=torch.float64, device=total.device)
    return total.dot(factors).to(values[0].dtype).reshape(values[0].shape)
