"""What other pipelines are known to do too often, or to keep too long, counted."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pp import PipelineStrategy
from lightning_pp.runtime import average
from tests.known.models import Descending, Normalised
from tests.launch import run_ranks
from tests.models import MLP
from tests.test_stages import wide_batch
from tests.training import QUIET


def fit(module: LightningModule, microbatches: int, loader: Any, replicas: int = 1, **options: Any) -> Trainer:
    devices = int(os.environ["WORLD_SIZE"])
    arguments = {"stages": devices // replicas, "microbatches": microbatches, **options.pop("strategy", {})}
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=PipelineStrategy(**arguments),
        **{"max_epochs": 1, **QUIET, **options},
    )  # fmt: skip
    trainer.fit(module, loader)
    return trainer


def statistics(recomputes: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Normalised()
    fit(module, 4, module.loader(), strategy={"activation_checkpointing": recomputes})
    return {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}


def test_recomputing_moves_no_statistics() -> None:
    found = [run_ranks(statistics, 2, recomputes) for recomputes in (False, True)]
    assert_equal(*({k: v for rank in ranks for k, v in rank.items()} for ranks in found))


def test_batch_statistics_move_once_for_each_micro_batch() -> None:
    """Three batches in four micro-batches: 12 times, planning not counted, and alike for any number of stages."""
    (one,) = run_ranks(statistics, 1, False)
    two = {name: buffer for rank in run_ranks(statistics, 2, False) for name, buffer in rank.items()}
    assert [one[f"net.{index}.num_batches_tracked"].item() for index in (1, 4)] == [12, 12]
    assert_equal(one, two)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class Noted(nn.Module):
    """A layer that counts which of its outputs still have memory when it is called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.outputs: list[StorageWeakRef] = []
        self.alive = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x) * 1.0  # autograd itself keeps no output of a multiplication by a number
        if type(out) is Tensor and not out.is_meta:
            self.outputs.append(StorageWeakRef(out.untyped_storage()))
            self.alive = max(self.alive, sum(not one.expired() for one in self.outputs))
        return out


def alive(microbatches: int) -> int:
    """The most outputs of this rank's last layer, which are sent or make the loss, that were there at once."""
    torch.manual_seed(0)
    module = MLP()
    module.net = nn.Sequential(*(Noted(nn.Linear(8, 8)) for _ in range(2)), Noted(nn.Linear(8, 3)))
    fit(module, microbatches, wide_batch(64), strategy={"split": ["net.1", "net.2"]})
    return max(layer.alive for layer in module.net if not layer.inner.weight.is_meta)  # type: ignore[union-attr]


def test_outputs_go_with_their_micro_batch() -> None:
    few, many = run_ranks(alive, 3, 8), run_ranks(alive, 3, 32)
    assert many == few
    assert many[-1] == 1, "the last stage keeps no output but the one it computes with"


def reductions(microbatches: int, accumulate: int) -> int:
    """Sums over the replicas in an epoch of six batches."""
    number = [0]
    original = average._Bucket.__init__

    def counting(*args: Any, **kwargs: Any) -> None:
        number[0] += 1
        original(*args, **kwargs)

    average._Bucket.__init__ = counting  # type: ignore[method-assign]
    fit(Descending(), microbatches, Descending.loader(), 2, limit_train_batches=2, accumulate_grad_batches=accumulate)
    return number[0]


def test_replicas_are_summed_once_a_step() -> None:
    """However many micro-batches a batch has, and batches a step."""
    assert run_ranks(reductions, 4, 1, 1) == run_ranks(reductions, 4, 4, 1) == [2] * 4
    assert run_ranks(reductions, 4, 4, 2) == [1] * 4


class NoNewGroups(Callback):
    """Counts groups of processes that are made once training has started."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.number = 0
        original = dist.new_group

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return original(*args, **kwargs)

        dist.new_group = counting  # type: ignore[assignment]


def groups_made_late() -> int:
    watch = NoNewGroups()
    fit(MLP(), 3, MLP.loader(), callbacks=[watch])
    return watch.number


def test_no_group_is_made_in_training() -> None:
    assert run_ranks(groups_made_late, 3) == [0] * 3


class ReturnsNoneOnce(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx == 1 else loss


class FSDPBlock(nn.Linear):
    """What ``fully_shard`` makes of a class: one of this name."""


class Sharded(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = FSDPBlock(8, 8)


def refused(cls: type[LightningModule]) -> str:
    try:
        fit(cls(), 2, MLP.loader())
    except Exception as error:
        return f"{error} {error.__cause__!r}"
    return "not refused"


def test_a_batch_that_is_left_out_is_an_error_on_every_rank() -> None:
    """The last stage alone knows that there is no loss."""
    for text in run_ranks(refused, 2, ReturnsNoneOnce):
        assert "ReturnsNoneOnce.training_step must return the loss" in text


def test_sharded_blocks_are_refused_by_name() -> None:
    for text in run_ranks(refused, 2, Sharded):
        assert "Sharded.net.2 is wrapped in FSDPBlock. Give PipelineStrategy the plain module." in text
