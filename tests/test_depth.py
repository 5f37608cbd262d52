"""Extra micro-batches in flight: by hand, and chosen in the run."""

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_pp import PipelineStrategy
from lightning_pp.runtime import links
from lightning_pp.runtime.comm import Peer, Pending
from tests.callbacks.sleeping import Sleepy
from tests.launch import run_ranks
from tests.training import QUIET, Table, assert_same, fit


class Schedules(Callback):
    """What each step went by, and the most micro-batches that were in flight in it."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if isinstance(trainer.strategy, PipelineStrategy):
            trainer.strategy.pipeline.engine.reset_peaks()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            return
        pipeline = trainer.strategy.pipeline
        seen = self.outcome.extra.setdefault("steps", [])  # type: ignore[attr-defined]
        seen.append((pipeline.schedule, pipeline.engine.in_flight_peak))


ROWS = {
    "auto": {"name": "MLP", "microbatches": 5, "strategy": {"schedule": "auto_1f1b"}, "callbacks": (Schedules,)},
    "auto, accumulating": {
        "name": "MLP",
        "microbatches": 3,
        "strategy": {"schedule": "auto_1f1b"},
        "trainer": {"accumulate_grad_batches": 3},
        "callbacks": (Schedules,),
    },
    "one number": {"name": "MLP", "microbatches": 5, "strategy": {"schedule": "1f1b+1"}, "callbacks": (Schedules,)},
}
TABLE = Table(ROWS)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("key", ROWS)
def test_results_are_those_of_the_plain_run(key: str, stages: int) -> None:
    assert_same(TABLE.plain(key), TABLE.piped(key, stages))


@pytest.mark.parametrize("stages", [2, 3])
def test_all_ranks_choose_the_same_after_the_measured_step(stages: int) -> None:
    ranks = TABLE.piped("auto", stages)
    names = [[name for name, _ in outcome.extra["steps"]] for outcome in ranks]
    assert all(one == names[0] for one in names)
    assert names[0][:2] == ["auto_1f1b"] * 2
    assert len(set(names[0][2:])) == 1
    assert names[0][2].startswith("1f1b+")


def test_one_number_is_one_more_where_it_can_be_used() -> None:
    ranks = TABLE.piped("one number", 3)
    assert [outcome.extra["steps"][0][1] for outcome in ranks] == [4, 3, 1]


class SlowPeer(Peer):
    """A link on which messages take 30 ms: they carry when they were sent."""

    def send(self, tensor: Any) -> Pending:
        stamp = super().send(torch.tensor([time.monotonic()], dtype=torch.float64))
        stamp.wait()
        return super().send(tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        return Late(super().receive((1,), torch.float64), super().receive(shape, dtype))


class Late(Pending):
    def __init__(self, stamp: Pending, message: Pending) -> None:
        self._parts = stamp, message

    def wait(self) -> Any:
        stamp, message = self._parts
        sent, tensor = float(stamp.wait()), message.wait()
        time.sleep(max(0.0, sent + 0.03 - time.monotonic()))
        return tensor


class ManySleepy(Sleepy):
    forward_seconds = (0.03, 0.03)
    backward_seconds = (0.03, 0.03)
    steps = 4


def _slow_link() -> tuple[str, int]:
    links.Peer = SlowPeer  # type: ignore[misc]
    module = ManySleepy()
    strategy = PipelineStrategy(stages=2, microbatches=8, schedule="auto_1f1b", split=["net.1"])
    trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, **QUIET)
    trainer.fit(module, module.loader())
    engine = strategy.pipeline.engine
    return strategy.pipeline.schedule, engine.in_flight_peak


@pytest.mark.alone
def test_a_slow_link_is_hidden_by_one_more_micro_batch_before_it() -> None:
    (name, first), (other, last) = run_ranks(_slow_link, 2)
    assert name == other == "1f1b+1,0"
    assert (first, last) == (3, 1)


def test_the_schedule_may_be_set_by_rank() -> None:
    outcomes = run_ranks(
        fit, 3, "MLP", strategy={"stages": 3, "microbatches": 6, "schedule": "1f1b+2,1,0"}, devices=3,
        callbacks=(Schedules,),
    )  # fmt: skip
    assert [outcome.extra["steps"][0][1] for outcome in outcomes] == [5, 3, 1]
