"""Logged values over replicas: each pipeline has logged what its own batch gave; all get that of the union."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.runtime.groups import Replicas
from lightning_pp.runtime.microbatch import weighted_mean
from lightning_pp.steps.logs import reduction_of

__all__: list[str] = []

Log = tuple[str, Tensor, dict[str, Any]]
"""``(name, value, options)`` as ``self.log`` takes them."""


def over_replicas(logs: Sequence[Log], replicas: Replicas, weight: float, size: int, device: torch.device) -> list[Log]:
    """Merge what all replicas have logged in one step; the same bits on every rank.

    Where all log the same names, values travel as one tensor on the device; otherwise as objects, which takes longer.

    Args:
        logs: This replica's.
        replicas: All of them.
        weight: What this replica's batch weighs in a mean.
        size: Its number of samples.
        device: Where values travel.
    """
    rows = replicas.gather([_fingerprint(logs), weight, float(size)])
    if any(row[0] != rows[0][0] for row in rows):
        everyone = replicas.gather_objects([(name, value.cpu(), options) for name, value, options in logs])
    elif not logs:
        return []
    else:
        everyone = _travelled(logs, replicas, device)
    grouped: dict[tuple[str, int], list[tuple[int, Log]]] = {}
    for replica, own in enumerate(everyone):
        names = [name for name, _, _ in own]
        for position, log in enumerate(own):  # a name may be logged several times
            grouped.setdefault((log[0], names[:position].count(log[0])), []).append((replica, log))
    return [_merged(shares, [row[1] for row in rows], [row[2] for row in rows]) for shares in grouped.values()]


def _fingerprint(logs: Sequence[Log]) -> float:
    """A number that differs where anything but values and batch sizes does; exact in float64."""
    described = [
        (name, str(value.dtype), {key: _described(key, option) for key, option in options.items()})
        for name, value, options in logs
    ]
    digest = hashlib.blake2b(pickle.dumps(described), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))


def _described(key: str, option: Any) -> str:
    if key == "batch_size":
        return str(option is not None)
    return getattr(option, "__qualname__", None) or repr(option)


def _travelled(logs: Sequence[Log], replicas: Replicas, device: torch.device) -> list[list[Log]]:
    """All replicas' logs, where they differ from this one's by values and batch sizes alone."""
    values = torch.stack([value.detach().to(device, torch.float64) for _, value, _ in logs])
    sizes = [[0.0] * len(logs)] * replicas.size
    if any(options.get("batch_size") is not None for _, _, options in logs):
        sizes = replicas.gather([float(options.get("batch_size") or 0) for _, _, options in logs])
    return [
        [
            (name, row[i].to(value.dtype), _with_size(options, int(sizes[replica][i])))
            for i, (name, value, options) in enumerate(logs)
        ]
        for replica, row in enumerate(replicas.gather_tensors(values))
    ]


def _with_size(options: dict[str, Any], size: int) -> dict[str, Any]:
    return options if options.get("batch_size") is None else {**options, "batch_size": size}


def _merged(shares: Sequence[tuple[int, Log]], weights: Sequence[float], sizes: Sequence[float]) -> Log:
    """One log from those of the replicas that have made it."""
    _, (name, value, options) = shares[-1]
    values = [log[1] for _, log in shares]
    combine: Callable[[Tensor], Tensor] | None = reduction_of(options)
    if combine is not None:
        value = combine(torch.stack(values))
    else:
        counted = [
            (own, weights[replica]) for (replica, _), own in zip(shares, values, strict=True) if weights[replica]
        ]
        total = sum(weight for _, weight in counted)
        if counted:
            floats = [own if own.is_floating_point() else own.to(torch.get_default_dtype()) for own, _ in counted]
            value = weighted_mean(floats, [weight / total for _, weight in counted])
    own_sizes = [log[2].get("batch_size") for _, log in shares]
    size = sum(int(sizes[r]) if own is None else int(own) for (r, _), own in zip(shares, own_sizes, strict=True))
    return name, value, {**options, "batch_size": size, "sync_dist": False}
