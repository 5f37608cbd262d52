"""``python -m lightning_pp plan``: what it prints, the cut it finds, what it recommends, its errors in one line."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pp.__main__ import main
from lightning_pp.partition.calls import Call, Leaf, Trace
from lightning_pp.partition.layers import find_layers
from lightning_pp.partition.switch import Switchboard
from lightning_pp.planning import target
from lightning_pp.planning.forecast import Options, forecast
from lightning_pp.planning.measure import measure, switched
from lightning_pp.planning.work import Held, Work
from lightning_pp.runtime.planner import CutOptions, Planner
from lightning_pp.schedule import SCHEDULES
from tests.models import MODELS
from tests.program import ROOT

GPT = "train_gpt:CharGPT"
INIT = json.dumps({"alphabet": "abcdefghijklmnopqrstuvwxyz"})
BATCH = "int64[64, 33]"


class Wide(LightningModule):
    """Equal layers in a row, by default of a width and a number that no memory holds."""

    def __init__(self, width: int = 40_000, layers: int = 250) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        self.log("loss", x.mean())
        return (x.mean(1) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


sys.modules.setdefault("plan_models", sys.modules[__name__])
WIDE = "plan_models.Wide"


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setitem(sys.modules, "plan_models", sys.modules[__name__])


def plan(capsys: Any, *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["plan", GPT, "--init-args", INIT, "--batch", BATCH, "--stages", "2", "--microbatches", "8"]
    assert main(args) == 0
    drawn = capsys.readouterr().out
    assert max(map(len, drawn.splitlines())) <= 100
    for name in ("rich", "rich.box", "rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(args) == 0
    plain = capsys.readouterr().out
    for out in (drawn, plain):
        words = " ".join(out.split())
        assert words.startswith("CharGPT: 804k parameters in 7 layers, 32-true, batch of 64 P M schedule")
        assert "404k 604M 0B 1.62MB 1.62MB 3.23MB 2 x 4.21MB" in words


def test_the_documentation_shows_what_is_printed(capsys: Any) -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    command, output = text.split("```\n")[1], text.split("```\n")[3]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["PYTHONPATH=examples", "python", "-m", "lightning_pp"]
    assert main(words[4:]) == 0
    assert capsys.readouterr().out == output


def test_the_cut_is_that_of_the_strategy(capsys: Any) -> None:
    from train_gpt import CharGPT

    module = CharGPT(json.loads(INIT)["alphabet"])
    board = Switchboard(find_layers(module))
    board.install()
    planner = Planner(module, board, [0], torch.device("cpu"), frozenset())
    part = torch.zeros(16, 33, dtype=torch.int64)
    trace = planner.decide("step", lambda: module.loss(part), CutOptions(3, 4, None, "flops"), lambda cut: cut)
    assert planner.cut is not None
    args = ("--init-args", INIT, "--batch", BATCH, "--stages", "3", "--microbatches", "4")
    (found,) = plan(capsys, GPT, *args)["forecasts"]
    bounds = planner.cut.bounds
    assert tuple(found["bounds"]) == bounds
    assert [stage["receives"] for stage in found["stages"]] == [0, *(trace.bytes_at(bound) for bound in bounds[1:-1])]
    assert sum(stage["flops"] for stage in found["stages"]) == 3 * sum(call.flops for call in trace.calls)
    assert sum(stage["parameters"] for stage in found["stages"]) == sum(p.numel() for p in module.parameters())


def test_tied_weights_count_on_both_stages(capsys: Any) -> None:
    init = json.dumps({**json.loads(INIT), "tied": True})
    args = ("--init-args", init, "--batch", BATCH, "--stages", "2", "--microbatches", "4")
    found = plan(capsys, GPT, *args)
    assert sum(stage["parameters"] for stage in found["forecasts"][0]["stages"]) == found["parameters"] + 26 * 128


@pytest.mark.parametrize(
    ("optimizer", "states"), [("SGD", 0), ("Adagrad", 1), ("Adam", 2), ("AdamW", 2), ("RMSprop", 1)]
)
def test_optimizer_states(capsys: Any, optimizer: str, states: int) -> None:
    init = json.dumps({"width": 8, "layers": 2})
    batch = '{"x": [6, 8], "y": [6]}'
    args = ("--init-args", init, "--batch", batch, "--stages", "2", "--optimizer", optimizer)
    for stage in plan(capsys, WIDE, *args)["forecasts"][0]["stages"]:
        steps = 4 if states else 0  # the number of the step, one for each parameter
        assert stage["optimizer"] == states * stage["weights"] + steps


def test_a_model_that_no_memory_holds(capsys: Any) -> None:
    """400 billion parameters, in seconds; then the fewest stages that fit."""
    start = time.monotonic()
    batch = '{"x": [1000, 40000], "y": [1000]}'
    found = plan(capsys, WIDE, "--batch", batch, "--device-memory", "80GB", "--precision", "bf16-true",
                 "--devices", "1000", "--device-flops", "300T", "--bandwidth", "50GB")  # fmt: skip
    assert time.monotonic() - start < 60
    assert found["parameters"] == 400_000_000_000
    chosen = found["forecasts"][found["chosen"]]
    # weights and gradients are 6.4 GB for each layer, so that 12 layers fit and 13 do not; 25 stages have 10 each
    assert len(chosen["stages"]) == 25
    assert chosen["peak"] <= 80e9
    assert chosen["bubble"] <= 0.1
    flops = 1000 * 40_000**2 * (6 * 250 - 2)  # nobody asks for the gradient of the first layer's input
    assert chosen["seconds"] == pytest.approx(flops / 3e14 / chosen["speedup"], rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_thousand_ranks(schedule: str) -> None:
    num = 1000
    leaf = Leaf((10, 100), torch.float32)
    calls = tuple(
        Call(f"layers.{k}", None, (leaf,), (), frozenset([(k - 1, 0)] if k else []), frozenset(), False, 100, 8000)
        for k in range(num)
    )
    trace = Trace(calls, frozenset([(num - 1, 0)]), frozenset(), frozenset(), False, False)
    work = Work(
        trace, [300.0] * num, [100.0] * num, [200.0] * num, [{k: 8000} for k in range(num)] + [{}],
        [0] * num, {(k, 0): num + k for k in range(num)}, frozenset(), None,
        [Held(f"p{k}", 5, 20, 20, 40, (k,)) for k in range(num)], 4000, 1.0, 4000, 7,
    )  # fmt: skip
    start = time.monotonic()
    found = forecast(work, Options(num, schedule))
    assert time.monotonic() - start < 20
    assert found.bubble == pytest.approx((num - 1) / (4000 + num - 1), rel=1e-9)
    assert found.bounds == tuple(range(num + 1))
    in_flight = {"gpipe": 4000, "1f1b": 999, "eager_1f1b": 1997}[schedule]
    assert found.stages[1].total == 80 + in_flight * (8000 + 4000) + 7


def test_a_config(capsys: Any) -> None:
    config = str(ROOT / "examples" / "config.yaml")
    found = plan(capsys, GPT, "--config", config, "--init-args", INIT, "--batch", BATCH)
    (only,) = found["forecasts"]
    assert (len(only["stages"]), only["microbatches"], only["schedule"]) == (2, 8, "1f1b")
    assert only["stages"][0]["last"] == "blocks.1"


@pytest.mark.parametrize(("given", "number"), [("true", 3), ("false", 0), ("[layers.1]", 1)])
def test_a_config_with_activation_checkpointing(capsys: Any, tmp_path: Any, given: str, number: int) -> None:
    arguments = f"{{stages: 2, activation_checkpointing: {given}}}"
    strategy = f"{{class_path: lightning_pp.PipelineStrategy, init_args: {arguments}}}"
    (tmp_path / "config.yaml").write_text(
        f"trainer: {{strategy: {strategy}, precision: bf16-true}}\n"
        "model: {class_path: plan_models.Wide, init_args: {width: 8, layers: 3}}\n"
    )
    args = ["plan", "--config", str(tmp_path / "config.yaml"), "--batch", '{"x": [20, 8], "y": [20]}']
    assert main(args) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Wide: 192 parameters in 3 layers, bf16-true, batch of 20" + (
        f", activations of {number} layers recomputed" if number else ""
    )


@pytest.mark.parametrize("name", ["UNet", "TwiceCalled", "FrozenHalf", "FusedOptimizer", "CompiledLayers", "Recurrent"])
def test_models_of_many_kinds(name: str) -> None:
    module, construction = target.build(MODELS[name], "32-true")
    assert all(parameter.is_meta for parameter in module.parameters())
    batch = target.find_batch(module, LoaderOf(module), None, "64-true")
    module.double()
    states = target.optimizer_states(module, None)
    board = switched(module, None)
    construction.show_to_glue(module, board.layers, torch.device("cpu"))
    work = measure(module, board, batch, 3, "flops", target.step_context("32-true"), states)
    found = forecast(work, Options(2))
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert sum(stage.gradients for stage in found.stages) >= trained
    assert 0.25 - 1e-9 <= found.bubble < 0.4


class Asks(Wide):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


def test_a_step_that_asks_for_values(capsys: Any) -> None:
    init = json.dumps({"width": 8, "layers": 2})
    with pytest.raises(SystemExit):
        main(["plan", "plan_models.Asks", "--init-args", init, "--batch", '{"x": [6, 8], "y": [6]}', "--stages", "2"])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "failed after layer 'layers.1': it asks a tensor for its values" in err


class LoaderOf:
    """The data of a test model, as a data module would give it."""

    def __init__(self, module: Any) -> None:
        self.train_dataloader = module.loader

    def prepare_data(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        pass


def test_several(capsys: Any) -> None:
    args = (GPT, "--init-args", INIT, "--batch", BATCH, "--stages", "2,4", "--microbatches", "4,8")
    found = plan(capsys, *args, "--schedule", "1f1b,gpipe")
    assert "chosen" not in found
    keys = [(len(one["stages"]), one["microbatches"], one["schedule"]) for one in found["forecasts"]]
    assert keys == [(p, m, name) for p in (2, 4) for m in (4, 8) for name in ("1f1b", "gpipe")]


SIZES = ["--init-args", INIT, "--batch", BATCH, "--stages", "2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name the model, package.module:Class, or a --config"),
        (["nothing.at:All"], "'nothing.at:All' cannot be imported"),
        (["train_gpt:Block"], "is no LightningModule class"),
        ([GPT], "give its arguments with --init-args"),
        ([GPT, "--init-args", "[1]"], "a JSON object is wanted"),
        ([GPT, "--init-args", INIT, "--stages", "2"], "train_dataloader gives no batch"),
        ([GPT, "--init-args", INIT, "--batch", "int65[2]", "--stages", "2"], "--batch int65[2]: a tensor is"),
        (
            [GPT, "--init-args", INIT, "--batch", "[64, 33]", "--stages", "2"],
            "without any values, and failed: RuntimeError",
        ),
        ([GPT, "--init-args", INIT, "--batch", BATCH], "say --stages, or --device-memory"),
        ([GPT, *SIZES, "--microbatches", "0"], "'0': whole numbers of at least 1"),
        ([GPT, *SIZES, "--stages", "9"], "9 stages, but the step calls only 7 layers"),
        ([GPT, *SIZES, "--split", "blocks.7"], "there is no layer 'blocks.7'"),
        ([GPT, *SIZES, "--schedule", "2f2b"], "no file is called '2f2b'"),
        ([GPT, *SIZES, "--optimizer", "Sophia"], "torch.optim has no such class"),
        ([GPT, *SIZES, "--device-memory", "80XB"], "'80X': a number above 0"),
        ([GPT, *SIZES, "--device-memory", "1MB"], "nothing fits in 1.00MB: the least is"),
        ([GPT, *SIZES, "--bandwidth", "1GB"], "--bandwidth needs --device-flops"),
        ([GPT, *SIZES, "--latency", "1ms"], "--latency needs --device-flops"),
        ([GPT, *SIZES, "--device-flops", "1T", "--latency", "5"], "'5': a time is wanted, such as 20us"),
        ([GPT, *SIZES, "--activation-checkpointing", "blocks.7"], "'blocks.7' is no layer of CharGPT. Give True"),
        ([GPT, *SIZES, "--devices", "3"], "--devices 3 is no multiple of --stages 2"),
        ([GPT, *SIZES, "--config", "none.yaml"], "--config none.yaml"),
    ],
)
def test_errors_are_one_line(capsys: Any, args: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", *args])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert not out
    assert err.count("\n") == 1
    assert message in err
