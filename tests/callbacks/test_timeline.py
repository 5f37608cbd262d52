"""The trace and the picture of a step: every op once, in the right row, on one clock."""

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_pp import PipelineTimeline
from lightning_pp.callbacks.clocks import machine, offsets
from lightning_pp.callbacks.trace_file import Row, ideal, to_picture, to_trace
from lightning_pp.runtime.events import Event
from lightning_pp.schedule import Kind, Op, lower, message_of, one_f_one_b, simulate
from lightning_pp.schedule.svg import to_svg
from tests.callbacks.sleeping import Sleepy
from tests.launch import run_ranks
from tests.models import MLP
from tests.runtime.ranks import connect
from tests.training import QUIET, Outcome, fit

STAGES, MICROBATCHES = 4, 6
PROGRAMS = lower(one_f_one_b(STAGES, MICROBATCHES)).programs
FORWARD, BACKWARD = (0.01, 0.03, 0.02, 0.01), (0.02, 0.04, 0.02, 0.03)


class Unequal(Sleepy):
    forward_seconds, backward_seconds, steps = FORWARD, BACKWARD, 3


class Kept(PipelineTimeline):
    """Of the second batch, with its paths kept."""

    outcome: Outcome

    def __init__(self) -> None:
        super().__init__(step=1)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        engine = trainer.strategy.pipeline.engine  # type: ignore[attr-defined]
        self.outcome.extra.setdefault("recorded", []).append(engine.recorder is not None)
        super().on_train_batch_end(trainer, *args)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.outcome.extra["paths"] = self.paths


class Profiled(Callback):
    """Runs torch's profiler around the last batch."""

    outcome: Outcome

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.start()

    def on_train_batch_end(self, *args: Any) -> None:
        if hasattr(self, "profiler"):
            self.profiler.stop()
            found = sorted((event.time_range.start, event.name) for event in self.profiler.events())
            self.outcome.extra["profiled"] = [name for _, name in found]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    trainer = {"max_epochs": 1, "default_root_dir": str(tmp_path_factory.mktemp("timeline"))}
    strategy = {"stages": STAGES, "microbatches": MICROBATCHES}
    options = {"strategy": strategy, "devices": STAGES, "trainer": trainer, "callbacks": (Kept, Profiled)}
    return run_ranks(fit, STAGES, "", cls=Unequal, **options)


def trace_of(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(outcomes[0].extra["paths"][0].read_text())["traceEvents"]
    return events


def slices(events: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of the row, and what is in it."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    yield from ((names[e["pid"], e["tid"]], e) for e in events if e["ph"] == "X")


def test_rank_0_writes_into_the_default_root_dir(outcomes: list[Outcome]) -> None:
    paths = outcomes[0].extra["paths"]
    assert [path.name for path in paths] == ["pipeline_step1.json", "pipeline_step1.svg"]
    assert {path.name for path in paths[0].parent.iterdir()} == {path.name for path in paths}
    assert all(outcome.extra["paths"] == paths for outcome in outcomes)


def test_only_the_one_batch_is_recorded(outcomes: list[Outcome]) -> None:
    assert [outcome.extra["recorded"] for outcome in outcomes] == [[False, True, False]] * STAGES


def test_the_trace_has_every_op_once_in_its_row(outcomes: list[Outcome]) -> None:
    events = trace_of(outcomes)
    kinds = {
        Kind.F: "forward",
        Kind.B: "backward",
        **dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), "wait"),
    }
    for stage, program in PROGRAMS.items():
        row = [event for name, event in slices(events) if name == f"stage {stage} (rank {stage})"]
        assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in row)
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"], abs=0.01) for a, b in pairwise(row))
        ops = [(e["name"], e["cat"]) for e in row if "args" in e]
        assert ops == [(str(op), kinds[op.kind]) for op in program]
        others = [(e["name"], e["cat"]) for e in row if "args" not in e]
        assert others == [
            ("prepare", "other"),
            ("reduce", "reduce"),
            ("share", "other"),
            ("hooks", "other"),
            ("optimizer", "optimizer"),
        ]
        slept = {"F": FORWARD[stage], "B": BACKWARD[stage]}
        for e in row:
            if e["cat"] in ("forward", "backward"):
                assert e["dur"] / 1e6 >= slept[Op.parse(e["name"]).kind.value]
    assert len(list(slices(events))) == sum(map(len, PROGRAMS.values())) + 5 * STAGES


