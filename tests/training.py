"""Trains a module with and without the strategy and says what happened; runs inside the test processes."""

import logging
import os
import pickle
import random
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks, try_ranks
from tests.models import MODELS

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@dataclass
class Outcome:
    """What one process saw.

    Attributes:
        parameters: What it holds at the end.
        outputs: What each training batch returned.
        metrics: ``callback_metrics`` after each training batch.
        final: ``callback_metrics`` at the end.
        batches: The row sums of every tensor of each batch.
        extra: What a test's own callback left.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    batches: list[Any] = field(default_factory=list)
    global_step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class Watcher(Callback):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outcome.outputs.append(outputs)
        self.outcome.metrics.append({k: v.item() for k, v in trainer.callback_metrics.items()})
        tensors = batch.values() if isinstance(batch, dict) else batch
        self.outcome.batches.append([_row_sums(t) for t in tensors if isinstance(t, Tensor)])


def _row_sums(tensor: Tensor) -> list[float]:
    return tensor.double().reshape(len(tensor) if tensor.ndim else 1, -1).sum(1).tolist()


def fit(
    name: str,
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    devices: int = 1,
    seed: int | None = 5,
    loader: Any = None,
    callbacks: tuple[type[Callback], ...] = (),
    validate: bool = False,
    cls: type[LightningModule] | None = None,
    validation: Any = None,
) -> Outcome:
    """Train model ``name`` of :mod:`tests.models`, or ``cls``, in float64 unless ``trainer`` says otherwise."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
    module = (cls or MODELS[name])()
    outcome = Outcome()
    options: dict[str, Any] = {
        "precision": "64-true",
        "max_epochs": 2,
        "accelerator": "cpu",
        **QUIET,
        **(trainer or {}),
    }
    extra = [callback() for callback in callbacks]
    for callback in extra:
        callback.outcome = outcome  # type: ignore[attr-defined]
    if strategy is not None:
        options["strategy"] = PipelineStrategy(**strategy)
    runner = Trainer(devices=devices, callbacks=[Watcher(outcome), *extra], **options)
    data = loader() if loader is not None else module.loader()
    if validate:
        validation = module.loader
    runner.fit(module, data, val_dataloaders=validation() if validation is not None else None)
    outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    outcome.final = {k: v.item() for k, v in runner.callback_metrics.items()}
    outcome.global_step = runner.global_step
    if strategy is not None:
        engine = runner.strategy.pipeline.engine  # type: ignore[attr-defined]
        outcome.extra |= {"in_flight": engine.in_flight_peak, "buffers": engine.buffers_peak}
    return outcome


@cache
def _plain(name: str, options: str) -> Outcome:
    return run_ranks(fit, 1, name, **_OPTIONS[options])[0]


_OPTIONS: dict[str, dict[str, Any]] = {}


def plain(name: str, **options: Any) -> Outcome:
    """The run without the strategy; equal ones are run once."""
    _OPTIONS[repr(options)] = options
    return _plain(name, repr(options))


def piped(
    name: str, stages: int, microbatches: int, strategy: dict[str, Any] | None = None, **options: Any
) -> list[Outcome]:
    """The run in a pipeline: what each rank saw."""
    arguments = {"stages": stages, "microbatches": microbatches, **(strategy or {})}
    return run_ranks(fit, stages, name, strategy=arguments, devices=stages, **options)


class Table:
    """Many runs of one kind: all rows of one number of stages run in the same processes, one Trainer after another.

    Args:
        rows: ``{key: arguments of fit}``; ``microbatches`` (3 unless given) and ``strategy`` are the pipeline's.
    """

    def __init__(self, rows: Mapping[Any, Mapping[str, Any]]) -> None:
        self._rows = {key: dict(row) for key, row in rows.items()}
        self._found: dict[int, dict[Any, list[Outcome] | str]] = {}

    @property
    def keys(self) -> list[Any]:
        """Of the rows."""
        return list(self._rows)

    def plain(self, key: Any) -> Outcome:
        """The run without the strategy."""
        return self._outcomes(key, 0)[0]

    def piped(self, key: Any, stages: int) -> list[Outcome]:
        """The run in ``stages`` stages: what each rank saw."""
        return self._outcomes(key, stages)

    def _outcomes(self, key: Any, stages: int) -> list[Outcome]:
        """A row that has failed fails here, and no other."""
        if stages not in self._found:
            self._found[stages] = _run_rows(self._rows, stages)
        found = self._found[stages][key]
        if isinstance(found, str):
            raise AssertionError(found)
        return found


def _run_rows(rows: Mapping[Any, dict[str, Any]], stages: int) -> dict[Any, list[Outcome] | str]:
    """What each rank saw of each row, or the text of what failed; after a failure others begin where it was."""
    found: dict[Any, list[Outcome] | str] = {}
    size = max(stages, 1)
    while left := {key: row for key, row in rows.items() if key not in found}:
        with tempfile.TemporaryDirectory() as folder:
            results = try_ranks(_fit_rows, size, left, stages, folder, timeout=300)
            for number, key in enumerate(left):
                files = [Path(folder, f"{number}.{rank}") for rank in range(size)]
                if not all(file.exists() for file in files):
                    texts = [
                        f"--- rank {rank}\n{result.text}" for rank, result in enumerate(results) if result is not None
                    ]
                    found[key] = "\n".join([f"row {key!r} failed", *texts])
                    break
                found[key] = [pickle.loads(file.read_bytes()) for file in files]
    return found


def _fit_rows(rows: dict[Any, dict[str, Any]], stages: int, folder: str) -> None:
    """Leaves a file for each row that has run, up to the first that fails: processes may be out of step then."""
    for number, row in enumerate(rows.values()):
        options = {"strategy": {}, "microbatches": 3, **row}
        strategy = {"stages": stages, "microbatches": options.pop("microbatches"), **options.pop("strategy")}
        outcome = fit(**options, strategy=strategy if stages else None, devices=max(stages, 1))
        path = Path(folder, f"{number}.{os.environ['LOCAL_RANK']}")
        partial = Path(f"{path}.partial")
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(path)


def whole(outcomes: list[Outcome]) -> dict[str, Tensor]:
    """All parameters, tied copies asserted to be bit-equal."""
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, parameter in outcome.parameters.items():
            assert name not in found or torch.equal(found[name], parameter), f"tied copies of {name} differ"
            found[name] = parameter
    return found


def assert_same(reference: Outcome, outcomes: list[Outcome], tolerance: float = 1e-9) -> None:
    """Everything that the user can see is equal on every rank."""
    parameters = whole(outcomes)
    assert parameters.keys() == reference.parameters.keys()
    for name, expected in reference.parameters.items():
        torch.testing.assert_close(
            parameters[name], expected, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    for rank, outcome in enumerate(outcomes):
        assert outcome.global_step == reference.global_step
        assert len(outcome.outputs) == len(reference.outputs)
        for ours, theirs in zip(outcome.outputs, reference.outputs, strict=True):
            assert bool(ours) == bool(theirs), "a batch was left out by one of them"
            if not theirs:
                continue
            torch.testing.assert_close(ours["loss"], theirs["loss"], atol=tolerance, rtol=0)
        assert outcome.batches == reference.batches, f"rank {rank} saw other batches"
        _assert_metrics(reference.final, outcome.final, tolerance)
        for one, other in zip(reference.metrics, outcome.metrics, strict=True):
            _assert_metrics(one, other, tolerance)


def _assert_metrics(expected: dict[str, float], found: dict[str, float], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(found[name] - value) <= tolerance, f"{name}: {found[name]} instead of {value}"
