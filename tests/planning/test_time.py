"""Plans whose times were measured: the bubble that they foretell is that of a run, and cuts go by what layers take."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_pp import BubbleMonitor
from lightning_pp.__main__ import main
from lightning_pp.planning.link import Link
from tests.callbacks.sleeping import Sleepy
from tests.launch import run_ranks
from tests.models import Module
from tests.training import Outcome, fit

MICROBATCHES = 4
FREE = ("--latency", "0s", "--bandwidth", "1P")


class SixSleepy(Sleepy):
    """Six layers, of which neither halves nor thirds of the number are halves and thirds of the time."""

    forward_seconds = (0.01, 0.01, 0.05, 0.01, 0.02, 0.04)
    backward_seconds = (0.02, 0.01, 0.06, 0.03, 0.02, 0.1)
    steps = 5


class Kept(BubbleMonitor):
    """Keeps each measurement, and where the layers are."""

    outcome: Outcome

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        extra = self.outcome.extra
        extra.setdefault("kept", []).append(self.last)
        extra["layers"] = sum(not layer.linear.weight.is_meta for layer in pl_module.net)


class Rotated(Module):
    """Frozen and trained layers, glue between them, an integer and a keyword among the arguments."""

    class Layer(nn.Module):
        def __init__(self, is_frozen: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).requires_grad_(not is_frozen)
            self.table = torch.ones(3, 8)  # neither a parameter nor a buffer

        def forward(self, x: Tensor, which: Tensor, *, scale: float, bias: dict[str, Tensor]) -> Tensor:
            return self.linear(x).mul_(scale) + self.table[which] + bias["bias"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(is_frozen=index == 0) for index in range(4))

    def loss(self, batch: Any) -> Tensor:
        x, which = batch
        for layer in self.layers:
            x = layer(2 * x, which, scale=0.5, bias={"bias": x})
        return x.square().mean()


class Picky(Rotated):
    """Made-up values are not good enough for it."""

    class Layer(Rotated.Layer):
        def forward(self, x: Tensor, which: Tensor, *, scale: float, bias: dict[str, Tensor]) -> Tensor:
            if type(x) is Tensor:
                raise RuntimeError("x must lie\n on the unit circle")
            return super().forward(x, which, scale=scale, bias=bias)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plan_times", sys.modules[__name__])


def plan(capsys: Any, model: str, batch: str, *args: str, link: tuple[str, ...] = FREE) -> dict[str, Any]:
    assert main(["plan", f"plan_times:{model}", "--batch", batch, "--balance", "time", "--json", *args, *link]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.alone
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (3, "gpipe")])
def test_the_bubble_is_that_of_a_run(capsys: Any, stages: int, schedule: str) -> None:
    sizes = ("--stages", str(stages), "--microbatches", str(MICROBATCHES), "--schedule", schedule)
    found = plan(capsys, "SixSleepy", "[[8, 8], [8, 3]]", *sizes, link=())
    (forecast,) = found["forecasts"]
    assert 1e-6 < found["latency"] < 0.05
    assert found["bandwidth"] > 1e6
    assert found["timed_on"] == ("cuda" if torch.cuda.is_available() else "cpu")
    bounds = forecast["bounds"]
    for position, stage in enumerate(forecast["stages"]):
        for kind, seconds in (("forward", SixSleepy.forward_seconds), ("backward", SixSleepy.backward_seconds)):
            slept = sum(seconds[bounds[position] : bounds[position + 1]])
            assert stage[f"{kind}_seconds"] == pytest.approx(slept, abs=0.01)
    expected = {f"pipeline/stage{k}/bubble_fraction": one["bubble"] for k, one in enumerate(forecast["stages"])}
    expected["pipeline/bubble_fraction"] = forecast["bubble"]
    measured = quietest(stages, schedule, [stage["calls"] for stage in forecast["stages"]])
    if {name: measured[name] for name in expected} != pytest.approx(expected, abs=0.03):  # the machine was busy
        again = quietest(stages, schedule, [stage["calls"] for stage in forecast["stages"]])
        measured = min(measured, again, key=lambda values: values["pipeline/span_seconds"])
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=0.03)
    assert forecast["seconds"] == pytest.approx(measured["pipeline/span_seconds"], rel=0.1)


def quietest(stages: int, schedule: str, calls: list[int]) -> dict[str, float]:
    """What is measured in the step of a run that was disturbed least; its cut is the plan's."""
    strategy = {"stages": stages, "microbatches": MICROBATCHES, "schedule": schedule, "balance": "time"}
    outcomes = run_ranks(fit, stages, "", cls=SixSleepy, strategy=strategy, devices=stages, trainer={"max_epochs": 1},
                         callbacks=(Kept,))  # fmt: skip
    assert [outcome.extra["layers"] for outcome in outcomes] == calls
    return min(outcomes[0].extra["kept"], key=lambda values: values["pipeline/span_seconds"])


