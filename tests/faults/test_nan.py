"""A loss of one micro-batch that is not a number, and nobody who looks for it: all ranks go on as one process would."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.models import MLP, generator
from tests.training import Outcome, Table, whole


def poisoned() -> Any:
    """One sample is, in the second batch of an epoch."""
    source = generator(1)
    x, y = torch.randn(21, 8, generator=source), torch.randn(21, 3, generator=source)
    y[10, 2] = math.nan
    return DataLoader(TensorDataset(x, y), batch_size=8)


class InOneParameter(MLP):
    """Only the gradient of one bias is not a number, on the last stage."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), torch.nan_to_num(y)) + self.net[6].bias.sum() * (y[:, 2] * 0).mean()


class Stops(EarlyStopping):
    outcome: Outcome

    def __init__(self) -> None:
        super().__init__("train_loss_step", patience=100, check_finite=True, check_on_train_epoch_end=False)


HALF = {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0))], "precision": None}
#: the batch after it would spread what one parameter has caught
UNTIL_THEN = {"max_epochs": 1, "limit_train_batches": 2}
EACH_BATCH = {"val_check_interval": 1}
ROWS = Table(
    {
        "goes on": {"name": "MLP", "loader": poisoned},
        "clipped": {"name": "MLP", "loader": poisoned, "trainer": {"gradient_clip_val": 0.1}},
        "one parameter": {"name": "MLP", "cls": InOneParameter, "loader": poisoned, "trainer": UNTIL_THEN},
        "one parameter, clipped": {
            "name": "MLP", "cls": InOneParameter, "loader": poisoned,
            "trainer": {**UNTIL_THEN, "gradient_clip_val": 0.1},
        },
        "accumulated": {"name": "MLP", "loader": poisoned, "trainer": {"accumulate_grad_batches": 2}},
        "stopped": {
            "name": "MLP", "loader": poisoned, "validate": True, "trainer": EACH_BATCH, "callbacks": (Stops,)
        },
        "scaled": {"name": "MLP", "loader": poisoned, "trainer": HALF},
    }
)  # fmt: skip


@pytest.mark.parametrize("key", ROWS.keys)
def test_as_the_plain_run(key: str) -> None:
    plain, ranks = ROWS.plain(key), ROWS.piped(key, 3)
    tolerance = 2e-3 if key == "scaled" else 1e-9
    parameters = whole(ranks)
    assert parameters.keys() == plain.parameters.keys()
    for name, expected in plain.parameters.items():
        torch.testing.assert_close(parameters[name], expected, atol=tolerance, rtol=0, equal_nan=True)
    for outcome in ranks:
        assert outcome.global_step == plain.global_step
        assert len(outcome.metrics) == len(plain.metrics)
        for ours, theirs in zip([*outcome.metrics, outcome.final], [*plain.metrics, plain.final], strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance, nan_ok=True)


def test_the_plain_runs_meet_it() -> None:
    """So that the comparison above is about something."""
    finite = {key: [p.isfinite().all().item() for p in ROWS.plain(key).parameters.values()] for key in ROWS.keys}
    assert not any(finite["goes on"] + finite["clipped"] + finite["accumulated"] + finite["one parameter, clipped"])
    assert set(finite["one parameter"]) == {True, False}
    assert all(finite["scaled"])
    assert all(math.isnan(ROWS.plain(key).metrics[1]["train_loss_step"]) for key in ROWS.keys)
    assert ROWS.plain("stopped").global_step == 2
    assert ROWS.plain("scaled").global_step == ROWS.plain("goes on").global_step == 6
