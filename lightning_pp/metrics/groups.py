"""Compute groups of a ``MetricCollection``, found by a whole batch.

A collection updates metrics whose states are equal as one, and finds them by comparing states after its first update.
After a micro-batch of few samples, states are more often equal by chance than after a batch (top-1 and top-2 accuracy
of one sample are), and the metrics would then be taken for one for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torchmetrics import MetricCollection

__all__: list[str] = []


@contextmanager
def groups_of_whole_batches(module: nn.Module, num_microbatches: int) -> Iterator[None]:
    """Let collections in ``module`` that are updated in the block look for groups at its end."""
    waiting = []
    if num_microbatches > 1:
        waiting = [c for c in module.modules() if isinstance(c, MetricCollection) and _looks_for_groups(c)]
    updated: list[MetricCollection] = []
    for collection in waiting:
        collection._enable_compute_groups = False
        vars(collection)["update"] = partial(_update, collection, updated)
    try:
        yield
    finally:
        for collection in waiting:
            collection._enable_compute_groups = True
            del vars(collection)["update"]
    for collection in waiting:
        if collection in updated:
            collection._merge_compute_groups()
            collection._state_is_copy = False
            collection._compute_groups_create_state_ref()
            collection._groups_checked = True


def _looks_for_groups(collection: MetricCollection) -> bool:
    return collection._enable_compute_groups is True and not collection._groups_checked


def _update(collection: MetricCollection, updated: list[MetricCollection], *args: Any, **kwargs: Any) -> None:
    if collection not in updated:
        updated.append(collection)
    type(collection).update(collection, *args, **kwargs)
