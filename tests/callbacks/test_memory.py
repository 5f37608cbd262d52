"""Activation memory against a count by hand: which tensors of linear layers and tanhs autograd saves is known."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.autograd.graph import save_on_cpu

from lightning_pp import ActivationMemoryMonitor
from tests.launch import run_ranks
from tests.models import MLP
from tests.training import Outcome, Table, fit, plain, whole

FLOAT64 = 8


class Block(nn.Sequential):
    """One layer, where it is named as such."""


def block(before: int, after: int) -> nn.Module:
    return Block(nn.Linear(before, 16), nn.Tanh(), nn.Linear(16, after), nn.Tanh())


class Blocks(MLP):
    """Batches of 8, 8 and 5 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(8, 4), block(4, 6), block(6, 5), nn.Linear(5, 3))


class Monitor(ActivationMemoryMonitor):
    """Writes down what was measured in every step, and forecasts from the first one."""

    outcome: Outcome

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        extra = self.outcome.extra
        extra.setdefault("memory", []).append(dict(self.last))
        if len(extra["memory"]) == 1 and extra.get("forecasts") is None:
            extra["forecasts"] = {key: self.forecast(*key) for key in FORECASTS}


#: (micro-batches, schedule, samples)
FORECASTS = [(3, "gpipe", None), (5, "1f1b", None), (5, "gpipe", 8), (2, "1f1b", None), (3, "1f1b", 5)]

LAYERS = [f"net.{index}" for index in range(4)]
SPLIT = {1: [], 2: ["net.2"], 3: ["net.1", "net.2"]}
#: numbers held for each sample: two tanhs in a block, what a later stage received, the prediction for the loss
ELEMENTS = {1: [66], 2: [20 + 22, 6 + 21 + 3], 3: [20, 4 + 22, 6 + 21 + 3]}
#: with a checkpoint on each layer: its input (the first one's is the batch), and the prediction for the loss
CHECKPOINTED = {1: [4 + 6 + 5 + 3], 2: [4, 6 + 5 + 3], 3: [0, 4, 6 + 5 + 3]}

#: (micro-batches, schedule): samples held at the peak of the first batch, of 8; micro-batches held
HELD: dict[int, dict[tuple[int, str], tuple[list[int], list[int]]]] = {
    1: {(3, "1f1b"): ([3], [1]), (3, "gpipe"): ([8], [3]), (5, "1f1b"): ([2], [1]), (2, "1f1b"): ([4], [1])},
    2: {
        (3, "1f1b"): ([6, 3], [2, 1]),
        (3, "gpipe"): ([8, 8], [3, 3]),
        (5, "1f1b"): ([4, 2], [2, 1]),
        (2, "1f1b"): ([8, 4], [2, 1]),
    },
    3: {
        (3, "1f1b"): ([8, 6, 3], [3, 2, 1]),
        (3, "gpipe"): ([8, 8, 8], [3, 3, 3]),
        (5, "1f1b"): ([6, 4, 2], [3, 2, 1]),
        (2, "1f1b"): ([8, 8, 4], [2, 2, 1]),
    },
}


def row(stages: int, microbatches: int, schedule: str, watched: bool = True, **strategy: Any) -> dict[str, Any]:
    return {
        "name": "Blocks",
        "cls": Blocks,
        "microbatches": microbatches,
        "strategy": {"schedule": schedule, "layers": LAYERS, "split": SPLIT[stages], **strategy},
        "trainer": {"max_epochs": 1},
        "callbacks": (Monitor,) if watched else (),
    }


def table(stages: int) -> Table:
    rows: dict[Any, dict[str, Any]] = {key: row(stages, *key) for key in HELD[stages]}
    rows["off"] = row(stages, 3, "1f1b", watched=False)
    rows["checkpointed"] = row(stages, 3, "1f1b", activation_checkpointing=True)
    rows["blocks checkpointed"] = row(stages, 3, "gpipe", activation_checkpointing=[Block])
    return Table(rows)


def peaks(memory: dict[str, float], stages: int, name: str = "activation_peak_bytes") -> list[float]:
    return [memory[f"pipeline/stage{stage}/{name}"] for stage in range(stages)]


