"""What a step keeps in its module for the hook at the end of the epoch: ``self.outputs.append(loss)``.

Steps end on the last stage, so what they keep is there alone. Lists are appended to once per micro-batch; afterwards
they hold one item per batch, as without a pipeline. Before the hooks at the end of an epoch, every stage gets what the
last one has kept.
"""

from __future__ import annotations

import numbers
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_pp.partition import tree
from lightning_pp.runtime import microbatch

__all__: list[str] = []

#: how deep lists may lie in the lists and dicts of an attribute
_DEPTH = 3
#: how many items of a container are looked at to see whether it has changed
_WIDTH = 16
_LIBRARIES = frozenset({"torch", "torchmetrics", "lightning", "pytorch_lightning", "builtins"})
_PLAIN = (type(None), bool, numbers.Number, str, bytes, Tensor)


class _Recorded(list[Any]):
    """A list that remembers in which micro-batch each item was appended."""

    def __init__(self, items: Sequence[Any], clock: KeptValues) -> None:
        super().__init__(items)
        self.start = len(items)
        self.appended_in: list[int] = []
        self._clock = clock

    @override
    def append(self, item: Any) -> None:
        self.appended_in.append(self._clock.mb)
        super().append(item)

    def joined(self, sizes: Sequence[int | None], weights: Sequence[float]) -> list[Any]:
        """Its items, those of one batch joined; as they are where they are no results of whole micro-batches."""
        plain = list(self)
        per_mb = len(self.appended_in) // max(1, len(sizes))
        expected = [mb for mb in range(len(sizes)) for _ in range(per_mb)]
        if not per_mb or self.appended_in != expected or len(plain) != self.start + len(expected):
            return plain
        new = plain[self.start :]
        series = [new[first::per_mb] for first in range(per_mb)]
        if not all(_can_join(item, size) for items in series for item, size in zip(items, sizes, strict=True)):
            return plain
        return plain[: self.start] + [microbatch.join(items, sizes, weights) for items in series]


class KeptValues:
    """The attributes that the steps of one module change.

    Args:
        module: The user's module.
        is_last: Whether steps end on this rank.

    Attributes:
        mb: The micro-batch under way.
        changed: Names of attributes that steps have changed since :meth:`share`.
    """

    def __init__(self, module: LightningModule, is_last: bool) -> None:
        self._module = module
        self._is_last = is_last
        self._places: list[tuple[Any, Any, list[Any], _Recorded]] = []
        self._growing: list[defaultdict[Any, Any]] = []
        self.mb = 0
        self.changed: set[str] = set()

    @contextmanager
    def recording(self, sizes: Sequence[int | None], weights: Sequence[float]) -> Iterator[None]:
        """Watch one batch's step; afterwards its lists hold one item per batch."""
        if not self._is_last:
            yield
            return
        before = {name: _state(value) for name, value in self._attributes()}
        if len(sizes) > 1:
            self._record(vars(self._module), [name for name, _ in self._attributes()], _DEPTH)
        try:
            yield
        finally:
            self._restore(sizes, weights)
        self.changed |= {name for name, value in self._attributes() if before.get(name) != _state(value)}

    def share(self, group: Any, source: int, device: torch.device) -> None:
        """Give all stages what the last one has kept.

        Args:
            group: The stages of the pipeline, for host memory.
            source: The global rank of the last one.
            device: Where tensors go.
        """
        box: list[Any] = [None]
        if self._is_last:
            values = {name: value for name, value in self._attributes() if name in self.changed and _is_data(value)}
            box = [_moved(values, torch.device("cpu"))]
        dist.broadcast_object_list(box, src=source, group=group)
        self.changed.clear()
        if self._is_last:
            return
        for name, value in _moved(box[0], device).items():
            current = vars(self._module).get(name)
            if type(current) is list and isinstance(value, list):
                current[:] = value  # others may hold the list itself
            elif _is_record(value) and type(current) is type(value):
                vars(current).update(vars(value))
            else:
                setattr(self._module, name, value)

    def _attributes(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self._module).items() if not name.startswith("_")]

    def _record(self, holder: Any, keys: Sequence[Any], depth: int) -> None:
        """Put a :class:`_Recorded` in the place of each list."""
        for key in keys:
            value = holder[key]
            if type(value) is list:
                holder[key] = recorded = _Recorded(value, self)
                self._places.append((holder, key, value, recorded))
                if depth > 1:
                    self._record(recorded, range(len(recorded)), depth - 1)
            elif type(value) in (dict, defaultdict) and depth > 1:
                self._record(value, list(value), depth - 1)
                if getattr(value, "default_factory", None) is list:
                    self._growing.append(value)
                    value.default_factory = partial(_Recorded, (), self)

    def _restore(self, sizes: Sequence[int | None], weights: Sequence[float]) -> None:
        """Put the lists back, with what was appended joined."""
        for holder, key, original, recorded in reversed(self._places):
            original[:] = recorded.joined(sizes, weights)
            if _still(holder, key, recorded):
                holder[key] = original
        for growing in self._growing:
            growing.default_factory = list
            for key, made in growing.items():
                if isinstance(made, _Recorded):
                    growing[key] = made.joined(sizes, weights)
        self._places.clear()
        self._growing.clear()


class SharesKeptValues(Callback):
    """Shares what steps have kept before any other hook at the end of an epoch looks at it."""

    def __init__(self, share: Callable[[], None]) -> None:
        self._share = share

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share()

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share()

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share()

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share()


def _still(holder: Any, key: Any, recorded: _Recorded) -> bool:
    """Whether nothing else has been put in its place."""
    try:
        return holder[key] is recorded
    except (KeyError, IndexError):
        return False


def _state(value: Any, depth: int = _DEPTH) -> Any:
    """What differs when ``value`` has been changed, as far as that is cheap to tell."""
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if isinstance(value, numbers.Number):
        return value
    if not depth:
        return id(value)
    if isinstance(value, (list, dict, set, deque)):
        items = list(value.values() if isinstance(value, dict) else value)
        return (id(value), len(value), *(_state(item, depth - 1) for item in items[:_WIDTH] + items[-1:]))
    if _is_record(value):
        return (id(value), *(_state(item, depth - 1) for item in vars(value).values()))
    return id(value)


def _is_record(value: Any) -> bool:
    """Whether ``value`` is an object of the user's own with nothing but attributes, such as a running average."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(value) and library not in _LIBRARIES


def _is_data(value: Any, depth: int = _DEPTH) -> bool:
    """Whether ``value`` means the same in another process."""
    if isinstance(value, _PLAIN) or type(value).__module__ == "numpy":
        return True
    if isinstance(value, dict):
        return all(_is_data(item, depth) for item in (*value, *value.values()))
    if isinstance(value, (list, tuple, set, deque)):
        return all(_is_data(item, depth) for item in value)
    return depth > 0 and _is_record(value) and all(_is_data(item, depth - 1) for item in vars(value).values())


def _can_join(item: Any, size: int | None) -> bool:
    """Whether the plain run's item follows from those of the micro-batches: means, and rows per sample."""
    if isinstance(item, Tensor):
        return item.shape[0] == size if item.ndim else item.is_floating_point()
    if isinstance(item, dict):
        return all(_can_join(value, size) for value in item.values())
    if isinstance(item, (list, tuple)):
        return (type(item) is list and len(item) == size) or all(_can_join(value, size) for value in item)
    return isinstance(item, float)


def _moved(value: Any, device: torch.device) -> Any:
    return tree.map_leaves(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, value)
