"""``self.log`` inside a step: recorded per micro-batch on the last stage, merged, and replayed on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pp.runtime.microbatch import weighted_mean

__all__: list[str] = []


@dataclass(slots=True)
class _Entry:
    """One call of ``self.log``."""

    mb: int
    name: str
    value: Tensor
    options: dict[str, Any]


class LogRecorder:
    """Stands in for ``module.log`` while a step runs in micro-batches.

    ``log_dict`` needs nothing of its own: Lightning's calls ``self.log``.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._entries: list[_Entry] = []
        self.mb = 0

    def __enter__(self) -> LogRecorder:
        object.__setattr__(self._module, "log", self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        object.__delattr__(self._module, "log")

    @property
    def values(self) -> list[Tensor]:
        """What has been logged so far."""
        return [entry.value for entry in self._entries]

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, dict):
            raise ValueError(f"`self.log({name!r}, ...)` takes one value, not a dict: use `self.log_dict`.")
        if not isinstance(value, (Tensor, int, float)):
            raise MisconfigurationException(
                f"self.log({name!r}, ...) was given a {type(value).__name__}. Inside a step that runs in a pipeline,"
                " log a number or a tensor with one element; for a torchmetrics object log what calling it, or its"
                " compute(), returns."
            )
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        options |= dict(zip(names, args, strict=False))
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
        if tensor.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, {value})` was called, but the tensor must have a single element."
                f" You can try doing `self.log({name!r}, {value}.mean())`"
            )
        self._entries.append(_Entry(self.mb, name, tensor.reshape(()).clone(), options))

    def merged(self, weights: Sequence[float]) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """One ``(name, value, options)`` per name, in the order in which they were first logged."""
        grouped: dict[str, list[_Entry]] = {}
        for entry in self._entries:
            grouped.setdefault(entry.name, []).append(entry)
        return [(name, _merged_value(entries, weights), _merged_options(entries)) for name, entries in grouped.items()]


def is_in_step(module: LightningModule) -> bool:
    """Whether a step of ``module`` is running or being planned: then, and only then, is its log recorded."""
    return "log" in vars(module)


def replay(module: LightningModule, logs: Sequence[tuple[str, Tensor, dict[str, Any]]]) -> None:
    """Log what :meth:`LogRecorder.merged` gave, in the step's own hook."""
    for name, value, options in logs:
        module.log(name, value.to(module.device), **options)


def _merged_value(entries: Sequence[_Entry], weights: Sequence[float]) -> Tensor:
    values = [entry.value for entry in entries]
    if len(values) == 1:
        return values[0]
    combine = _REDUCTIONS.get(_reduction_name(entries[-1].options.get("reduce_fx", "mean")))
    if combine is not None:
        return combine(torch.stack(values))
    shares = [weights[entry.mb] for entry in entries]
    total = sum(shares)
    if not values[0].is_floating_point():
        values = [value.to(torch.get_default_dtype()) for value in values]
    return weighted_mean(values, [share / total for share in shares] if total else shares)


def _reduction_name(reduce_fx: Any) -> str:
    return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.max, "min": torch.min}


def _merged_options(entries: Sequence[_Entry]) -> dict[str, Any]:
    options = dict(entries[-1].options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(entry.options.get("batch_size") or 0 for entry in entries)
    return options
