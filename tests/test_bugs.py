"""One test per fault that was found and fixed, with its story, for its whole kind."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.models import MLP, MODELS
from tests.training import Outcome, assert_same, fit, piped, plain


class OtherNames(MLP):
    """Calls its batch index something else, as Lightning allows."""

    def training_step(self, b: Any, i: int) -> Any:
        loss = F.mse_loss(self.net(b[0]), b[1]) * (1 + i)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, b: Any, i: int) -> None:
        self.log("val_loss", self.loss(b) + i)


class BatchOnly(MLP):
    """Takes no batch index at all."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch))


class AnyArguments(MLP):
    def training_step(self, *args: Any) -> Any:
        return self.loss(args[0]) + args[1]


MODELS |= {cls.__name__: cls for cls in (OtherNames, BatchOnly, AnyArguments)}


@pytest.mark.parametrize("name", ["OtherNames", "BatchOnly", "AnyArguments"])
def test_step_functions_take_what_lightning_gives_them(name: str) -> None:
    """Planning looked for a parameter named ``batch_idx``; Lightning passes it by position to any second one."""
    validate = name != "AnyArguments"
    assert_same(plain(name, validate=validate), piped(name, 2, 3, validate=validate))


def test_another_default_dtype() -> None:
    """The first exchange on a channel was made in the default dtype on one end and in float32 on the other."""
    from tests.launch import run_ranks

    reference = run_ranks(fit_in_double, 1, None)[0]
    for outcome in run_ranks(fit_in_double, 2, {"stages": 2, "microbatches": 3}):
        for name, parameter in outcome.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], atol=1e-9, rtol=0)


def fit_in_double(strategy: Any) -> Outcome:
    torch.set_default_dtype(torch.float64)
    return fit("MLP", strategy, trainer={"precision": "32-true"}, devices=2 if strategy else 1)
