"""Lightning's model summary for a model in stages: the whole model's numbers, and the stages of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.partition.trace import Trace, TraceError, trace_step
from lightning_pp.pipeline import Pipeline

__all__: list[str] = []


def install(callbacks: Iterable[Callback], current: Callable[[], Pipeline]) -> None:
    """Let summaries among ``callbacks`` show stages.

    Args:
        callbacks: Of the Trainer.
        current: Gives the pipeline of the run under way.
    """
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            compat.replace_summary(callback, _Maker(callback, current))


class _Maker:
    """Makes the summary in place of Lightning."""

    def __init__(self, callback: ModelSummary, current: Callable[[], Pipeline]) -> None:
        self._depth = compat.summary_depth(callback)
        self._in_names = isinstance(callback, RichModelSummary)  # its table has no column but its own
        self._current = current

    def __call__(self, trainer: Trainer, pl_module: LightningModule) -> Summary:
        return StageSummary(pl_module, self._current(), self._depth, self._in_names)


class StageSummary(Summary):
    """A summary with the stages of each layer.

    Where the module has an ``example_input_array``, shapes and FLOPs are inferred: no stage could run the whole model.

    Args:
        model: The user's module.
        pipeline: That it runs in.
        max_depth: As in Lightning.
        in_names: Show stages with the layers' names rather than in a column.
    """

    def __init__(self, model: LightningModule, pipeline: Pipeline, max_depth: int, in_names: bool) -> None:
        self._pipeline = pipeline
        self._in_names = in_names
        self._trace: Trace | None = None
        super().__init__(model, max_depth)

    @property
    @override
    def total_flops(self) -> int:
        return sum(call.flops for call in self._trace.calls) if self._trace is not None else 0

    @property
    @override
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        calls = self._trace.calls if self._trace is not None else ()
        return {
            name: {"all": sum(call.flops for call in calls if f"{call.layer}.".startswith(f"{name}."))}
            for name in self.layer_names
        }

    def stages(self) -> list[str]:
        """For each layer the stages that hold its parameters, such as ``0-2``; empty for one without any."""
        ownership = self._pipeline.ownership
        names = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        return [
            _span({stage for name in names if name.startswith(f"{layer}.") for stage in ownership.positions(name)})
            for layer in self.layer_names
        ]

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        data = super()._get_summary_data()
        stages = self.stages()
        if self._in_names:
            rows = dict(data)["Name"]
            rows[: len(stages)] = [f"{n} (stage {s})" if s else n for n, s in zip(rows, stages, strict=False)]
        else:
            others = len(data[0][1]) - len(stages)  # the row for parameters that no layer holds
            data.insert(4, ("Stage", stages + [""] * others))
        return data

    @override
    def _forward_example_input(self) -> None:
        model = self._model
        example = compat.example_input(model)
        args, kwargs = (example if isinstance(example, (list, tuple)) else ()), {}
        if isinstance(example, dict):
            kwargs = example
        elif not args:
            args = (example,)
        try:
            with torch.no_grad(), model.trainer.precision_plugin.forward_context():
                self._trace = trace_step(
                    lambda: model(*args, **kwargs), model, self._pipeline.ownership.board, model.device
                )
        except TraceError as error:
            rank_zero_warn(f"The model summary has no sizes: {error}")


def _span(stages: set[int]) -> str:
    if len(stages) > 1 and len(stages) == max(stages) - min(stages) + 1:
        return f"{min(stages)}-{max(stages)}"
    return ", ".join(str(stage) for stage in sorted(stages))
