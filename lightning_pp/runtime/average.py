"""Gradients summed over replicas, in buckets, once per optimizer step.

Losses are weighted by their share in the union of all replicas' batches, so a sum is the average. The buckets start as
soon as this rank's last backward is done, and are under way while the other stages of the pipeline finish theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pp.runtime.comm import losing_peers

__all__: list[str] = []

#: size of a bucket: large enough to keep a link busy, small enough for several to be under way
_BUCKET_BYTES = 25 * 2**20


class GradientAverage:
    """Sums the gradients of one rank's parameters over all replicas.

    Args:
        parameters: The parameters this rank owns, in the same order on all replicas.
        group: This position in all pipelines.
        tied: ``{index into parameters: group}`` of those that several stages own: their owners in all pipelines. These
            are summed together, so that all copies get the same bits.
        first: Which of the tied ones this rank is the first owner of.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Any, tied: Mapping[int, Any], first: frozenset[int]
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._tied = dict(tied)
        self._first = first
        self._under_way: list[_Bucket] = []

    def start(self) -> None:
        """Begin with the gradients that no other stage adds to."""
        free = [p for index, p in enumerate(self._parameters) if index not in self._tied and p.requires_grad]
        self._under_way += [_Bucket(parameters, self._group) for parameters in _buckets(free)]

    def finish(self) -> None:
        """Sum the tied ones, which must have been summed over stages, and wait for all."""
        by_group: dict[Any, list[int]] = {}
        for index, group in self._tied.items():
            if self._parameters[index].requires_grad:
                by_group.setdefault(group, []).append(index)
        for group, indices in by_group.items():
            adds = {id(self._parameters[index]) for index in indices if index in self._first}
            for parameters in _buckets([self._parameters[index] for index in indices]):
                self._under_way.append(_Bucket(parameters, group, adds))
        for bucket in self._under_way:
            bucket.finish()
        self._under_way.clear()


class _Bucket:
    """Gradients that travel as one tensor, followed by one number each that says how many replicas have one.

    Args:
        parameters: Of one dtype and device.
        group: Whose gradients are summed.
        adds: Ids of those that this rank adds its gradient of; None for all.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Any, adds: set[int] | None = None) -> None:
        self._parameters = parameters
        pieces = [
            p.grad if p.grad is not None and (adds is None or id(p) in adds) else torch.zeros_like(p)
            for p in parameters
        ]
        has = [float(p.grad is not None) for p in parameters]
        counts = torch.tensor(has, dtype=pieces[0].dtype, device=pieces[0].device)
        self._flat = torch.cat([*(piece.detach().reshape(-1) for piece in pieces), counts])
        wire = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
        self._work = group.allreduce([wire])

    def finish(self) -> None:
        """Wait, and put the sums into ``.grad``; what no replica has a gradient for keeps none."""
        with losing_peers():
            self._work.wait()
        sizes = [parameter.numel() for parameter in self._parameters]
        *sums, counts = torch.split(self._flat, [*sizes, len(sizes)])
        # a rank that has a gradient knows the answer; only one without has to look
        wanted = (
            [True] * len(sizes) if all(p.grad is not None for p in self._parameters) else (counts.abs() > 0).tolist()
        )
        for parameter, total, is_wanted in zip(self._parameters, sums, wanted, strict=True):
            if not is_wanted:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(total.view_as(parameter))


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """``parameters`` in runs of one dtype and device that are at most a bucket large."""
    open_runs: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[nn.Parameter]] = []
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        if key in open_runs and sizes[key] + size > _BUCKET_BYTES:
            closed.append(open_runs.pop(key))
        if key not in open_runs:
            open_runs[key], sizes[key] = [], 0
        open_runs[key].append(parameter)
        sizes[key] += size
    return closed + list(open_runs.values())
