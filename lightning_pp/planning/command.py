"""The command ``python -m lightning_pp plan``."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_pp.arguments import BALANCES
from lightning_pp.partition.layers import chosen_layers
from lightning_pp.partition.switch import Switchboard
from lightning_pp.planning import report, target
from lightning_pp.planning.choose import choose
from lightning_pp.planning.forecast import Forecast, Options, forecast
from lightning_pp.planning.link import measure_link
from lightning_pp.planning.measure import measure, switched
from lightning_pp.planning.timing import Timer
from lightning_pp.planning.work import Work
from lightning_pp.schedule import SCHEDULES

__all__: list[str] = []

_NO_TIMES = "needs --device-flops or --balance time: without times there is nothing to compare transfers with"
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def add_plan(subparsers: Any) -> None:
    """Add the arguments of ``plan``."""
    parser = subparsers.add_parser("plan", help="say what a model needs and how fast it is in a pipeline")
    add = parser.add_argument
    add("model", nargs="?", help="the LightningModule, package.module:Class; not needed if the config names it")
    add("--init-args", default="{}", help="arguments of the model, a JSON object")
    add("--config", help="a LightningCLI config (YAML): model, data, and defaults for what follows")
    add("--data", help="a LightningDataModule, package.module:Class, whose first batch is taken")
    add("--batch", help='shapes of a batch: \'{"x": "float32[32, 128]", "y": "int64[32]"}\'; default: from the data')
    add("--stages", type=_counts, help="P, or several: 2,4,8; default: what the config says, or what fits")
    add("--microbatches", type=_counts, help="M, or several: 8,16; default: 4 P, or what fits")
    add("--schedule", help=f"one or several of {', '.join(SCHEDULES)}, or a CSV file; default 1f1b")
    add("--layers", type=_names, help="layers, as in PipelineStrategy(layers=...), with commas")
    add("--split", type=_names, help="layers that begin stages 1, 2, ..., with commas")
    add("--balance", choices=BALANCES, help="what is balanced; default flops. time: layers are timed on this device")
    add("--activation-checkpointing", nargs="?", const=True, type=_names, metavar="LAYERS",
        help="recompute activations: of all layers, or of some classes or names, with commas")  # fmt: skip
    add("--precision", choices=tuple(target.PRECISIONS), help="default 32-true")
    add("--optimizer", help="a class of torch.optim; default: the module's own")
    add("--devices", type=int, help="number of devices: P must divide it, the rest are replicas")
    add("--device-memory", type=_bytes, help="such as 80GB: says what fits, and recommends")
    add("--device-flops", type=_number, help="FLOPs a device does in a second, such as 300T: gives times")
    add("--bandwidth", type=_bytes, help="bytes a second between two stages, such as 50GB")
    add("--latency", type=_seconds, help="what every message takes besides, such as 20us")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(answer=answer)


def answer(args: argparse.Namespace) -> str:
    """Answer ``plan``.

    Raises:
        ValueError: An argument is wrong, or the model cannot be planned.
    """
    _check(args)
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            question = _Question.of(args)
            forecasts, chosen = _forecasts(args, question)
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
    question.board.remove()
    facts = question.facts(args)
    if args.json:
        return report.as_json(facts, forecasts, chosen)
    return report.text(_title(facts, args, chosen), forecasts, chosen, args.device_memory)


@dataclass
class _Question:
    """The model on meta, and what a step of it takes for each number of micro-batches."""

    module: LightningModule
    batch: Any
    board: Switchboard
    states: dict[str, int]
    precision: str
    options: Options
    stages: Sequence[int] | None
    microbatches: Sequence[int] | None
    schedules: Sequence[str]
    checkpointed: frozenset[str] = frozenset()
    timer: Timer | None = None
    _works: dict[tuple[int, bool], Work] = field(default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Question:
        make, make_data, strategy, precision = _target(args)
        module, construction = target.build(make, precision)
        batch = target.find_batch(module, make_data() if make_data else None, args.batch, precision)
        states = target.optimizer_states(module, args.optimizer)
        board = switched(module, args.layers or strategy.get("layers"))
        construction.show_to_glue(module, board.layers, torch.device("cpu"))
        options = Options(
            stages=1,
            split=args.split or strategy.get("split"),
            balance=_balance(args, strategy),
            layers=tuple(board.layers),
            flops_per_second=args.device_flops,
            bytes_per_second=args.bandwidth,
            latency=args.latency or 0.0,
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if options.balance == "time" and device.type == "cpu":
            options = _with_link(options, args)
        stages, number = strategy.get("stages"), strategy.get("microbatches")
        recomputed = args.activation_checkpointing or strategy.get("activation_checkpointing", False)
        given = args.schedule or strategy.get("schedule", "1f1b")
        return cls(
            module, batch, board, states, precision, options,
            args.stages or ([stages] if isinstance(stages, int) else None),
            args.microbatches or ([number] if isinstance(number, int) else None),
            [name.strip() for name in given.split(",")],
            chosen_layers(module, board.layers, recomputed),
            Timer(device, target.step_context(precision, device.type)) if options.balance == "time" else None,
        )  # fmt: skip

    def work(self, num_microbatches: int, is_timed: bool = True) -> Work:
        """What a step takes in so many micro-batches."""
        key = num_microbatches, is_timed
        if key not in self._works:
            self._works[key] = measure(
                self.module, self.board, self.batch, num_microbatches, self.options.balance,
                target.step_context(self.precision), self.states, self.checkpointed, self.timer if is_timed else None,
            )  # fmt: skip
        return self._works[key]

    def forecast(self, stages: int, microbatches: int, schedule: str) -> Forecast:
        """Of one way of running the model."""
        return forecast(self.work(microbatches), replace(self.options, stages=stages, schedule=schedule))

    def facts(self, args: argparse.Namespace) -> dict[str, Any]:
        """What holds for all forecasts."""
        work = next(iter(self._works.values()))
        return {
            "model": type(self.module).__name__,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "layers": len(self.board.layers),
            "precision": self.precision,
            "activation_checkpointing": sorted(self.checkpointed),
            "timed_on": self.timer.device.type if self.timer is not None else None,
            "latency": self.options.latency,
            "bandwidth": self.options.bytes_per_second,
            "batch_size": work.batch_size,
            "devices": args.devices,
            "device_memory": args.device_memory,
        }


def _forecasts(args: argparse.Namespace, question: _Question) -> tuple[list[Forecast], Forecast | None]:
    if args.device_memory is not None:
        return choose(
            question.forecast, question.work(1, is_timed=False), question.schedules, args.device_memory,
            question.stages, question.microbatches, args.devices,
        )  # fmt: skip
    if not question.stages:
        raise ValueError("say --stages, or --device-memory to be told how many")
    found = [
        question.forecast(stages, number, schedule)
        for stages in question.stages
        for number in question.microbatches or [4 * stages]
        for schedule in question.schedules
    ]
    return found, found[0] if len(found) == 1 else None


def _target(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[], Any] | None, dict[str, Any], str]:
    init_args = _json_object(args.init_args)
    if args.config is not None:
        found = target.read_config(args.config, args.model, args.data, init_args)
        precision = args.precision or found.precision or "32-true"
        if precision not in target.PRECISIONS:
            raise ValueError(f"precision {precision!r} is not planned: use {', '.join(target.PRECISIONS)}")
        return found.model, found.data, dict(found.strategy), precision
    if args.model is None:
        raise ValueError("name the model, package.module:Class, or a --config")
    data = target.import_class(args.data, LightningDataModule) if args.data else None
    return target.plain_maker(args.model, init_args), data, {}, args.precision or "32-true"


def _check(args: argparse.Namespace) -> None:
    for number in args.stages or ():
        if args.devices is not None and args.devices % number:
            raise ValueError(f"--devices {args.devices} is no multiple of --stages {number}")


def _balance(args: argparse.Namespace, strategy: dict[str, Any]) -> str:
    name: str = args.balance or strategy.get("balance", "flops")
    if name not in BALANCES:
        raise ValueError(f"balance={name!r}: use {', '.join(BALANCES)}")
    for option, given in (("--bandwidth", args.bandwidth), ("--latency", args.latency)):
        if given is not None and args.device_flops is None and name != "time":
            raise ValueError(f"{option} {_NO_TIMES}")
    if name == "time" and args.device_flops is not None:
        raise ValueError(
            "--device-flops is for devices that are not here; --balance time measures seconds: leave one out"
        )
    return name


def _with_link(options: Options, args: argparse.Namespace) -> Options:
    """With what a message between processes takes on this machine, unless that is said."""
    if args.bandwidth is not None and args.latency is not None:
        return options
    link = measure_link()
    return replace(
        options,
        bytes_per_second=options.bytes_per_second or link.bytes_per_second,
        latency=link.latency if args.latency is None else args.latency,
    )


def _title(facts: dict[str, Any], args: argparse.Namespace, chosen: Forecast | None) -> str:
    line = (
        f"{facts['model']}: {report.short(facts['parameters'])} parameters in {facts['layers']} layers,"
        f" {facts['precision']}, batch of {facts['batch_size']}"
    )
    if facts["activation_checkpointing"]:
        line += f", activations of {len(facts['activation_checkpointing'])} layers recomputed"
    if args.device_memory is None or chosen is None:
        return line
    stages = len(chosen.stages)
    line += (
        f"\nfits in {report.size(args.device_memory)}: PipelineStrategy(stages={stages},"
        f" microbatches={chosen.microbatches}, schedule={chosen.schedule!r})"
    )
    return line + (f", {args.devices // stages} replicas" if args.devices else "")


@contextmanager
def _quiet() -> Any:
    """A plan draws nothing and leaves the random state and the default dtype as they are."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--init-args {text}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--init-args {text}: a JSON object is wanted, such as '{{\"width\": 128}}'")
    return found


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers of at least 1 are wanted, with commas")
    return counts


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _number(text: str) -> float:
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*(Ki|Mi|Gi|Ti|[kMGTP]?)", text.strip())
    try:
        number = float(match[1]) * (_UNITS | _BINARY)[match[2]] if match else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is wanted, such as 80G or 3e14")
    return number


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(us|ms|s)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a time is wanted, such as 20us, 0.3ms or 0s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def _bytes(text: str) -> float:
    return _number(text.strip().removesuffix("B"))
