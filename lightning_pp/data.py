"""One stream of data for all stages: the first batch before training, loaders that start late, equal random states."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.partition import random_state, tree

__all__: list[str] = []


class NoBatchError(LookupError):
    """A loader has no first batch."""


class Processes(Protocol):
    """What a loader asks the processes of a job."""

    def all_agree(self, vote: bool) -> bool:
        """Whether every process votes yes."""

    def broadcast(self, obj: int) -> int:
        """Rank 0's number."""


class StageLoader:
    """A user's loader that begins to iterate only when the first batch is wanted.

    Lightning creates a loader's iterator while it sets up; a pipeline looks at the first batch even earlier. Neither
    may draw a random number or take a sample out of a stream before the plain run would. Everything else is the user's
    loader's own.

    Args:
        loader: The user's loader.
        replica: Which of several pipelines this process belongs to.
        looks_ahead: Whether :meth:`first_batch` will be asked for.
        processes: All of the job; None for a single one.
    """

    _own = frozenset({"_first", "_looks_ahead", "_peeked", "_processes", "loader"})

    def __init__(
        self, loader: Any, replica: int, looks_ahead: bool = False, processes: Processes | None = None
    ) -> None:
        self.loader = loader
        self._processes = processes
        self._peeked: Iterator[Any] | None = None
        self._looks_ahead = looks_ahead
        self._first: list[Any] = []
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(loader, "worker_init_fn", self) is None:
            # Lightning would seed by global rank, and two stages would augment one image differently
            loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while being copied
            raise AttributeError(name)
        if name == "load_state_dict":
            self._peeked = None  # what was looked at lies before the place that is restored
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # a generator: it begins when its first batch is wanted, and takes over what has been looked at by then
        peeked, self._peeked = self._peeked, None
        yield from self._started() if peeked is None else peeked

    def _started(self) -> Iterator[Any]:
        for batch in self._together():
            if self._looks_ahead and not self._first:
                self._first.append(batch)
            yield batch

    def _together(self) -> Iterator[Any]:
        """The loader's batches, ending on all processes with the first that has no more."""
        iterator = iter(self.loader)
        if self._processes is None:
            yield from iterator
            return
        if self._has_known_length():
            self._check_length(self._processes)
            yield from iterator
            return
        for batch in iterator:
            if not self._processes.all_agree(True):
                rank_zero_warn(
                    f"A {type(self.loader).__name__} has run out of batches on one process before another; the epoch"
                    " ends there on all. Let the dataset yield as many batches on every process."
                )
                return
            yield batch
        self._processes.all_agree(False)

    def _check_length(self, processes: Processes) -> None:
        length = len(self.loader)
        expected = processes.broadcast(length)
        if not processes.all_agree(length == expected):
            raise ValueError(
                f"The processes have loaders of different lengths: rank 0 has {expected} batches, and this process"
                f" {length}. Every stage needs every batch, and every replica as many: use one sampler for all, with"
                " the same seed."
            )

    def _has_known_length(self) -> bool:
        """Whether the number of batches is sure to be the same on all processes."""
        if isinstance(self.loader, DataLoader):
            return not isinstance(self.loader.dataset, IterableDataset) and isinstance(self.loader.sampler, Sized)
        return isinstance(self.loader, (list, tuple))

    def first_batch(self) -> Any:
        """The batch that iterating gives first; no sample is lost by looking at it."""
        try:
            # where a loader has no length, Lightning has already taken the first batch
            return self._first[0] if self._first else self._look()
        except StopIteration as error:
            raise NoBatchError(f"{type(self.loader).__name__} has no batch") from error
        finally:
            self.look_no_more()

    def look_no_more(self) -> None:
        """Keep no first batch: nobody will ask for it."""
        self._looks_ahead = False
        self._first.clear()

    def _look(self) -> Any:
        if isinstance(self.loader, DataLoader) and not isinstance(self.loader.dataset, IterableDataset):
            return _first_of_map_style(self.loader)
        if isinstance(self.loader, (list, tuple)):
            return next(iter(self.loader))
        # a stream cannot be asked twice: keep the iterator for the loop
        iterator = self._started()
        first = next(iterator)
        self._peeked = _chain(first, iterator)
        return first


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _first_of_map_style(loader: DataLoader[Any]) -> Any:
    """The first batch straight from the dataset: no worker starts, nothing is prefetched."""
    generators = [loader.generator, getattr(loader.sampler, "generator", None)]
    states = [generator.get_state() if generator is not None else None for generator in generators]
    try:
        if loader.batch_sampler is None:
            samples = loader.dataset[next(iter(loader.sampler))]
        else:
            indices = next(iter(loader.batch_sampler))
            fetch = getattr(loader.dataset, "__getitems__", None)
            samples = fetch(indices) if fetch is not None else [loader.dataset[index] for index in indices]
        return loader.collate_fn(samples)
    finally:
        for generator, state in zip(generators, states, strict=True):
            if generator is not None:
                generator.set_state(state)


def first_batch(combined: Any) -> Any:
    """The first batch of a ``CombinedLoader`` of :class:`StageLoader`, as the step will get it."""
    if compat.is_sequential(combined):
        return _first_of_sequence(combined.flattened)
    return tree.map_leaves(lambda loader: loader.first_batch(), combined.iterables)


def _first_of_sequence(loaders: Sequence[StageLoader]) -> Any:
    try:
        for loader in loaders:
            with suppress(NoBatchError):
                return loader.first_batch()
    finally:
        for loader in loaders:
            loader.look_no_more()
    raise NoBatchError("no loader has a batch")


class SameRandomState(Callback):
    """Begins every epoch with the first stage's global random states on all stages.

    Samplers without a generator draw their seed from torch's global generator, and datasets may draw from any: without
    ``seed_everything`` the processes would see different batches.
    """

    def __init__(self, group: Any, source: int) -> None:
        self._group = group
        self._source = source

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share_random_state(self._group, self._source)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share_random_state(self._group, self._source)

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share_random_state(self._group, self._source)

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share_random_state(self._group, self._source)


def share_random_state(group: Any, source: int) -> None:
    """Give all ranks of ``group`` (host memory) the global random states of rank ``source``, devices' excepted."""
    box = [random_state.capture()]
    dist.broadcast_object_list(box, src=source, group=group)
    random_state.restore(box[0], host_only=True)