def bytes_of(samples: list[int], elements: list[int]) -> list[int]:
    return [FLOAT64 * number * size for number, size in zip(samples, elements, strict=True)]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_bytes_and_micro_batches_are_those_counted_by_hand(stages: int) -> None:
    runs = table(stages)
    for key, (samples, in_flight) in HELD[stages].items():
        outcomes = runs.piped(key, stages)
        for outcome in outcomes:
            first = outcome.extra["memory"][0]
            assert peaks(first, stages) == bytes_of(samples, ELEMENTS[stages]), key
            assert peaks(first, stages, "in_flight_peak") == in_flight, key
            assert set(first) == {
                f"pipeline/stage{stage}/{name}"
                for stage in range(stages)
                for name in ("activation_peak_bytes", "in_flight_peak", "buffers_peak")
            }
            assert outcome.extra["memory"] == outcomes[0].extra["memory"]
    # the last batch has 5 samples: 2, 2 and 1
    last = runs.piped((3, "1f1b"), stages)[0].extra["memory"][-1]
    assert peaks(last, stages) == bytes_of([5, 4, 2][3 - stages :], ELEMENTS[stages])
    _check_forecasts(runs, stages)
    _check_checkpointed(runs, stages)
    for watched, off in zip(runs.piped((3, "1f1b"), stages), runs.piped("off", stages), strict=True):
        assert watched.outputs == off.outputs
        assert whole([watched]).keys() == whole([off]).keys()
        assert all(torch.equal(whole([watched])[name], value) for name, value in whole([off]).items())


def _check_forecasts(runs: Table, stages: int) -> None:
    forecasts = runs.piped((3, "1f1b"), stages)[-1].extra["forecasts"]
    for microbatches, schedule, samples in FORECASTS:
        forecast = forecasts[microbatches, schedule, samples]
        if samples == 5:
            measured = runs.piped((3, "1f1b"), stages)[0].extra["memory"][-1]
        elif (microbatches, schedule) in HELD[stages]:
            measured = runs.piped((microbatches, schedule), stages)[0].extra["memory"][0]
        else:
            assert forecast == bytes_of([8] * stages, ELEMENTS[stages])
            continue
        assert forecast == peaks(measured, stages)


def _check_checkpointed(runs: Table, stages: int) -> None:
    """A layer that is not a block saves what goes into it anyway."""
    for key, schedule in (("checkpointed", "1f1b"), ("blocks checkpointed", "gpipe")):
        outcomes = runs.piped(key, stages)
        samples, in_flight = HELD[stages][3, schedule]
        first = outcomes[0].extra["memory"][0]
        assert peaks(first, stages) == bytes_of(samples, CHECKPOINTED[stages]), key
        assert peaks(first, stages, "in_flight_peak") == in_flight
        for asked, forecast in outcomes[-1].extra["forecasts"].items():
            if asked[:2] in HELD[stages] and asked[2] is None:
                held, _ = HELD[stages][asked[:2]]
                assert forecast == bytes_of(held, CHECKPOINTED[stages]), (key, asked)


class Double(nn.Module):
    """Autograd saves nothing for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Doubled(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(8, 4), Double(), nn.Linear(4, 3))


class Skipping(Doubled):
    """The first epoch ends before its second batch, of which the monitor has been told already."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


class Unforecast(Monitor):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.extra["forecasts"] = {}


def test_a_batch_that_is_skipped_is_not_measured() -> None:
    options: dict[str, Any] = {"cls": Skipping, "trainer": {"max_epochs": 2}, "callbacks": (Unforecast,)}
    outcome = run_ranks(fit, 1, "Skipping", strategy={"microbatches": 1}, **options)[0]
    found = [step["pipeline/stage0/activation_peak_bytes"] for step in outcome.extra["memory"]]
    assert found == [FLOAT64 * (20 + 4 + 3) * size for size in (8, 8, 8, 5)]


