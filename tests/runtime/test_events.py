"""What a rank did when: every op once, without gaps, and nothing at all where nobody listens."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_pp.runtime.comm import Clock
from lightning_pp.runtime.events import Recorder, StepRecord
from lightning_pp.schedule import Kind, Op, lower, one_f_one_b
from tests.launch import run_ranks
from tests.training import Outcome, fit, plain


class Listener(Callback):
    """Writes down the steps of its rank."""

    outcome: Outcome

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.extra["records"] = []
        pipeline = trainer.strategy.pipeline  # type: ignore[attr-defined]
        self.recorder = pipeline.record(self.outcome.extra["records"].append)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.recorder.end()
        self.recorder.end()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_is_recorded_without_gaps(stages: int) -> None:
    trainer = {"accumulate_grad_batches": 2, "max_epochs": 1}
    strategy = {"stages": stages, "microbatches": 3}
    outcomes = run_ranks(fit, stages, "MLP", strategy=strategy, devices=stages, trainer=trainer, callbacks=(Listener,))
    assert outcomes[0].global_step == plain("MLP", trainer=trainer).global_step == 2
    for rank, outcome in enumerate(outcomes):
        records: list[StepRecord] = outcome.extra["records"]
        assert [record.number for record in records] == [0, 1, 2]
        for record in records:
            assert all(a.stop == b.start for a, b in zip(record.events, record.events[1:], strict=False))
            assert all(event.seconds >= 0 for event in record.events)
            ops = [event.what for event in record.events if isinstance(event.what, Op)]
            assert tuple(ops) == lower(one_f_one_b(stages, 3)).programs[rank]
            others = [event.what for event in record.events if isinstance(event.what, str)]
            # of three batches in windows of two, the second and the last step
            ends = ["optimizer"] if record.number else []
            assert others == ["prepare", "reduce", "share", "hooks", *ends]


def test_a_step_that_was_not_ended_is_forgotten() -> None:
    found: list[StepRecord] = []
    recorder = Recorder(Clock(torch.device("cpu")))
    recorder.subscribe(found.append)
    recorder.mark("nothing is open")
    recorder.begin(3)
    recorder.mark(Op(0, Kind.F, 0))
    recorder.begin(4)
    recorder.mark("reduce")
    recorder.end()
    recorder.end()
    assert [(record.number, [event.what for event in record.events]) for record in found] == [(4, ["reduce"])]
    assert found[0].start <= found[0].stop
