"""``self.log`` inside a step: recorded per micro-batch on the last stage, merged, and replayed on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pp.metrics.batch_values import Origin
from lightning_pp.metrics.shared import SharedMetrics
from lightning_pp.partition import tree
from lightning_pp.runtime.microbatch import weighted_mean
from lightning_pp.steps.reports import Call, taken_down

__all__: list[str] = []


@dataclass(slots=True)
class _Entry:
    """One call of ``self.log`` with a number or a tensor."""

    mb: int
    name: str
    value: Tensor
    options: dict[str, Any]
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class _Object:
    """The first call of ``self.log`` with a metric.

    Attributes:
        metric: The metric.
        options: The other arguments.
        copy: Knows what the last call of the metric returns for the whole batch; None where it has not been called.
        value: What its last call returned.
    """

    metric: Metric
    options: dict[str, Any]
    copy: Metric | None
    value: Any


@dataclass(frozen=True, slots=True)
class MetricLog:
    """A torchmetrics object that a step has logged.

    Attributes:
        name: As what.
        attribute: The submodule of the user's module that it is.
        value: Of the batch, which Lightning shows where ``on_step`` is set; None where the step only updates it.
        last: What the metric's last call gives for the batch.
        options: The other arguments of ``self.log``.
    """

    name: str
    attribute: str
    value: Any
    last: Any
    options: dict[str, Any]


class LogRecorder:
    """Stands in for ``module.log`` while a step runs in micro-batches.

    ``log_dict`` needs nothing of its own: Lightning's calls ``self.log``.

    Args:
        module: The user's module.
        metrics: Its metrics; None while it is planned.
        has_loggers: Whether loggers are to be asked on this process at once.

    Attributes:
        calls: What the step has told loggers and printed, unless that was done at once.
        mb: The micro-batch under way.
    """

    def __init__(
        self, module: LightningModule, metrics: SharedMetrics | None = None, has_loggers: bool = False
    ) -> None:
        self._module = module
        self._metrics = metrics
        self._taking_down = ExitStack()
        self._has_loggers = has_loggers
        self.calls: list[Call] = []
        self._entries: list[_Entry] = []
        self._objects: dict[str, _Object] = {}
        self.mb = 0

    def __enter__(self) -> LogRecorder:
        object.__setattr__(self._module, "log", self._record)
        if not self._has_loggers:
            self.calls = self._taking_down.enter_context(taken_down(self._module))
        return self

    def __exit__(self, *exception: object) -> None:
        object.__delattr__(self._module, "log")
        self._taking_down.close()

    @property
    def values(self) -> list[Tensor]:
        """What has been logged, told loggers or printed so far."""
        told = tree.tensors_of([(call.args, call.kwargs) for call in self.calls])
        return [entry.value for entry in self._entries] + told

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options = _named(args, options)
        if isinstance(value, Metric):
            # the first micro-batch tells whether the metric was called before it was logged
            copy = self._metrics.last_copy(value) if self._metrics is not None else None
            self._objects.setdefault(name, _Object(value, options, copy, value._forward_cache))
            return
        if isinstance(value, dict):
            raise ValueError(f"`self.log({name!r}, ...)` takes one value, not a dict: use `self.log_dict`.")
        if not isinstance(value, (Tensor, Number)):
            raise MisconfigurationException(
                f"self.log({name!r}, ...) was given a {type(value).__name__}. Log a number, a tensor with one element"
                " or a torchmetrics Metric (a MetricCollection with self.log_dict)."
            )
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
        if tensor.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, {value})` was called, but the tensor must have a single element."
                f" You can try doing `self.log({name!r}, {value}.mean())`"
            )
        if tensor.dtype in (torch.float16, torch.bfloat16):  # Lightning adds up in no less either
            tensor = tensor.float()
        origin = None
        if self._metrics is not None and isinstance(value, Tensor):
            origin = self._metrics.batch.origin(value)
        self._entries.append(_Entry(self.mb, name, tensor.reshape(()).clone(), options, origin))

    def merged(self, weights: Sequence[float]) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """One ``(name, value, options)`` for every call that a micro-batch made, in the order of the first calls."""
        grouped: dict[tuple[str, int], list[_Entry]] = {}
        numbers: dict[tuple[str, int], int] = {}
        for entry in self._entries:
            number = numbers.get((entry.name, entry.mb), 0)
            numbers[entry.name, entry.mb] = number + 1
            grouped.setdefault((entry.name, number), []).append(entry)
        exact = self._exact(grouped)
        return [
            (key[0], exact[key] if key in exact else _merged_value(entries, weights), _merged_options(entries))
            for key, entries in grouped.items()
        ]

    def objects(self) -> list[MetricLog]:
        """The torchmetrics objects that were logged."""
        if self._metrics is None:
            return []
        # replicas evaluate together, also where one has logged nothing
        copies = {name: logged.copy for name, logged in self._objects.items()}
        # one that is called after it was logged shows the value next time
        last = {f"{name}/last": self._metrics.last_copy(logged.metric) for name, logged in self._objects.items()}
        wanted = {name: copy for name, copy in (copies | last).items() if copy is not None}
        values = self._metrics.evaluate(wanted)
        return [
            MetricLog(
                name,
                logged.options.get("metric_attribute") or self._metrics.name_of(logged.metric),
                values.get(name, logged.value),
                values.get(f"{name}/last", logged.metric._forward_cache),
                logged.options,
            )
            for name, logged in self._objects.items()
        ]

    def _exact(self, grouped: Mapping[tuple[str, int], Sequence[_Entry]]) -> dict[tuple[str, int], Tensor]:
        """The values that metrics returned: those of the whole batch."""
        if self._metrics is None:
            return {}
        found = {key: entries[-1].value for key, entries in grouped.items() if _is_running_value(entries)}
        origins = {key: entries[-1].origin for key, entries in grouped.items()}
        copies = {key: o for key, o in origins.items() if o is not None and o.copy is not None}
        names = {key: f"{key[0]}/{key[1]}" for key in copies}
        values = self._metrics.evaluate({names[key]: o.copy for key, o in copies.items() if o.copy is not None})
        for key, origin in copies.items():
            found[key] = tree.tensors_of(values[names[key]])[origin.leaf].detach().reshape(())
        return found


def is_in_step(module: LightningModule) -> bool:
    """Whether a step of ``module`` is running or being planned: then, and only then, is its log recorded."""
    return "log" in vars(module)


def replay(module: LightningModule, logs: Sequence[tuple[str, Tensor, dict[str, Any]]]) -> None:
    """Log what :meth:`LogRecorder.merged` gave, in the step's own hook."""
    for name, value, options in logs:
        module.log(name, value.to(module.device), **options)