def test_what_was_received_counts_and_every_measurement_begins_anew() -> None:
    strategy = {"stages": 2, "microbatches": 8, "schedule": "gpipe", "layers": LAYERS[:3], "split": ["net.1"]}
    options: dict[str, Any] = {"cls": Doubled, "trainer": {"max_epochs": 1}, "callbacks": (Unforecast,)}
    memory = run_ranks(fit, 2, "Doubled", strategy=strategy, devices=2, **options)[0].extra["memory"]
    # batches of 8, 8 and 5; the second stage holds what it received, its double, and the prediction
    assert [peaks(step, 2) for step in memory] == [bytes_of([size] * 2, [20, 4 + 4 + 3]) for size in (8, 8, 5)]
    assert [peaks(step, 2, "in_flight_peak") for step in memory] == [[8, 8], [8, 8], [5, 5]]


class Every(ActivationMemoryMonitor):
    outcome: Outcome

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.extra["last"] = dict(self.last)


def test_rank_0_logs_to_all_loggers_every_n_steps(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name, version=0) for name in ("one", "other")]
    trainer = {"max_epochs": 2, "logger": loggers, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
    strategy = {"stages": 2, "microbatches": 3, "layers": LAYERS, "split": SPLIT[2]}
    outcomes = run_ranks(
        fit, 2, "Blocks", cls=Blocks, strategy=strategy, devices=2, trainer=trainer, callbacks=(Every, Every)
    )
    last = outcomes[0].extra["last"]
    assert outcomes[1].extra["last"] == last
    # of 3 batches in windows of 2, every second window ends with a batch of 5 samples: 2, 2 and 1
    assert peaks(last, 2) == bytes_of([4, 2], ELEMENTS[2])
    for name in ("one", "other"):
        with (tmp_path / name / "version_0" / "metrics.csv").open() as file:
            lines = list(csv.DictReader(file))
        rows = [line for line in lines if line["pipeline/stage1/activation_peak_bytes"]]
        # twice, as there are two monitors; at the steps at which Lightning logs
        assert [int(line["step"]) for line in rows] == [1, 1, 3, 3]
        assert [int(line["step"]) for line in lines if line["train_loss_step"]] == [1, 3]
        assert {key: float(rows[-1][key]) for key in last} == last
        assert all(peaks(line, 2) == peaks(rows[-1], 2) for line in rows)  # type: ignore[arg-type]


def surrounded() -> Outcome:
    with save_on_cpu():
        return fit("Blocks", cls=Blocks, strategy={"microbatches": 3}, trainer={"max_epochs": 1}, callbacks=(Blind,))


class Blind(Unforecast):
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with pytest.raises(RuntimeError, match="what stage 0 holds does not follow"):
            self.forecast(3)


def test_hooks_around_the_run_leave_the_bytes_out() -> None:
    outcome = run_ranks(surrounded, 1)[0]
    assert set(outcome.extra["memory"][0]) == {"pipeline/stage0/in_flight_peak", "pipeline/stage0/buffers_peak"}
    reference = plain("Blocks", cls=Blocks, trainer={"max_epochs": 1})
    for name, value in reference.parameters.items():
        torch.testing.assert_close(outcome.parameters[name], value, atol=1e-9, rtol=0)


def test_pipelines_side_by_side_are_one() -> None:
    options: dict[str, Any] = {"cls": Blocks, "trainer": {"max_epochs": 1}, "callbacks": (Monitor,)}
    outcomes = run_ranks(fit, 2, "Blocks", strategy={"stages": 1, "microbatches": 3}, devices=2, **options)
    for outcome in outcomes:
        assert [peaks(memory, 1) for memory in outcome.extra["memory"]] == [
            bytes_of([3], ELEMENTS[1]),
            bytes_of([1], ELEMENTS[1]),
        ]


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="every_n_steps=True: allowed is None or an int"):
        ActivationMemoryMonitor(True)
    with pytest.raises(ValueError, match="every_n_steps=0: allowed is None or an int"):
        ActivationMemoryMonitor(0)
    with pytest.raises(RuntimeError, match="train until a step has been measured"):
        ActivationMemoryMonitor().forecast(3)
    monitor = ActivationMemoryMonitor()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match="the strategy is SingleDeviceStrategy"):
        monitor.setup(trainer, Blocks(), "fit")
