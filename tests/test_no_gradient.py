"""Parameters that no gradient reaches have none, as in the plain run: not zeros, by which an optimizer would go.

Weight decay shrinks what has a gradient of zeros, and momentum moves it on; what has none is left alone. Code behind a
cut that detached what had crossed it trained the stages above it by zeros.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.launch import run_ranks
from tests.models import MLP, generator
from tests.test_replicas import UnionLoader
from tests.training import Outcome, Table, assert_same, fit


class Present(Callback):
    """Which parameters have a gradient after each batch."""

    outcome: Outcome

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        here = {name: p.grad is not None for name, p in pl_module.named_parameters() if not p.is_meta}
        self.outcome.extra.setdefault("present", []).append(here)


class Probing(MLP):
    """A head on what a backbone finds, with an optimizer that shrinks weights and keeps momentum."""

    def found(self, x: Tensor) -> Tensor:
        return self.net[:6](x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net[6](self.found(x).detach()), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 0.05, momentum=0.9, weight_decay=0.1)


class ProbingByAdam(Probing):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class EveryOther(Probing):
    """The backbone is trained by every other batch: there are gradients, and then there are none."""

    first = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.found(x)
        loss = F.mse_loss(self.net[6](h if batch_idx % 2 == self.first else h.detach()), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class EveryOtherFromTheSecond(EveryOther):
    first = 1


class FromTheSecondEpoch(Probing):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.found(x)
        return F.mse_loss(self.net[6](h if self.current_epoch else h.detach()), y)


class UntilTheSecondEpoch(Probing):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.found(x)
        return F.mse_loss(self.net[6](h.detach() if self.current_epoch else h), y)


class Both(Probing):
    """One output is used with its gradient and without; another, from further up, without."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        low = self.net[:1](x)
        h = self.net[1:6](low)
        return F.mse_loss(self.net[6](h) + self.net[6](h.detach() * low.detach()), y)


class LowerHalf(Probing):
    """What stands above the place that is detached has none; what stands below it has."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net[4:](self.net[:4](x).detach()), y)


class OnlyLogged(Probing):
    """A second head whose loss is shown, and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.net[:2](x)
        aside = F.mse_loss(self.side(h), y)
        self.log("aside", aside)
        return F.mse_loss(self.net[2:](h.detach()), y)


class FrozenFoot(Probing):
    def __init__(self) -> None:
        super().__init__()
        self.net[:2].requires_grad_(False)


class WithoutGrad(Probing):
    """The first half runs without gradients, and the next one is detached."""

    def found(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.net[:2](x)
        return self.net[2:6](x)


class _Nothing(torch.autograd.Function):
    """In the graph, with no gradient to give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class GivesNone(Probing):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net[6](_Nothing.apply(self.found(x))), y)  # type: ignore[no-untyped-call]


class Checkpointed(Probing):
    """A reentrant checkpoint around each layer."""

    def found(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.net[:6]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class AllDetached(Probing):
    """Nothing trains but a parameter that code between the layers holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x).detach() * self.scale, y)


class ByShape(Probing):
    """Wide batches train the backbone, narrow ones do not."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.found(x)
        return F.mse_loss(self.net[6](h if x.shape[1] > 2 else h.detach()).mean(1), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        source = generator(3)
        rows = torch.randn(20, 4, 8, generator=source), torch.randn(20, 3, generator=source)
        return DataLoader(TensorDataset(*rows), batch_size=5, collate_fn=_narrow)


def _narrow(samples: list[Any]) -> Any:
    """Every batch whose first number is negative is narrow."""
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return (x[:, :2] if x[0, 0, 0] < 0 else x), y


CLASSES: dict[str, type[Probing]] = {
    cls.__name__: cls
    for cls in (
        Probing, ProbingByAdam, EveryOther, EveryOtherFromTheSecond, FromTheSecondEpoch, UntilTheSecondEpoch, Both,
        LowerHalf, OnlyLogged, FrozenFoot, WithoutGrad, GivesNone, Checkpointed, AllDetached, ByShape,
    )
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {name: {"cls": cls} for name, cls in CLASSES.items()} | {
    "accumulated": {"cls": EveryOtherFromTheSecond, "trainer": {"accumulate_grad_batches": 2}},
    "clipped": {"cls": EveryOther, "trainer": {"gradient_clip_val": 0.05}},
    "clipped by value": {"cls": Probing, "trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "validated": {"cls": EveryOtherFromTheSecond, "validate": True, "trainer": {"val_check_interval": 2}},
    "recomputed": {"cls": EveryOther, "strategy": {"activation_checkpointing": True}},
    "all forwards first": {"cls": EveryOther, "strategy": {"schedule": "gpipe"}},
}
TABLE = Table({key: {"name": key, "callbacks": (Present,), **row} for key, row in ROWS.items()})


def assert_same_and_present(reference: Outcome, outcomes: list[Outcome]) -> None:
    assert_same(reference, outcomes)
    for rank, outcome in enumerate(outcomes):
        pairs = list(zip(outcome.extra["present"], reference.extra["present"], strict=True))
        assert pairs
        for here, everywhere in pairs:
            assert here == {name: everywhere[name] for name in here}, f"rank {rank}"


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("key", ROWS)
def test_what_no_gradient_reaches_has_none(key: str, stages: int) -> None:
    reference = TABLE.plain(key)
    if key not in ("FrozenFoot", "Both", "Checkpointed"):
        batches = reference.extra["present"]
        assert {True, False} <= {there for batch in batches for there in batch.values()}, "the case is none"
    assert_same_and_present(reference, TABLE.piped(key, stages))


@pytest.mark.parametrize("cls", [Probing, EveryOther])
def test_replicas_agree_on_it(cls: type[Probing]) -> None:
    """Two pipelines of two stages, beside the plain run on the union of their batches."""
    union, own = (UnionLoader("MLP", 2, 3, 18, union) for union in (True, False))
    options: dict[str, Any] = {"cls": cls, "callbacks": (Present,)}
    (reference,) = run_ranks(fit, 1, "MLP", loader=union, **options)
    strategy = {"stages": 2, "microbatches": 2}
    found = run_ranks(fit, 4, "MLP", loader=own, devices=4, strategy=strategy, **options)
    assert len({repr(o.extra["present"]) for o in found[:2]}) == 1
    for first in (found[:3:2], found[1::2]):
        for outcome in first:
            for name, parameter in outcome.parameters.items():
                torch.testing.assert_close(parameter, reference.parameters[name], atol=1e-9, rtol=0)
            for here, everywhere in zip(outcome.extra["present"], reference.extra["present"], strict=True):
                assert here == {name: everywhere[name] for name in here}
