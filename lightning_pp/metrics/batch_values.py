"""What torchmetrics' ``forward`` would have returned for a whole batch that runs in micro-batches.

A metric that is called in a step returns the value of the micro-batch. Few values of a batch are means of those of its
micro-batches (a root of a mean, an F1 score and an area under a curve are not), so every call is repeated on a copy
that holds nothing but the batch under way. Where a returned value is logged as it is, the copy's takes its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pp.partition import tree
from lightning_pp.runtime.groups import Replicas

__all__: list[str] = []


@dataclass(slots=True)
class Calls:
    """The calls of one metric in the batch under way.

    Attributes:
        copies: One for each call that a micro-batch makes.
        batch: The batch that they have seen.
        micro_batch: The micro-batch under way.
        number: How many calls that one has made.
    """

    copies: list[Metric] = field(default_factory=list)
    batch: int = -1
    micro_batch: int = -1
    number: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor comes from: a call of a metric, or (without a copy) a metric's ``compute``.

    Attributes:
        copy: Knows the call's value for the whole batch.
        leaf: Which of the value's tensors it is.
    """

    copy: Metric | None
    leaf: int


class BatchValues:
    """Follows the calls of metrics through the micro-batches of one batch.

    Args:
        copy_of: Makes an independent copy of a metric, which synchronises with nobody.
        replicas: The other pipelines.

    Attributes:
        is_running: Whether micro-batches are running (planning is not that).
        is_whole: Whether the batch is a single micro-batch.
        micro_batch: The number in the batch of the one under way.
    """

    def __init__(self, copy_of: Callable[[Metric], Metric], replicas: Replicas) -> None:
        self._copy_of = copy_of
        self._replicas = replicas
        self._batch = 0
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self.is_running = False
        self.is_whole = True
        self.micro_batch = 0

    def start(self, num_microbatches: int) -> None:
        """A batch begins."""
        self._batch += 1
        self._origins.clear()
        self.is_running = True
        self.is_whole = num_microbatches == 1

    def stop(self) -> None:
        """The batch has run."""
        self.is_running = False

    def called(self, metric: Metric, calls: Calls, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``metric(*args, **kwargs)`` has returned ``value``."""
        if self.is_whole and self._replicas.size == 1:
            return
        if calls.batch != self._batch:
            calls.batch, calls.micro_batch = self._batch, -1
            for copy in calls.copies:
                copy.reset()
        if calls.micro_batch != self.micro_batch:
            calls.micro_batch, calls.number = self.micro_batch, 0
        if calls.number == len(calls.copies):
            calls.copies.append(self._copy_of(metric))
        copy = calls.copies[calls.number]
        with torch.no_grad():
            copy.update(*args, **kwargs)
        calls.number += 1
        self._remember(value, copy)

    def computed(self, value: Any) -> None:
        """A metric's ``compute`` has returned ``value``, which covers the micro-batches so far."""
        self._remember(value, None)

    def origin(self, value: Tensor) -> Origin | None:
        """Which metric returned exactly this tensor; None where none did."""
        found = self._origins.get(id(value))
        return found[1] if found is not None and found[0]() is value else None

    def last_copy(self, calls: Calls) -> Metric | None:
        """What knows the last call's value for the batch; None where there was no call."""
        return calls.copies[calls.number - 1] if calls.batch == self._batch else None

    def evaluate(self, copies: Mapping[str, Metric]) -> dict[str, Any]:
        """The copies' values; over all replicas, where these have copies of the same names."""
        names = set(copies)
        values = {}
        if self._replicas.size > 1:
            names.intersection_update(*self._replicas.gather_objects(sorted(names)))
            for name in sorted(names):
                with synchronised(copies[name], self._replicas.group):
                    values[name] = copies[name].compute()
        return {name: values[name] if name in values else copy.compute() for name, copy in copies.items()}

    def _remember(self, value: Any, copy: Metric | None) -> None:
        for leaf, tensor in enumerate(tree.tensors_of(value)):
            # weakly: the value may hold the graph of its micro-batch
            self._origins[id(tensor)] = (weakref.ref(tensor), Origin(copy, leaf))


@contextmanager
def synchronised(metric: Metric, group: Any) -> Iterator[None]:
    """Let ``compute`` of ``metric``, and of the metrics inside it, gather over ``group`` in the block."""
    metrics = [module for module in metric.modules() if isinstance(module, Metric)]
    for inner in metrics:
        inner._computed = None  # that of this process alone
        inner.process_group, inner.distributed_available_fn = group, _always
    try:
        yield
    finally:
        for inner in metrics:
            alone(inner)


def alone(metric: Metric) -> None:
    """Keep ``metric`` from gathering what other processes have: by itself it would ask all of them."""
    metric.process_group, metric.distributed_available_fn = None, _never


def _always() -> bool:
    return True


def _never() -> bool:
    return False