def test_no_message_arrives_before_it_was_sent(outcomes: list[Outcome]) -> None:
    events = trace_of(outcomes)
    by_op = {Op.parse(e["name"]): e for _, e in slices(events) if "args" in e}
    receives = [op for op in by_op if op.kind in (Kind.RECV_F, Kind.RECV_B)]
    assert len(receives) == 2 * MICROBATCHES * (STAGES - 1)
    for op in receives:
        sent = Op(op.stage - 1, Kind.SEND_F, op.mb) if op.kind is Kind.RECV_F else Op(op.stage + 1, Kind.SEND_B, op.mb)
        made = Op(sent.stage, Kind.F if op.kind is Kind.RECV_F else Kind.B, op.mb)
        assert message_of(sent) == message_of(op)
        end = by_op[op]["ts"] + by_op[op]["dur"]
        assert end >= by_op[sent]["ts"] >= by_op[made]["ts"] + by_op[made]["dur"] - 0.01
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(receives)
    assert all(ends[key]["ts"] >= start["ts"] - 0.01 for key, start in starts.items())


def test_the_picture_has_the_measured_step_and_the_ideal_one(outcomes: list[Outcome]) -> None:
    root = ElementTree.parse(outcomes[0].extra["paths"][1]).getroot()
    bars = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if len(node)]
    for kind, category in ((Kind.F, "forward"), (Kind.B, "backward")):
        found = [(bar[0].text or "").partition(":")[0] for bar in bars if bar.get("class") == category]
        ops = [str(op) for stage in range(STAGES) for op in PROGRAMS[stage] if op.kind is kind]
        assert found == ops * 2
    titles = [node.text or "" for node in root.iter() if node.get("class") == "title"]
    assert [title.partition(":")[0] for title in titles] == [
        "batch 1 as measured",
        "ideal, from each stage's mean times",
    ]
    measured, best = (float(title.partition(": ")[2].split()[0]) for title in titles)
    longest = MICROBATCHES * (FORWARD[1] + BACKWARD[1]) * 1000
    assert longest < best <= measured


