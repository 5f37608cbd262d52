"""Trains entries of the zoo, one Trainer after another, inside the test processes; says what each process saw."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

from lightning_pp import PipelineStrategy
from tests.training import QUIET
from tests.zoo import libraries
from tests.zoo.entries import Entry, Trained

EPOCHS = 2
FIRST, LAST = "epoch=0.ckpt", "epoch=1.ckpt"


@dataclass
class Seen:
    """What one process saw of one run.

    Attributes:
        losses: Of each batch.
        logged: ``callback_metrics`` at the end.
        state: What it holds of the module's state dict at the end.
        error: The first exception, as text.
        warned: The texts of all warnings.
        calls: The layers in the order of their calls.
        bounds: Where they were cut.
    """

    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""
    warned: list[str] = field(default_factory=list)
    calls: tuple[str, ...] = ()
    bounds: tuple[int, ...] = ()


@dataclass
class Plain:
    """The runs of one row without the strategy.

    Attributes:
        whole: All epochs.
        resumed: All but the first, from the checkpoint that two stages have saved.
        loaded: The state dict of a new module that has loaded their last checkpoint.
    """

    whole: Seen
    resumed: Seen | None = None
    loaded: dict[str, Tensor] = field(default_factory=dict)


class Losses(Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.losses.append(outputs["loss"].item())


def run_two(rows: dict[str, Entry], folder: Path) -> dict[str, Seen]:
    """Two stages; leaves a checkpoint of each epoch."""
    libraries.load()
    return {name: run(entry, 2, save=folder / name) for name, entry in rows.items()}


def run_four(rows: dict[str, Entry], folder: Path) -> dict[str, Seen]:
    """Four stages, which go on from what two have saved."""
    libraries.load()
    return {name: run(entry, 4, start=folder / name / FIRST) for name, entry in rows.items()}


def run_plain(rows: dict[str, Entry], folder: Path) -> dict[str, Plain]:
    """Without the strategy."""
    libraries.load()
    return {name: _run_plain(entry, folder / name) for name, entry in rows.items()}


def _run_plain(entry: Entry, folder: Path) -> Plain:
    plain = Plain(run(entry, 0))
    if (folder / LAST).exists():
        plain.resumed = run(entry, 0, start=folder / FIRST)
        module = make(entry)
        module.load_state_dict(torch.load(folder / LAST, weights_only=True)["state_dict"], strict=True)
        plain.loaded = module.state_dict()
    return plain


def run(entry: Entry, stages: int, save: Path | None = None, start: Path | None = None) -> Seen:
    """Train one row; 0 stages: without the strategy."""
    seen = Seen()
    precision = in_double() if entry.precision == "64-true" else nullcontext()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module = make(entry)
            trainer = trainer_for(entry, stages, seen, save)
            with precision:
                trainer.fit(module, module.loader(), ckpt_path=start if start is not None and start.exists() else None)
            _note(seen, module, trainer, stages)
        except Exception:
            seen.error = traceback.format_exc()
    seen.warned = [str(warning.message) for warning in caught]
    return seen


def _note(seen: Seen, module: LightningModule, trainer: Trainer, stages: int) -> None:
    seen.state = {n: value.detach().clone() for n, value in module.state_dict().items() if not value.is_meta}
    seen.logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    if stages:
        cut = trainer.strategy.pipeline.ownership.cut  # type: ignore[attr-defined]
        seen.calls, seen.bounds = cut.calls, cut.bounds


def make(entry: Entry) -> Trained:
    torch.manual_seed(7)
    module = entry.model()
    # Lightning loads a checkpoint before it converts the module, which would cost half of the digits
    return module.double() if entry.precision == "64-true" else module


def trainer_for(entry: Entry, stages: int, seen: Seen, save: Path | None) -> Trainer:
    options: dict[str, Any] = {**QUIET, "precision": entry.precision, "max_epochs": EPOCHS, "accelerator": "cpu"}
    callbacks: list[Callback] = [Losses(seen)]
    if save is not None:
        callbacks.append(ModelCheckpoint(save, filename="{epoch}", save_top_k=-1))
        options["enable_checkpointing"] = True
    if stages:
        arguments = {"stages": stages, "microbatches": entry.microbatches, **entry.strategy}
        options["strategy"] = PipelineStrategy(**arguments)
    return Trainer(devices=max(stages, 1), callbacks=callbacks, **options)


@contextmanager
def in_double() -> Iterator[None]:
    """Compute in float64 throughout: libraries ask for float32 in norms, softmax and losses, whatever they are given.

    So a difference between two runs is a fault, and not rounding that an optimizer has made larger.
    """
    to, softmax = Tensor.to, F.softmax

    def wider(kind: Any) -> Any:
        return torch.float64 if kind is torch.float32 else kind

    def to_wider(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(tensor, *map(wider, args), **{key: wider(item) for key, item in kwargs.items()})

    def wider_softmax(*args: Any, **kwargs: Any) -> Tensor:
        return softmax(*args, **{key: wider(item) for key, item in kwargs.items()})

    try:
        Tensor.to, Tensor.float, F.softmax = to_wider, Tensor.double, wider_softmax  # type: ignore[assignment]
        yield
    finally:
        del Tensor.to, Tensor.float  # torch's own lie in a base class
        F.softmax = softmax