@pytest.mark.alone
def test_recomputing_takes_a_second_forward_and_messages_take_their_time(capsys: Any) -> None:
    sizes = ("--stages", "2", "--microbatches", "4", "--split", "net.3")
    (plain,) = plan(capsys, "SixSleepy", "[[8, 8], [8, 3]]", *sizes)["forecasts"]
    again = ("--activation-checkpointing", "net.2,net.5")
    link = ("--latency", "0s", "--bandwidth", "1k")
    (slow,) = plan(capsys, "SixSleepy", "[[8, 8], [8, 3]]", *sizes, *again, link=link)["forecasts"]
    for stage, one, other in zip((0, 1), plain["stages"], slow["stages"], strict=True):
        assert other["forward_seconds"] == pytest.approx(one["forward_seconds"], abs=0.01)
        forward = SixSleepy.forward_seconds[2 if stage == 0 else 5]
        assert other["backward_seconds"] == pytest.approx(one["backward_seconds"] + forward, abs=0.01)
    # 2 samples of 8 float32 at 1000 bytes a second: at least the first and the last message are waited for
    assert slow["seconds"] > plain["seconds"] + 4 * 0.04 + 2 * 0.064 - 0.02


def test_every_message_has_its_latency(capsys: Any) -> None:
    sizes = ("--stages", "2", "--microbatches", "4", "--split", "net.3", "--schedule", "gpipe")
    arguments = [
        "plan",
        "plan_times:SixSleepy",
        "--batch",
        "[[8, 8], [8, 3]]",
        "--device-flops",
        "1M",
        "--json",
        *sizes,
    ]
    seconds = []
    for latency in ("0s", "10us", "0.1ms"):
        assert main([*arguments, "--latency", latency]) == 0
        (forecast,) = json.loads(capsys.readouterr().out)["forecasts"]
        seconds.append(forecast["seconds"])
    # the first forward and the last backward are waited for, what is between arrives while others are computed
    assert seconds[1] - seconds[0] == pytest.approx(2 * 10e-6)
    assert seconds[2] - seconds[0] == pytest.approx(2 * 0.1e-3)


def test_what_is_said_of_the_link_is_not_measured(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pp.planning.command.measure_link", lambda: Link(0.5, 4e6))
    sizes = ("--stages", "2", "--microbatches", "2")
    for link, expected in (
        ((), (0.5, 4e6)),
        (("--latency", "0s"), (0.0, 4e6)),
        (("--bandwidth", "1k"), (0.5, 1e3)),
        (FREE, (0.0, 1e15)),
    ):
        found = plan(capsys, "Rotated", '[[8, 8], "int64[8]"]', *sizes, link=link)
        assert (found["latency"], found["bandwidth"]) == expected


def test_layers_are_timed_with_what_they_are_called_with(capsys: Any) -> None:
    found = plan(capsys, "Rotated", '[[8, 8], "int64[8]"]', "--stages", "2", "--microbatches", "2")
    (forecast,) = found["forecasts"]
    assert all(stage["forward_seconds"] > 0 for stage in forecast["stages"])
    # nothing before the second layer wants a gradient
    (split,) = plan(capsys, "Rotated", '[[8, 8], "int64[8]"]', "--stages", "2", "--split", "layers.1")["forecasts"]
    assert split["stages"][0]["backward_seconds"] < 1e-6 < split["stages"][1]["backward_seconds"]
    assert (split["stages"][1]["receives"], split["stages"][1]["returns"]) == (4 * 8, 0)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (
            "Picky", (), "layer 'layers.0' cannot be timed by itself on cpu (RuntimeError: x must lie on the unit"
            " circle): plan with another --balance",
        ),
        ("Rotated", ("--device-flops", "1T"), "--balance time measures seconds: leave one out"),
    ],
)  # fmt: skip
def test_what_cannot_be_timed(capsys: Any, model: str, args: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit):
        plan(capsys, model, '[[8, 8], "int64[8]"]', "--stages", "2", *args)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