def test_the_profiler_shows_ops_by_name(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        found = [name for name in outcome.extra["profiled"] if name.startswith("op ")]
        assert found == [f"op {op}" for op in PROGRAMS[rank]]


class Default(PipelineTimeline):
    outcome: Outcome

    def __init__(self) -> None:
        super().__init__(step=2, formats=["svg", "json", "svg"])


def replicated(folder: Path) -> Outcome:
    """Two pipelines, and a logger with a folder of its own."""
    trainer = {"logger": CSVLogger(folder, name="", version="run"), "accumulate_grad_batches": 2}
    strategy = {"stages": 2, "microbatches": 2}
    return fit("MLP", strategy=strategy, devices=4, trainer=trainer, callbacks=(Default,))


def test_pipelines_side_by_side_in_the_folder_of_the_logger(tmp_path: Path) -> None:
    run_ranks(replicated, 4, tmp_path)
    folder = tmp_path / "run"
    events = json.loads((folder / "pipeline_step2.json").read_text())["traceEvents"]
    rows: dict[str, list[str]] = {}
    for name, event in slices(events):
        rows.setdefault(f"{event['pid']} {name}", []).append(event["name"])
    programs = lower(one_f_one_b(2, 2)).programs
    assert rows.keys() == {"1 stage 0 (rank 0)", "2 stage 0 (rank 1)", "1 stage 1 (rank 2)", "2 stage 1 (rank 3)"}
    for name, ops in rows.items():
        assert ops[1 : len(programs[0]) + 1] == list(map(str, programs[int(name.split()[2])]))
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert len(ids) == len(set(ids)) == 2 * 2 * 2
    assert ">stage 1, pipeline 1</text>" in (folder / "pipeline_step2.svg").read_text()


def alone(folder: Path) -> tuple[list[list[str]], list[str]]:
    """One stage; a batch that there is, and one that never comes."""
    written = []
    with warnings.catch_warnings(record=True) as caught:
        for step in (1, 99):
            timeline = PipelineTimeline(folder, step)
            trainer = Trainer(
                strategy="pipeline", accelerator="cpu", devices=1, max_epochs=1, callbacks=[timeline], **QUIET
            )
            trainer.fit(MLP(), MLP.loader(), MLP.loader())
            written.append([path.name for path in timeline.paths if path.exists()])
    return written, [str(warning.message) for warning in caught if "PipelineTimeline" in str(warning.message)]


def test_a_single_stage_and_a_batch_that_never_comes(tmp_path: Path) -> None:
    ((written, said),) = run_ranks(alone, 1, tmp_path)
    assert written == [["pipeline_step1.json", "pipeline_step1.svg"], []]
    (text,) = said
    assert text.startswith(
        "PipelineTimeline has written nothing: batch 99 has not been trained on. There were 3 batches"
    )


# -- parts ------------------------------------------------------------------------------------------------------------


def clocks(skew: dict[int, float], names: dict[int, str]) -> list[float]:
    rank = connect()
    group = torch.distributed.group.WORLD
    return offsets(group, names[rank], lambda: time.monotonic() + skew[rank])


def test_clocks_of_other_machines_are_corrected() -> None:
    skew, names = {0: 0.0, 1: 5.0, 2: 70.0}, {0: "a", 1: "b", 2: "a"}
    first, *others = run_ranks(clocks, 3, skew, names)
    assert first == [0.0, pytest.approx(5.0, abs=0.02), 0.0]
    assert others == [[], []]


def test_the_name_of_the_machine_is_the_same_in_all_its_processes() -> None:
    assert run_ranks(machine, 2) == [machine()] * 2
    assert machine() != socket.gethostname() or not os.path.exists("/proc/sys/kernel/random/boot_id")


def hand_made(replica: int, seconds: float) -> list[Row]:
    """Two stages and two micro-batches, each computation ``seconds`` long, on clocks that begin at 100."""
    rows: dict[int, list[Event]] = {0: [], 1: []}
    for rank, spans in enumerate(simulate(one_f_one_b(2, 2)).of_rank(rank) for rank in range(2)):
        for span in spans:
            start = 100 + span.start * seconds
            rows[rank].append(Event(span.op, start, start + seconds * (span.end - span.start)))
    return [Row(stage * 2 + replica, stage, replica, tuple(events)) for stage, events in rows.items()]


def test_the_ideal_is_simulated_with_the_means_over_pipelines() -> None:
    rows = hand_made(0, 0.01) + hand_made(1, 0.03)
    timeline = ideal(rows)
    assert timeline.makespan == pytest.approx(9 * 0.02)  # (M + P - 1) * (F + B), with F 0.02 and B 0.04
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    measured, best = (panel.title for panel in to_picture(rows, 7).panels)
    assert measured == "batch 7 as measured: 180 ms, bubble 33.3%"
    assert best == "ideal, from each stage's mean times: 180 ms, bubble 33.3%"
    assert 'class="forward"' in to_svg(to_picture(rows, 7))
    assert json.loads(to_trace(rows, 7))["otherData"] == {"step": 7}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": -1}, ValueError, "step=-1: allowed is an int of at least 0"),
        ({"step": True}, TypeError, "step=True: allowed is an int"),
        ({"step": 1.0}, TypeError, "step=1.0: allowed is an int"),
        ({"formats": "svg"}, TypeError, r"formats='svg': give a list, \['svg'\]"),
        ({"formats": ()}, ValueError, r"formats=\(\): allowed are some of 'json', 'svg', 'png'"),
        ({"formats": ["pdf"]}, ValueError, r"formats=\['pdf'\]: allowed are some of 'json', 'svg', 'png'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PipelineTimeline(**arguments)


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"formats=\['png'\]: PNG pictures need matplotlib: pip install"):
        PipelineTimeline(formats=["png"])


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[PipelineTimeline()], **QUIET)
    with pytest.raises(MisconfigurationException, match="PipelineTimeline shows pipelines, but the Trainer's strategy"):
        trainer.fit(MLP(), MLP.loader(), MLP.loader())
