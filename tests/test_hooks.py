"""Hooks see what they see without the strategy: gradients, losses, schedulers, modes."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from tests.models import MLP, MODELS
from tests.training import Outcome, Table, assert_same


def gradients(module: LightningModule) -> dict[str, float | None]:
    return {
        name: None if p.grad is None else p.grad.double().sum().item()
        for name, p in module.named_parameters()
        if not p.is_meta
    }


class GradientWatch(Callback):
    """Notes every hook between training_step and the optimizer's step, with the gradients at that time."""

    outcome: Outcome

    def note(self, hook: str, module: LightningModule) -> None:
        self.outcome.extra.setdefault("seen", []).append((hook, gradients(module)))

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.note("on_before_zero_grad", pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self.note("on_before_backward", pl_module)
        self.outcome.extra.setdefault("losses", []).append(loss.item())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note("on_after_backward", pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.note("on_before_optimizer_step", pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.note("on_train_batch_end", pl_module)
        self.outcome.extra.setdefault("rates", []).append(trainer.optimizers[0].param_groups[0]["lr"])
        self.outcome.extra.setdefault("modes", []).append(all(m.training for m in pl_module.modules()))


class LateWatch(GradientWatch):
    """Does not look between training_step and backward: the case in which no gradient is held twice."""

    on_before_zero_grad = Callback.on_before_zero_grad
    on_before_backward = Callback.on_before_backward


WATCHED = Table(
    {
        (watch.__name__, accumulate): {
            "name": "GPT",
            "callbacks": (watch,),
            "trainer": {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1},
        }
        for watch in (GradientWatch, LateWatch)
        for accumulate in (1, 3)
    }
    | {"Measured": {"name": "Measured", "validate": True, "trainer": {"max_epochs": 3}}}
)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("watch", ["GradientWatch", "LateWatch"])
def test_gradients_at_every_hook(stages: int, accumulate: int, watch: str) -> None:
    reference, found = WATCHED.plain((watch, accumulate)), WATCHED.piped((watch, accumulate), stages)
    assert_same(reference, found)
    for outcome in found:
        assert outcome.extra.get("losses") == pytest.approx(reference.extra.get("losses"), abs=1e-9)
        assert outcome.extra["modes"] == reference.extra["modes"]
        assert [hook for hook, _ in outcome.extra["seen"]] == [hook for hook, _ in reference.extra["seen"]]
        for (hook, ours), (_, theirs) in zip(outcome.extra["seen"], reference.extra["seen"], strict=True):
            for name, value in ours.items():
                assert value == pytest.approx(theirs[name], abs=1e-9), f"{name} in {hook}"


class TiedWatch(Callback):
    outcome: Outcome

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        tied = dict(pl_module.named_parameters())["tok.weight"]
        self.outcome.extra.setdefault("tied", []).append(None if tied.is_meta else tied.detach().clone())


TIED = Table(
    {
        name: {"name": name, "callbacks": (TiedWatch,), "trainer": {"gradient_clip_val": 0.1, "max_epochs": 3}}
        for name in ("GPT", "HeadInGlueGPT", "DropoutGPT")
    }
)


@pytest.mark.parametrize("name", TIED.keys)
def test_tied_copies_are_bit_equal_after_every_step(name: str) -> None:
    found = TIED.piped(name, 3)
    first, between, last = (outcome.extra["tied"] for outcome in found)
    assert len(first) == 9
    assert between == [None] * 9
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))
    assert not torch.equal(first[0], first[-1])


class ScheduledMLP(MLP):
    """Warm-up per step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PlateauMLP(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(
            [{"params": self.net[:3].parameters(), "lr": 0.05}, {"params": self.net[3:].parameters(), "lr": 0.02}]
        )
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch"}}


class ZeroGradKeeper(MLP):
    """Lets gradients of earlier steps decay rather than vanish."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class OwnClipping(MLP):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")


class Optimizers(MLP):
    """Looks at its optimizer and Trainer inside the step."""

    def loss(self, batch: Any) -> Any:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        return super().loss(batch) * (1 + rate + 0.1 * self.trainer.global_step)


class LogsALot(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("number", 3)
        self.log("sum", torch.ones(len(batch[0])).sum(), reduce_fx="sum", on_step=True, on_epoch=True, batch_size=8)
        self.log("max", batch[0].max(), reduce_fx="max", on_epoch=True)
        self.log_dict({"a": loss * 2, "b": loss * 3 + 1}, on_epoch=True)
        if batch_idx % 2 == 0:
            self.log("sometimes", loss + 1)
        return loss


for _cls in (ScheduledMLP, PlateauMLP, ZeroGradKeeper, OwnClipping, Optimizers, LogsALot):
    MODELS[_cls.__name__] = _cls


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_metrics_that_live_where_they_are_updated(stages: int) -> None:
    reference, found = WATCHED.plain("Measured"), WATCHED.piped("Measured", stages)
    assert {"train_error", "step_error", "mse", "mae"} <= reference.final.keys()
    assert_same(reference, found)


OWN = Table(
    {
        name: {"name": name, "trainer": {"max_epochs": 3}, "callbacks": (LateWatch,)}
        for name in ("ScheduledMLP", "PlateauMLP", "ZeroGradKeeper", "OwnClipping", "Optimizers", "LogsALot")
    }
)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", OWN.keys)
def test_what_a_module_may_do_in_its_hooks(name: str, stages: int) -> None:
    reference, found = OWN.plain(name), OWN.piped(name, stages)
    assert_same(reference, found)
    for outcome in found:
        assert outcome.extra["rates"] == reference.extra["rates"]