def replay_objects(module: LightningModule, logs: Sequence[MetricLog]) -> None:
    """Log this rank's own metric objects as the last stage has logged its."""
    for log in logs:
        metric: Any = module.get_submodule(log.attribute)
        metric._forward_cache = log.value
        module.log(log.name, metric, **log.options)
        metric._forward_cache = log.last


#: the arguments of ``self.log`` that may be given by position
_POSITIONAL = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip


def _named(args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options of one call of ``self.log`` by name, without what cannot leave this process."""
    options = {**options, **dict(zip(_POSITIONAL, args, strict=False))}
    options.pop("sync_dist_group", None)  # values are those of all replicas before Lightning sees them
    reduce_fx = options.get("reduce_fx")
    if callable(reduce_fx):
        name = _CALLABLES.get(reduce_fx)
        if name is None:
            raise MisconfigurationException(
                f"self.log(..., reduce_fx={reduce_fx}): allowed are 'mean', 'sum', 'max' and 'min'. For another"
                " reduction log a torchmetrics Metric."
            )
        options["reduce_fx"] = name
    return options


_CALLABLES: dict[Any, str] = {
    torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min", sum: "sum", max: "max", min: "min"
}  # fmt: skip


def _is_running_value(entries: Sequence[_Entry]) -> bool:
    """Whether each value covered all micro-batches before it, as ``compute`` does, so that the last one counts."""
    origin = entries[-1].origin
    return origin is not None and origin.copy is None


def _merged_value(entries: Sequence[_Entry], weights: Sequence[float]) -> Tensor:
    values = [entry.value for entry in entries]
    if len(values) == 1:
        return values[0]
    combine = reduction_of(entries[-1].options)
    if combine is not None:
        return combine(torch.stack(values))
    shares = [weights[entry.mb] for entry in entries]
    total = sum(shares)
    if not values[0].is_floating_point():
        values = [value.to(torch.get_default_dtype()) for value in values]
    return weighted_mean(values, [share / total for share in shares] if total else shares)


def reduction_of(options: dict[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """What puts values that were logged with ``options`` together; None stands for the weighted mean."""
    return _REDUCTIONS.get(str(options.get("reduce_fx", "mean")).lower())


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.max, "min": torch.min}


def _merged_options(entries: Sequence[_Entry]) -> dict[str, Any]:
    options = dict(entries[-1].options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(entry.options.get("batch_size") or 0 for entry in entries)
    return options
