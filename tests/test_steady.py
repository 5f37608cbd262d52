"""The steady state: once every shape has been seen, nothing is planned, announced or run that a step does not need."""

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pp import PipelineStrategy
from lightning_pp.runtime.channel import Sender
from lightning_pp.runtime.planner import Planner
from tests.launch import run_ranks
from tests.models import Module
from tests.training import QUIET

LENGTHS = (5, 9)


class Tokens(Module):
    """Batches of two lengths in turn; counts what its layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.calls: Counter[str] = Counter()
        for name, layer in (("embedding", self.embedding), *((f"blocks.{i}", b) for i, b in enumerate(self.blocks))):
            layer.register_forward_hook(self._counting(name))

    def _counting(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.calls[name] += not isinstance(output, torch._subclasses.FakeTensor)

        return hook

    def loss(self, batch: Any) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x).tanh()
        return F.mse_loss(x, torch.zeros_like(x))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _run(epochs: int, seen: Counter[str]) -> tuple[Counter[str], Counter[str]]:
    plan, header = Planner._planned, Sender._send_header

    def planned(self: Any, name: str, *args: Any) -> Any:
        seen[name] += 1
        return plan(self, name, *args)

    def send_header(self: Any, *args: Any) -> Any:
        seen["headers"] += 1
        return header(self, *args)

    Planner._planned, Sender._send_header = planned, send_header  # type: ignore[method-assign]
    module = Tokens()
    batches = [torch.full((6, LENGTHS[number % 2]), number % 11) for number in range(4)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    strategy = PipelineStrategy(stages=2, microbatches=3, split=["blocks.1"])
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, num_sanity_val_steps=0, **QUIET
    )
    trainer.fit(module, loader, loader)
    return seen, module.calls


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_length_is_planned_and_announced_once(epochs: int) -> None:
    (first, calls), (last, others) = run_ranks(_run, 2, epochs, Counter())
    assert first["training_step"] == last["training_step"] == len(LENGTHS)
    assert first["validation_step"] == last["validation_step"] == len(LENGTHS)
    # one for each length in training, and one in validation, which has plans of its own; gradients need none
    assert (first["headers"], last["headers"]) == (2 * len(LENGTHS), 0)
    # 4 batches of 3 micro-batches, in training and in validation: no layer runs more often than that
    assert calls + others == dict.fromkeys(("embedding", "blocks.0", "blocks.1", "blocks.2"), epochs * 2 * 4 * 3)


def _peaks(microbatches: int) -> tuple[int, int]:
    module = Tokens()
    loader = DataLoader([torch.ones(32, 5, dtype=torch.int64)] * 2, batch_size=None)  # type: ignore[arg-type]
    strategy = PipelineStrategy(stages=2, microbatches=microbatches)
    Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET).fit(module, loader)
    return strategy.pipeline.engine.in_flight_peak, strategy.pipeline.engine.buffers_peak


def test_what_is_held_does_not_grow_with_the_number_of_micro_batches() -> None:
    few, many = (run_ranks(_peaks, 2, number) for number in (4, 32))
    assert few == many
    assert [in_flight for in_flight, _ in many] == [2, 1]
