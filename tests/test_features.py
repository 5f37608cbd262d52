"""What Lightning offers around ``fit``: each feature gives the plain run's numbers on every rank, for every layout.

One row is one feature. All rows of one layout run in the same processes, one Trainer after another, as in a script that
trains several models.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.launch import run_ranks
from tests.models import GPT, MLP, regression_data
from tests.test_replicas import UnionLoader, assert_union
from tests.training import Outcome, fit

#: the first test of a table runs all of its rows
pytestmark = pytest.mark.timeout(360)

#: stages x replicas; the first is the plain run
LAYOUTS = {"plain": (0, 1), "2 stages": (2, 1), "4 stages": (4, 1), "2 x 2": (2, 2)}
REPLICAS, BATCH, SAMPLES = 2, 4, 22


class Scheduled(MLP):
    """Steps one scheduler per batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Plateau(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Grouped(GPT):
    """Groups by name, one of them without decay, and a warm-up by hand."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        plain = [p for name, p in named.items() if "norm" in name or name.endswith("bias")]
        rest = [p for name, p in named.items() if not ("norm" in name or name.endswith("bias"))]
        groups = [{"params": rest, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0, "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.002 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)


class OwnClipping(GPT):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        bound = 0.3 / (self.current_epoch + 1)
        self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.5)


class SeveralLoaders(MLP):
    """Logs per loader in evaluation, with values of its own batch size and of the whole epoch."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        out = self.net(x)
        loss = torch.nn.functional.mse_loss(out, y)
        self.log("val_loss", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        self.log("by_loader", loss, on_step=True, on_epoch=True)
        self.log("worst", (out - y).abs().max(), reduce_fx="max", sync_dist=True)


class Predicts(MLP):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class FitsTwice(Callback):
    """Asks for more after the first run, as a script that goes on does."""

    outcome: Outcome

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.extra["epochs"] = trainer.current_epoch


class Best(ModelCheckpoint):
    """Says what it has found to be best."""

    outcome: Outcome

    def __init__(self) -> None:
        super().__init__(monitor="val_loss", save_top_k=1, dirpath=None, save_weights_only=True)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Only the choice is looked at here."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.extra["best"] = (self.best_model_score, list(self.best_k_models.values()))


class Rates(Callback):
    """Writes down learning rates and modes at every batch."""

    outcome: Outcome

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.outcome.extra.setdefault("rates", []).append((rates, all(m.training for m in pl_module.modules())))


def even() -> DataLoader[Any]:
    """An evaluation loader that replicas share without repeating a sample."""
    return DataLoader(regression_data(20), batch_size=BATCH)


def even_of_the_union() -> DataLoader[Any]:
    return DataLoader(regression_data(20), batch_size=BATCH * REPLICAS)


def two(loader: Callable[[], DataLoader[Any]]) -> list[DataLoader[Any]]:
    return [loader(), loader()]


def feature(cls: type[LightningModule] = MLP, callbacks: Any = (), evaluates: str = "", **trainer: Any) -> Any:
    """One row: a module, callbacks, how many evaluation loaders, and arguments of the Trainer."""
    return {"cls": cls, "callbacks": (*callbacks, Rates), "evaluates": evaluates, "trainer": trainer}


FEATURES: dict[str, Any] = {
    "plain fit": feature(),
    "tied weights, gpipe": feature(GPT) | {"strategy": {"schedule": "gpipe"}},
    "activation checkpointing": feature(GPT) | {"strategy": {"activation_checkpointing": True}},
    "accumulation with an incomplete window": feature(GPT, accumulate_grad_batches=2),
    "accumulation by schedule": feature(callbacks=[partial(GradientAccumulationScheduler, scheduling={0: 1, 1: 2})]),
    "clipping by norm": feature(GPT, gradient_clip_val=0.2),
    "clipping by value": feature(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "own clipping, changed gradients": feature(OwnClipping),
    "groups by name, own optimizer step": feature(Grouped, accumulate_grad_batches=2),
    "a scheduler per step": feature(Scheduled),
    "a plateau, validation in every epoch": feature(Plateau, evaluates="one", max_epochs=4),
    "validation within the epoch": feature(evaluates="one", val_check_interval=0.5, limit_val_batches=2),
    "several loaders": feature(SeveralLoaders, evaluates="two", num_sanity_val_steps=1),
    "early stopping": feature(
        evaluates="one", callbacks=[partial(EarlyStopping, monitor="val_loss", min_delta=10.0)], max_epochs=5
    ),
    "the best checkpoint": feature(evaluates="one", callbacks=[Best], max_epochs=3, enable_checkpointing=True),
    "max_steps over epochs": feature(max_steps=5, max_epochs=-1),
    "limits and frequencies": feature(
        evaluates="one", limit_train_batches=2, check_val_every_n_epoch=2, log_every_n_steps=1, max_epochs=3
    ),
    "fast_dev_run": feature(evaluates="one", fast_dev_run=2),
    "overfit one batch": feature(overfit_batches=1, max_epochs=3),
    "anomaly detection, deterministic": feature(GPT, detect_anomaly=True, deterministic="warn"),
}


def run(row: dict[str, Any], stages: int, replicas: int) -> Outcome:
    """Train one row in this process."""
    is_union = replicas == 1
    name = row["cls"].__name__
    base = "GPT" if issubclass(row["cls"], GPT) else "MLP"
    evaluation = even_of_the_union if is_union else even
    validation: Any = {"": None, "one": evaluation, "two": partial(two, evaluation)}[row["evaluates"]]
    shuffle = "overfit_batches" not in row["trainer"]  # Lightning does not shuffle then
    strategy = {"stages": stages, "microbatches": 3, **row.get("strategy", {})} if stages else None
    return fit(
        name,
        cls=row["cls"],
        strategy=strategy,
        trainer=row["trainer"],
        devices=max(1, stages * replicas),
        loader=UnionLoader(base, REPLICAS, BATCH, SAMPLES, is_union, shuffle),
        callbacks=row["callbacks"],
        validation=validation,
    )


def run_all(stages: int, replicas: int) -> dict[str, Outcome]:
    return {name: run(row, stages, replicas) for name, row in FEATURES.items()}


@cache
def outcomes(layout: str) -> list[dict[str, Outcome]]:
    stages, replicas = LAYOUTS[layout]
    return run_ranks(run_all, max(1, stages * replicas), stages, replicas, timeout=240)


def test_rows_do_what_they_are_called() -> None:
    """Rates change, runs stop early, windows step less often: a row that does nothing would prove nothing."""
    plain = outcomes("plain")[0]
    for name in ("a scheduler per step", "a plateau, validation in every epoch", "groups by name, own optimizer step"):
        assert len({str(rates) for rates, _ in plain[name].extra["rates"]}) > 1
    steps = {name: outcome.global_step for name, outcome in plain.items()}
    assert steps["early stopping"] == 4 * 3, "of five epochs"
    assert steps["accumulation with an incomplete window"] == 4
    assert steps["accumulation by schedule"] == 3 + 2
    assert steps["max_steps over epochs"] == 5
    assert plain["clipping by norm"].parameters.keys() == plain["tied weights, gpipe"].parameters.keys()
    assert not torch.equal(
        plain["clipping by norm"].parameters["norm.weight"], plain["tied weights, gpipe"].parameters["norm.weight"]
    )


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, layout: str) -> None:
    reference = outcomes("plain")[0][name]
    found = [rank[name] for rank in outcomes(layout)]
    assert reference.global_step > 0
    assert_union(reference, found, LAYOUTS[layout][1])
    for outcome in found:
        assert outcome.extra["rates"] == reference.extra["rates"]
        for key in reference.extra.keys() & {"best", "epochs"}:
            torch.testing.assert_close(outcome.extra[key], reference.extra[key], atol=1e-9, rtol=0)
