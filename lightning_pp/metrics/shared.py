"""torchmetrics in a module: updated where the step ends, the last stage; computed there, and known on all ranks.

Between steps every rank runs the same hooks, so ``compute`` is called on all of them, and the last stage's value (over
all replicas) is the true one. Inside a step only the last stage calls it, and gets its own value. torchmetrics' own
synchronisation would gather from processes that have seen nothing, or wait for ones that never ask.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pp.metrics.batch_values import BatchValues, synchronised
from lightning_pp.metrics.groups import groups_of_whole_batches
from lightning_pp.metrics.links import Link, Links, link_of, metrics_in
from lightning_pp.partition import tree
from lightning_pp.runtime.groups import Replicas

__all__: list[str] = []

#: wrappers whose value depends on how often these methods are called
_COUNT_CALLS = {"Running": ("forward", "update"), "MinMaxMetric": ("forward",)}


class SharedMetrics:
    """Makes metrics give one and the same value on every rank.

    Args:
        module: The user's module.
        group: The ranks of this pipeline, for host memory; None for a single one.
        source: Global rank of the last stage.
        replicas: The other pipelines.
        in_step: Whether a step function is running.
        device: Where values go.

    Attributes:
        batch: The values of the batch under way.
    """

    def __init__(
        self,
        module: LightningModule,
        group: Any,
        source: int,
        replicas: Replicas,
        in_step: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._module = module
        self._group = group
        self._source = source
        self._replicas = replicas
        self._in_step = in_step
        self._device = device
        self._links = Links(self)
        self._depth = 0
        self._num_changes = 0
        self._num_steps = 0
        self.batch = BatchValues(self._links.independent_copy, replicas)
        self.share(metrics_in("self", module))
        for inner in module.modules():
            if isinstance(inner, Metric):
                inner.to(device)  # on the same device, too: it takes the default dtype then, as in a plain run

    def share(self, found: Iterable[tuple[str, Metric]]) -> None:
        """Share metrics, each with the name of the attribute that holds it."""
        for name, metric in found:
            self._links.add(name, metric)

    def release(self) -> None:
        """Give the metrics their own ways back."""
        self._links.release()

    @contextmanager
    def running(self, num_microbatches: int) -> Iterator[None]:
        """The block in which a batch runs in micro-batches."""
        self._num_steps += 1
        self.batch.start(num_microbatches)
        try:
            with groups_of_whole_batches(self._module, num_microbatches):
                yield
        finally:
            self.batch.stop()

    def last_copy(self, metric: Metric) -> Metric | None:
        """What knows the value of the last call of ``metric`` for the batch; None where there was none."""
        return self.batch.last_copy(link_of(metric).calls) if metric in self._links else None

    def evaluate(self, copies: Mapping[str, Metric]) -> dict[str, Any]:
        """See :meth:`BatchValues.evaluate`."""
        # the other replicas need not be asked about a module without metrics
        return self.batch.evaluate(copies) if self._links else {}

    def name_of(self, metric: Metric) -> str:
        """The submodule of the user's module that ``metric`` is.

        Raises:
            MisconfigurationException: It is none.
        """
        likely = link_of(metric).name.partition(".")[2] if metric in self._links else ""
        if likely and dict(self._module.named_children()).get(likely) is metric:
            return likely
        for name, module in self._module.named_modules():
            if module is metric:
                return str(name)
        raise MisconfigurationException(
            f"self.log(...) was given a {type(metric).__name__} that is no attribute of"
            f" {type(self._module).__name__}. Assign it to the module in __init__ (self.metric = ...), or log what its"
            " compute() returns."
        )

    def prefetch(self, metrics: Iterable[Metric]) -> None:
        """Compute on all ranks now, so that a rank that asks alone afterwards need not wait for the others."""
        for metric in metrics:
            metric.compute()

    def share_persistent_states(self) -> None:
        """Give the first stage, which writes checkpoints, the states that belong into one; called on all ranks."""
        if self._group is None:
            return
        for name, metric in metrics_in("self", self._module):
            kept = [key for key, persistent in metric._persistent.items() if persistent]
            if kept:
                states = self._broadcast(name, partial(_states, metric, kept))
                if dist.get_rank() != self._source:
                    if metric in self._links:  # after the run it is the user's plain one
                        self._changed(link_of(metric))
                    for key, state in states.items():
                        setattr(metric, key, state)

    # -- what a shared metric calls ---------------------------------------------------------------------------------

    def forward(
        self, metric: Metric, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer ``metric(*args, **kwargs)``."""
        link = link_of(metric)
        self._refuse_counting(metric, "forward")
        self._changed(link)
        with self._local():
            value = forward(*args, **kwargs)
        if self._depth == 0 and self.batch.is_running:
            self.batch.called(metric, link.calls, value, args, kwargs)
        return value

    def before_reset(self, metric: Metric) -> None:
        """``metric.reset()`` is about to run."""
        self._changed(link_of(metric))
        if self._depth == 0 and self.batch.is_running and not self.batch.is_whole:
            raise MisconfigurationException(
                f"{link_of(metric).name}.reset() was called inside a step, which runs once for every micro-batch."
                " Call it in a hook such as on_train_batch_start or on_train_epoch_end."
            )

    def update(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Answer ``metric.update(*args, **kwargs)``."""
        link = link_of(metric)
        self._refuse_counting(metric, "update")
        self._changed(link)
        with self._local():
            link.own["update"](*args, **kwargs)

    def compute(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer ``metric.compute(*args, **kwargs)``."""
        link = link_of(metric)
        if self._depth or self._in_step():
            with self._local():
                value = link.own["compute"](*args, **kwargs)
            if self._depth == 0 and self.batch.is_running:
                self.batch.computed(value)
            return value
        version = (self._num_steps, self._num_changes if link.is_nested else link.version)
        if link.value is None or link.value[0] != version or args or kwargs:
            value = self._broadcast(link.name, lambda: self._computed(metric, link, args, kwargs))
            link.value = (version, value)
        return link.value[1]

    def _computed(self, metric: Metric, link: Link, args: tuple[Any, ...], kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(self._local())
            if self._replicas.size > 1:
                stack.enter_context(synchronised(metric, self._replicas.group))
            return link.own["compute"](*args, **kwargs)

    def _broadcast(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on the last stage, on all ranks of the pipeline."""
        if self._group is None:
            return make()
        box: list[Any] = [None]
        if dist.get_rank() == self._source:
            try:
                box = [(name, None, _moved(make(), torch.device("cpu")))]
            except Exception as error:
                box = [(name, _portable(error), None)]
        dist.broadcast_object_list(box, src=self._source, group=self._group)
        asked, failed, value = box[0]
        if asked != name:
            raise RuntimeError(
                f"This rank asked for the value of the metric {name}, and the last stage gave that of {asked}. Outside"
                " of steps, call compute() on all ranks and in the same order: not on rank 0 alone."
            )
        if failed is not None:
            raise failed
        return _moved(value, self._device)

    def _changed(self, link: Link) -> None:
        link.version += 1
        self._num_changes += 1

    def _refuse_counting(self, metric: Metric, method: str) -> None:
        if self._depth or not self.batch.is_running or self.batch.is_whole:
            return
        kind = type(metric).__name__
        if method in _COUNT_CALLS.get(kind, ()):
            raise MisconfigurationException(
                f"{link_of(metric).name} is a {kind}, whose value depends on how often it is called, and was called"
                " inside a step, which runs once for every micro-batch. Call it in on_train_batch_end or"
                " on_validation_batch_end with what the step returns, or use PipelineStrategy(microbatches=1)."
            )

    @contextmanager
    def _local(self) -> Iterator[None]:
        """What metrics ask each other for inside the block is a matter of this process alone."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _states(metric: Metric, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in names}


def _moved(value: Any, device: torch.device) -> Any:
    return tree.map_leaves(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, value)


def _portable(error: Exception) -> Exception:
    """The error itself where another process can get it, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
