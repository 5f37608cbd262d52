"""validate, test and predict: forward only, the plain run's numbers on every rank, in any order with fit."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import MLP
from tests.training import QUIET


class Evaluated(MLP):
    """Drops out in training only, and returns something from every step."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        rows = self.net(batch[0])
        loss = torch.nn.functional.mse_loss(rows, batch[1])
        self.log("val_loss", loss)
        return {"loss": loss, "rows": rows}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))
        self.log("biggest", batch[1].max(), reduce_fx="max")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"out": self.net(self.drop(batch[0])), "ids": [float(x) for x in batch[0][:, 0]]}


def evaluate(order: tuple[str, ...], stages: int) -> dict[str, Any]:
    torch.manual_seed(3)
    module = Evaluated().double()
    options: dict[str, Any] = {"devices": max(stages, 1), "precision": "64-true", **QUIET}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=3)
    trainer = Trainer(accelerator="cpu", max_epochs=1, **options)
    found: dict[str, Any] = {}
    for number, name in enumerate(order):
        if name == "fit":
            trainer.fit(module, MLP.loader(), MLP.loader())
            found[f"{number} fit"] = {k: v.item() for k, v in trainer.callback_metrics.items()}
        elif name == "predict":
            predictions = trainer.predict(module, MLP.loader())
            found[f"{number} predict"] = [(p["out"].tolist(), p["ids"]) for p in predictions or []]
        else:
            found[f"{number} {name}"] = getattr(trainer, name)(module, MLP.loader(), verbose=False)
        found[f"{number} training"] = [m.training for m in module.modules()]
    return found


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    "order", [("validate",), ("predict",), ("test", "fit", "validate", "fit", "predict"), ("fit", "test", "predict")]
)
def test_evaluation_in_any_order(order: tuple[str, ...], stages: int) -> None:
    (reference,) = run_ranks(evaluate, 1, order, 0)
    for found in run_ranks(evaluate, stages, order, stages):
        assert found.keys() == reference.keys()
        for key, expected in reference.items():
            assert_close(found[key], expected)


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == pytest.approx(expected, abs=1e-9)


class TwoPasses(MLP):
    """A validation step that goes through the model twice, one pass after the other."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.net(batch[0] + 1)


def two_passes(stages: int) -> str:
    strategy = PipelineStrategy(stages=stages, microbatches=2)
    trainer = Trainer(accelerator="cpu", devices=stages, strategy=strategy, max_epochs=1, **QUIET)
    try:
        trainer.fit(TwoPasses(), MLP.loader(), MLP.loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def test_a_step_that_goes_back_to_an_earlier_stage_is_refused() -> None:
    for text in run_ranks(two_passes, 2, 2):
        assert text.startswith("MisconfigurationException: validation_step: Layer 'net.0' runs on stage(s) [0]")
    assert run_ranks(two_passes, 1, 1) == ["ran"]


def use_outside(stages: int) -> str:
    module = MLP()
    trainer = Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=PipelineStrategy(stages=stages, microbatches=2),
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(module, MLP.loader())
    try:
        module.net(torch.zeros(1, 8))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def test_the_model_of_one_stage_cannot_be_used_alone() -> None:
    for text in run_ranks(use_outside, 2, 2):
        assert text.startswith("MisconfigurationException: Layer ")
        assert "save a checkpoint and load it with load_from_checkpoint" in text
    assert run_ranks(use_outside, 1, 1) == ["ran"]
