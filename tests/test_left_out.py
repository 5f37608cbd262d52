"""A training step that returns None leaves its batch out, on all stages, as without the strategy; or is refused."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pp.callbacks.bubble import BubbleMonitor
from tests.launch import run_ranks, try_ranks
from tests.models import MLP
from tests.training import Outcome, Table, assert_same, fit

#: which of the batches are left out
LEFT_OUT = (False, False, True, False, False, True, True, False)


def batches(lengths: tuple[int, ...] = (8,) * 8) -> Any:
    generator = torch.Generator().manual_seed(11)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    kept = [
        {"x": rand(length, 4 if is_left_out else 3, 8), "y": rand(length, 3), "is_left_out": is_left_out}
        for length, is_left_out in zip(lengths, LEFT_OUT, strict=False)
    ]
    return DataLoader(kept, batch_size=None)  # type: ignore[arg-type]


class Base(MLP):
    def loss(self, batch: Any) -> Tensor:
        loss = F.mse_loss(self.net(batch["x"].to(self.dtype)).mean(1), batch["y"].to(self.dtype))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class BeforeTheLayers(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("left_out", float(batch["is_left_out"]))
        return None if batch["is_left_out"] else self.loss(batch)


class AfterTheLayers(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch["is_left_out"] else loss


class ByShape(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch["x"].shape[1] > 3 else {"loss": self.loss(batch)}


class Tied(BeforeTheLayers):
    def __init__(self) -> None:
        super().__init__()
        self.net[4].weight = self.net[0].weight


def row(cls: type[Base], **options: Any) -> dict[str, Any]:
    return {"name": "MLP", "cls": cls, "loader": batches, **options}


ROWS = Table(
    {
        "before the layers": row(BeforeTheLayers),
        "after the layers": row(AfterTheLayers),
        "by shape": row(ByShape),
        "accumulated": row(BeforeTheLayers, trainer={"accumulate_grad_batches": 2}),
        "accumulated, tied": row(Tied, trainer={"accumulate_grad_batches": 3}),
        "clipped": row(AfterTheLayers, trainer={"gradient_clip_val": 0.1}),
        "in one micro-batch": row(BeforeTheLayers, microbatches=1),
        "auto": row(BeforeTheLayers, strategy={"schedule": "auto_1f1b"}),
    }
)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("key", ROWS.keys)
def test_a_batch_is_left_out(key: str, stages: int) -> None:
    plain = ROWS.plain(key)
    assert [not output for output in plain.outputs] == list(LEFT_OUT) * 2
    assert_same(plain, ROWS.piped(key, stages))


def test_loss_scales_go_on_alike() -> None:
    plugins = [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0, growth_interval=2))]
    options: dict[str, Any] = {**row(BeforeTheLayers), "trainer": {"plugins": plugins, "precision": None}}
    (plain,) = run_ranks(fit, 1, **options)
    assert_same(plain, run_ranks(fit, 2, strategy={"stages": 2, "microbatches": 3}, devices=2, **options), 1e-3)


class Monitor(BubbleMonitor):
    outcome: Outcome

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)


def test_times_are_those_of_batches_that_train() -> None:
    options = {**row(BeforeTheLayers), "callbacks": (Monitor,)}
    for outcome in run_ranks(fit, 2, strategy={"stages": 2, "microbatches": 3}, devices=2, **options):
        assert outcome.global_step == 2 * len(LEFT_OUT)


# --- what is refused ---


class ForFew(Base):
    few = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch["x"]) < self.few else self.loss(batch)


class ForMore(ForFew):
    few = 3


class ByValue(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx == 0 or batch["x"].sum() > 1e9 else None


class ByLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if batch_idx == 0 or loss > 1e9 else None


class AtFirst(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx else None


class Once(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss({**batch, "x": batch["x"][:, :3]})
        return None if batch_idx == 2 else loss


class OnceBefore(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else self.loss(batch)


BOOL = "let the batch carry a bool"
REFUSED = {
    "some micro-batches": (ForFew, (8, 8, 4), 1, f"None for 2 of 3 micro-batches, and a loss for others.*{BOOL}"),
    "all micro-batches, not the batch": (ForMore, (9, 9, 4), 1, f"and a loss for the whole batch.*{BOOL}"),
    "by values before the layers": (ByValue, (8, 8), 1, f"ended where 'net.0' was planned.*{BOOL}"),
    "by values after the layers": (ByLoss, (8, 8), 1, f"must return the loss.*{BOOL}"),
    "the first batch": (AtFirst, (8, 8), 1, "must return the loss for the first batch, by which the model is cut"),
    "once of its kind": (Once, (8,) * 7, 1, f"None for this batch when it was planned, and now it.*{BOOL}"),
    "once of its kind, before the layers": (OnceBefore, (8,) * 7, 1, "called layer 'net.0' where the end of the step"),
    "in two pipelines": (BeforeTheLayers, (8,) * 8, 2, "returns None, and 2 pipelines sum their gradients"),
}  # fmt: skip


def refused(cls: type[Base], lengths: tuple[int, ...], replicas: int) -> str:
    options = {"stages": 2 // replicas, "microbatches": 3}
    try:
        fit("MLP", options, devices=2, cls=cls, loader=lambda: batches(lengths))
    except Exception as error:
        return f"{error} {error.__cause__!r}"
    return "not refused"


@pytest.mark.parametrize("case", REFUSED)
def test_what_stages_could_not_know(case: str) -> None:
    cls, lengths, replicas, text = REFUSED[case]
    results = try_ranks(refused, 2, cls, lengths, replicas)
    for result in results:
        assert "not refused" not in str(result)
    texts = [str(result).replace("\n", " ") for result in results]
    assert all(re.search(text, one) for one in texts), texts
