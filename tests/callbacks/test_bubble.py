"""The measured bubble is the one that known times must give, and the loggers have it."""

import csv
import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pp import BubbleMonitor
from lightning_pp.callbacks import bubble
from lightning_pp.runtime.comm import Clock
from lightning_pp.schedule import Costs, one_f_one_b, simulate
from tests.callbacks.sleeping import Sleepy, UnequalReplicas, UnequalSleepy
from tests.launch import run_ranks
from tests.models import MLP
from tests.training import QUIET, Outcome, fit

MICROBATCHES = 4

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


class Kept(BubbleMonitor):
    """Keeps each measurement, and what it proposes."""

    outcome: Outcome

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.extra |= {"kept": [], "hints": []}
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        before = self.last
        super().on_train_batch_end(trainer, pl_module, *args)
        if self.last is not before:
            self.outcome.extra["kept"].append((trainer.global_step, self.last))


class HintHandler(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def measured(cls: type[Sleepy], folder: Path, loggers: tuple[type[Any], ...], strategy: dict[str, Any]) -> Outcome:
    """Train on this rank, with these loggers."""
    found = [logger(save_dir=folder / logger.__name__, name="", version="") for logger in loggers]
    handler = HintHandler()
    for name in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    devices = strategy.pop("devices")
    trainer = {"max_epochs": 1, "logger": found, **strategy.pop("trainer")}
    outcome = fit("", cls=cls, strategy=strategy, devices=devices, trainer=trainer, callbacks=(Kept,))
    outcome.extra["hints"] = [text for text in handler.said if text.startswith("BubbleMonitor")]
    return outcome


def run(
    cls: type[Sleepy],
    folder: Path,
    loggers: tuple[type[Any], ...] = (CSVLogger,),
    replicas: int = 1,
    accumulate: int = 1,
    every: int = 2,
) -> list[Outcome]:
    stages = 2 if replicas > 1 else len(cls.forward_seconds)
    split = [f"net.{stage}" for stage in range(1, stages)]
    trainer = {"log_every_n_steps": every, "accumulate_grad_batches": accumulate}
    strategy = {
        "stages": stages,
        "microbatches": MICROBATCHES,
        "split": split,
        "devices": stages * replicas,
        "trainer": trainer,
    }
    return run_ranks(measured, stages * replicas, cls, folder, loggers, strategy)


def quietest(outcome: Outcome) -> dict[str, float]:
    """The measurement that was disturbed least: other processes can make a step longer, not shorter."""
    kept: list[dict[str, float]] = [values for _, values in outcome.extra["kept"]]
    return min(kept, key=lambda values: values["pipeline/span_seconds"])


@pytest.mark.alone
@pytest.mark.parametrize("cls", [Sleepy, UnequalSleepy])
def test_known_times_give_the_known_bubble(cls: type[Sleepy], tmp_path: Path) -> None:
    outcomes = run(cls, tmp_path, (CSVLogger, TensorBoardLogger) if HAS_TENSORBOARD else (CSVLogger,))
    stages = len(outcomes)
    costs = Costs(forward=cls.forward_seconds, backward=cls.backward_seconds)
    expected = simulate(one_f_one_b(stages, MICROBATCHES), costs)
    values = quietest(outcomes[0])
    for stage in range(stages):
        name = f"pipeline/stage{stage}"
        assert values[f"{name}/bubble_fraction"] == pytest.approx(expected.bubble_fractions[stage], abs=0.02)
        for kind, seconds in (("forward", cls.forward_seconds), ("backward", cls.backward_seconds)):
            assert values[f"{name}/{kind}_seconds"] == pytest.approx(MICROBATCHES * seconds[stage], abs=0.02)
    assert values["pipeline/bubble_fraction"] == pytest.approx(expected.bubble_fraction, abs=0.02)
    assert values["pipeline/simulated_bubble_fraction"] == pytest.approx(expected.bubble_fraction, abs=0.02)
    closed_form = values["pipeline/closed_form_bubble_fraction"]
    assert closed_form == pytest.approx((stages - 1) / (MICROBATCHES + stages - 1))
    if cls is Sleepy:
        assert values["pipeline/bubble_fraction"] == pytest.approx(closed_form, abs=0.02)
    assert values["pipeline/span_seconds"] == pytest.approx(expected.makespan, rel=0.05)
    assert [step for step, _ in outcomes[0].extra["kept"]] == [2, 4, 6]
    assert all(outcome.extra["kept"] == outcomes[0].extra["kept"] for outcome in outcomes)
    check_logs(tmp_path, outcomes[0])
    check_hints(cls, outcomes)


def check_logs(folder: Path, outcome: Outcome) -> None:
    """All loggers have all keys, from the first logged step on."""
    kept = [values for _, values in outcome.extra["kept"]]
    with (folder / "CSVLogger" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["pipeline/bubble_fraction"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    for row, values in zip(rows, kept, strict=True):
        assert {name: float(row[name]) for name in values} == pytest.approx(values)
    if HAS_TENSORBOARD:
        check_tensorboard(folder, kept)


def check_tensorboard(folder: Path, kept: list[dict[str, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "TensorBoardLogger"))
    events.Reload()
    assert set(kept[0]) <= set(events.Tags()["scalars"])
    for name in kept[0]:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(values[name])) for step, values in zip((1, 3, 5), kept, strict=True)]


def check_hints(cls: type[Sleepy], outcomes: list[Outcome]) -> None:
    """One, on rank 0."""
    expected = "microbatches=16 would make that" if cls is Sleepy else "stage 1 takes 1.7 times the mean"
    assert [len(outcome.extra["hints"]) for outcome in outcomes] == [1] + [0] * (len(outcomes) - 1)
    assert expected in outcomes[0].extra["hints"][0]


@pytest.mark.alone
def test_replicas_are_averaged_and_the_batch_that_steps_is_measured(tmp_path: Path) -> None:
    outcomes = run(UnequalReplicas, tmp_path, replicas=2, accumulate=2, every=1)
    values = quietest(outcomes[0])
    forward, backward = UnequalReplicas.forward_seconds, UnequalReplicas.backward_seconds
    expected = simulate(one_f_one_b(2, MICROBATCHES), Costs(forward=forward, backward=backward))
    for stage in range(2):
        name = f"pipeline/stage{stage}"
        assert values[f"{name}/forward_seconds"] == pytest.approx(1.5 * MICROBATCHES * forward[stage], abs=0.03)
        assert values[f"{name}/bubble_fraction"] == pytest.approx(expected.bubble_fractions[stage], abs=0.05)
        # the first pipeline is done in half the time and waits for the other
        assert values[f"{name}/reduce_seconds"] > 0.15
        assert values[f"{name}/optimizer_seconds"] > 0
    assert [step for step, _ in outcomes[3].extra["kept"]] == [1, 2]


def test_a_single_stage(tmp_path: Path) -> None:
    monitor = {"max_epochs": 1, "log_every_n_steps": 1}
    (outcome,) = run_ranks(fit, 1, "MLP", strategy={"stages": 1, "microbatches": 3}, trainer=monitor, callbacks=(Kept,))
    assert len(outcome.extra["kept"]) == 3
    values = quietest(outcome)
    assert values["pipeline/bubble_fraction"] == pytest.approx(0, abs=1e-9)
    assert values["pipeline/closed_form_bubble_fraction"] == 0
    assert values["pipeline/simulated_bubble_fraction"] == pytest.approx(0, abs=1e-9)
    assert values["pipeline/stage0/forward_seconds"] > 0


class Late(Kept):
    """Runs where devices are batches behind their hosts, and keeps what the end of training has brought, too."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.starts.append(time.monotonic())
        super().on_train_batch_start(trainer, pl_module, *args)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts: list[float] = []
        behind = int(os.environ["LOCAL_RANK"]) * int(os.environ["TEST_BEHIND"])
        # passed when so many batches have begun since, which the end of training need not wait for
        Clock.has_passed = (  # type: ignore[method-assign]
            lambda _, mark: sum(start > mark.host for start in self.starts) >= behind
        )
        super().on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts += [float("inf")] * 9
        super().on_train_end(trainer, pl_module)
        self.outcome.extra["measured"] = self._measured


def measured_late(behind: int) -> Outcome:
    """Train where rank 1's device passes a moment so many batches after its host."""
    os.environ["TEST_BEHIND"] = str(behind)
    bubble._is_exact = lambda trainer: False
    trainer = {"max_epochs": 3, "log_every_n_steps": 1}
    return fit("MLP", strategy={"stages": 2, "microbatches": 3}, devices=2, trainer=trainer, callbacks=(Late,))


@pytest.mark.parametrize("behind", [0, 2])
def test_a_device_that_lags_behind_is_measured_later(behind: int) -> None:
    outcomes = run_ranks(measured_late, 2, behind)
    assert outcomes[0].extra["kept"] == outcomes[1].extra["kept"]
    assert [outcome.extra["measured"] for outcome in outcomes] == [9, 9]
    # not at the end of the batch that is measured, but of the next one or the one after
    assert [step for step, _ in outcomes[0].extra["kept"]] == list(range(2 + behind // 2, 10))


def test_other_strategies_are_refused() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[BubbleMonitor()], **QUIET)
    with pytest.raises(MisconfigurationException, match="BubbleMonitor measures pipelines, but the Trainer's strategy"):
        trainer.fit(MLP(), MLP.loader(), MLP.loader())


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_arguments(every: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"every_n_steps=.*: allowed is None or an int of at least 1"):
        BubbleMonitor(every_n_steps=every)
