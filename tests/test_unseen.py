"""Layers that are not run when a new shape is planned: results are those of the plain run, and a wrong plan is loud."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.launch import Failed, try_ranks
from tests.models import MODELS, Block, UntiedGPT, generator
from tests.replanned import replanned
from tests.training import Table, assert_same, fit

LENGTHS = (6, 4, 9, 6, 7, 5)


class Lengths(UntiedGPT):
    """Five blocks that are alike, though each has a number, and batches of many lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(12, 3) for _ in range(5))
        for number, block in enumerate(self.blocks):
            block.number = number  # type: ignore[assignment]

    @classmethod
    def loader(cls) -> DataLoader[Any]:
        batches = [torch.randint(0, cls.vocabulary, (5, length), generator=generator(length)) for length in LENGTHS]
        return DataLoader([[ids] for ids in batches], batch_size=None)  # type: ignore[arg-type]


class NotRun(Callback):
    """Writes down which layers have not been run, in plans of each step function."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(trainer.strategy, "pipeline"):
            plans = trainer.strategy.pipeline._planner._plans  # type: ignore[attr-defined]
            self.outcome.extra["not run"] = [(key[0], len(plan.trace.not_run)) for key, plan in plans.items()]  # type: ignore[attr-defined]


ROWS = Table({"lengths": {"name": "lengths", "cls": Lengths, "callbacks": (NotRun,), "validate": True}})


@pytest.mark.parametrize("stages", [2, 3])
def test_many_lengths_train_as_without_the_strategy(stages: int) -> None:
    outcomes = ROWS.piped("lengths", stages)
    assert_same(ROWS.plain("lengths"), outcomes)
    for outcome in outcomes:  # sizes 2 and 1, each in five lengths, and one of the blocks run for each
        found = outcome.extra["not run"]
        assert found.count(("training_step", 4)) == 2 * len(set(LENGTHS))
        # what the first shape shows in validation is good for the others
        assert sorted(number for name, number in found if name == "validation_step") == [0] + [4] * 9


PLACES: dict[int, int] = {}


class Hidden(Block):
    """Leaves out a token beyond a length, by what no plan can see."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        place = PLACES.setdefault(id(self), len(PLACES))
        y = super().forward(x, mask)
        return y[:, 1:] if place == 3 and x.shape[1] > 7 else y


class HiddenLengths(Lengths):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Hidden(12, 3) for _ in range(5))

    def loss(self, batch: Any) -> Tensor:
        return self(batch[0]).square().mean()


def test_a_wrong_plan_ends_all_ranks_and_says_what_to_do() -> None:
    strategy = {"stages": 2, "microbatches": 3, "split": ["blocks.3"]}
    results = try_ranks(fit, 2, "lengths", strategy=strategy, devices=2, cls=HiddenLengths)
    assert all(isinstance(result, Failed) for result in results)
    text = next(result.text for result in results if "ChangedStepError" in result.text)
    assert "layer 'blocks.3' returned (2, 8, 12) torch.float64 where (2, 9, 12) torch.float64 was planned" in text
    assert "layer 'blocks.0'" in text or "layer 'blocks.1'" in text
    assert "Keep there what tells these two apart (a number given to __init__)" in text


#: other files add models that go with their tests
_OWN = sorted(name for name, cls in MODELS.items() if cls.__module__ == Block.__module__)
#: what cannot be planned outside of a Trainer, or not at all
_OTHERS = {"BatchOnly", "BuiltLate", "Contrasting", "DemoLSTM", "LSTM"}


@pytest.mark.parametrize("name", [name for name in _OWN if name not in _OTHERS])
def test_a_new_shape_is_planned_as_if_all_layers_were_run(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    short, whole = replanned(module, next(iter(module.loader())))
    assert short == whole
    assert not whole.not_run
