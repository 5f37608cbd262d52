"""A step that comes to use what it did not use when it was planned is refused: stages would see made-up values.

Plans are made for each shape of batch. Code between layers that went by the epoch, the number of the step or of the
batch trained on placeholders without a word.
"""

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from tests.launch import Failed, try_ranks
from tests.models import MLP, DropoutMLP
from tests.training import Table, assert_same, fit


class LaterAux(MLP):
    """An auxiliary loss that begins in the second epoch."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:2](x)
        loss = F.mse_loss(self.net[2:](hidden), y)
        return loss + 0.3 * hidden.square().mean() if self.current_epoch >= 1 else loss


class LaterSkip(MLP):
    """A skip over layers that begins after two steps."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:2](x)
        middle = self.net[2:4](hidden)
        return F.mse_loss(self.net[4:](middle + hidden if self.global_step >= 2 else middle), y)


class EverySecondAux(DropoutMLP):
    """An auxiliary loss on every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[:1](x)
        loss = F.mse_loss(self.net[1:](hidden), y)
        return loss + 0.3 * hidden.square().mean() if batch_idx % 2 else loss


class GrowingAux(MLP):
    """As it should be written: always used, times a factor that begins at zero."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:2](x)
        return F.mse_loss(self.net[2:](hidden), y) + 0.3 * self.current_epoch * hidden.square().mean()


@pytest.mark.parametrize("cls", [LaterAux, LaterSkip, EverySecondAux])
def test_a_use_that_was_not_planned_is_refused(cls: type[MLP]) -> None:
    results = try_ranks(fit, 3, "MLP", strategy={"stages": 3, "microbatches": 3}, devices=3, cls=cls)
    assert all(isinstance(result, Failed) for result in results)
    assert any("ChangedStepError" in result.text and "use the value every time" in result.text for result in results)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_factor_that_begins_at_zero_is_the_way(stages: int) -> None:
    rows = Table({"growing": {"name": "MLP", "cls": GrowingAux}})
    assert_same(rows.plain("growing"), rows.piped("growing", stages))
