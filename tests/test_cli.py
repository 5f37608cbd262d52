"""LightningCLI: each argument in YAML and on the command line, a saved file that can be run again, and the example."""

import csv
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_pp import PipelineStrategy
from tests.commands import run
from tests.launch import run_ranks
from tests.models import MLP
from tests.program import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, for Lightning's calls
Parse = Callable[..., LightningCLI]
EXAMPLE = ROOT / "examples" / "train_cli.py"
CONFIG = ROOT / "examples" / "config.yaml"
DEVICES = ("--seed_everything=1", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false")


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Build what a command line asks for, and run nothing."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return lambda *args: LightningCLI(MLP, run=False, save_config_callback=None, args=[*DEVICES, *args])


def arguments(cli: LightningCLI) -> dict[str, Any]:
    strategy = cli.trainer.strategy
    assert type(strategy) is PipelineStrategy
    return {name: getattr(strategy.arguments, name) for name in strategy.arguments.__slots__}


DEFAULTS: dict[str, Any] = {"stages": "auto", "microbatches": None, "timeout": timedelta(minutes=30)}
ON_THE_COMMAND_LINE: dict[str, tuple[list[str], dict[str, Any]]] = {
    "registered name": (["--trainer.strategy=pipeline"], {}),
    "short name": (["--trainer.strategy=PipelineStrategy"], {}),
    "class path": (["--trainer.strategy=lightning_pp.PipelineStrategy"], {}),
    "class path in braces": (['--trainer.strategy={"class_path": "lightning_pp.PipelineStrategy"}'], {}),
    "short name and arguments": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.stages=2", "--trainer.strategy.microbatches=6"],
        {"stages": 2, "microbatches": 6}),
    "full keys": (
        ["--trainer.strategy=lightning_pp.PipelineStrategy", "--trainer.strategy.init_args.timeout=1:00:00"],
        {"timeout": timedelta(hours=1)}),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_THE_COMMAND_LINE)
def test_the_strategy_on_the_command_line(parse: Parse, case: str) -> None:
    args, changed = ON_THE_COMMAND_LINE[case]
    found = arguments(parse(*args))
    assert {name: found[name] for name in DEFAULTS} == {**DEFAULTS, **changed}


#: a value other than the default for each argument that has one, as text and as it must arrive
IN_YAML: dict[str, tuple[str, Any]] = {
    "stages": ("2", 2),
    "microbatches": ("5", 5),
    "schedule": ("gpipe", "gpipe"),
    "layers": ("[torch.nn.Linear, net.1]", ["torch.nn.Linear", "net.1"]),
    "split": ("[net.2]", ["net.2"]),
    "balance": ("memory", "memory"),
    "activation_checkpointing": ("[torch.nn.Tanh]", ["torch.nn.Tanh"]),
    "process_group_backend": ("gloo", "gloo"),
    "timeout": ("1 day, 0:05:30", timedelta(days=1, minutes=5, seconds=30)),
}


def test_every_argument_in_yaml_and_back(parse: Parse, tmp_path: Path) -> None:
    """What ``--print_config`` and the saved file hold gives the same strategy again; a key can be overridden."""
    lines = [f"      {name}: {text}" for name, (text, _) in IN_YAML.items()]
    head = ["trainer:", "  strategy:", "    class_path: lightning_pp.PipelineStrategy", "    init_args:"]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join([*head, *lines]))
    first = parse(f"--config={path}")
    found = arguments(first)
    assert {name: found[name] for name in IN_YAML} == {name: value for name, (_, value) in IN_YAML.items()}
    path.write_text(first.parser.dump(first.config, skip_none=False))
    saved = yaml.safe_load(path.read_text())["trainer"]["strategy"]["init_args"]
    assert saved.keys() >= IN_YAML.keys()
    assert arguments(parse(f"--config={path}")) == found
    again = parse(f"--config={path}", "--trainer.strategy.init_args.microbatches=8")
    assert arguments(again) == {**found, "microbatches": 8}


@pytest.mark.parametrize("value", ["true", "false"])
def test_activation_checkpointing_may_be_a_bool(parse: Parse, value: str) -> None:
    cli = parse("--trainer.strategy=PipelineStrategy", f"--trainer.strategy.activation_checkpointing={value}")
    assert arguments(cli)["activation_checkpointing"] is (value == "true")


def test_a_wrong_value_is_named(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--trainer.strategy=PipelineStrategy", "--trainer.strategy.balance=luck")
    assert "flops" in capsys.readouterr().err


def fit_command(folder: Path, version: str, *extra: str, config: Path = CONFIG) -> list[str]:
    return [
        "fit", f"--config={config}", f"--trainer.logger.init_args.save_dir={folder}",
        f"--trainer.logger.init_args.version={version}", "--trainer.enable_progress_bar=false", *extra,
    ]  # fmt: skip


def in_this_process(arguments: list[str]) -> str:
    """The example, started by somebody who has started the other ranks too; the error that ended it."""
    sys.argv = [str(EXAMPLE), *arguments]
    sys.path.insert(0, str(EXAMPLE.parent))
    import train_cli

    try:
        train_cli.main()
    except RuntimeError as error:
        return str(error)
    return ""


SMALL = (
    "--trainer.max_steps=4", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1", "--trainer.precision=64-true", "--model.width=16", "--model.layers=3",
    "--data.batch_size=13", "--trainer.strategy.microbatches=3",
)  # fmt: skip


def logged(path: Path) -> list[dict[str, float]]:
    with (path / "metrics.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.timeout(240)
def test_the_example_its_saved_config_and_the_plain_run(tmp_path: Path) -> None:
    """Two processes save one config; it runs again to the same losses, and no run overwrites another's file."""
    ((code, output),) = run(([sys.executable, str(EXAMPLE), *fit_command(tmp_path, "first", *SMALL)], {}))
    assert code == 0, output
    config = tmp_path / "first" / "config.yaml"
    assert yaml.safe_load(config.read_text())["trainer"]["strategy"]["init_args"]["stages"] == 2
    (checkpoint,) = (tmp_path / "first" / "checkpoints").iterdir()
    assert torch.load(checkpoint, weights_only=False)["global_step"] in (2, 4)
    found = logged(tmp_path / "first")
    for error in run_ranks(in_this_process, 2, fit_command(tmp_path, "first", config=config)):
        assert f"expected {config} to NOT exist" in error
    assert run_ranks(in_this_process, 2, fit_command(tmp_path, "again", config=config)) == ["", ""]
    assert logged(tmp_path / "again") == found
    plain = ("--trainer.strategy=auto", "--trainer.devices=1")
    assert run_ranks(in_this_process, 1, fit_command(tmp_path, "plain", *SMALL[:-1], *plain)) == [""]
    expected = logged(tmp_path / "plain")
    assert len(found) == len(expected) > 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-9)
