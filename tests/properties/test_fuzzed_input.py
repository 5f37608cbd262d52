"""Text and numbers from outside: the documented ``ValueError``, or exit code 2 and a line, and nothing else."""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_pp
from lightning_pp.__main__ import main
from lightning_pp.schedule import Kind, Op, build, check, from_csv, lower, simulate, to_csv
from lightning_pp.schedule.costsfile import read_costs
from tests.properties.descriptions import schedules

QUICK = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
#: text that is nearly right is what finds faults
CELLS = st.one_of(
    st.builds(
        "{}{}{}".format, st.integers(-1, 4), st.sampled_from([*(k.value for k in Kind), "X", ""]), st.integers(-1, 5)
    ),
    st.text(max_size=6),
)
ROWS = st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=5).map("\n".join)
OPS = st.builds(Op, st.integers(-1, 3), st.sampled_from(list(Kind)), st.integers(-1, 3))
PROGRAMS = st.dictionaries(st.integers(-1, 3), st.lists(OPS, max_size=8), max_size=4)


def _tried(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What ``function`` gives, or what its ``ValueError`` says; any other error is a fault."""
    try:
        return function(*args), ""
    except ValueError as error:
        refusal = error
    assert type(refusal) is ValueError, repr(refusal)
    assert str(refusal)
    return None, str(refusal)


def _written(text: str, name: str) -> str:
    path = Path(tempfile.mkdtemp(), name)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return str(path)


@QUICK
@given(st.one_of(CELLS, st.text()))
def test_ops(text: str) -> None:
    op, refusal = _tried(Op.parse, text)
    assert "is not an op" in refusal if op is None else Op.parse(str(op)) == op


@QUICK
@given(st.one_of(ROWS, st.text()), st.integers(1, 3), st.integers(1, 4))
def test_schedule_files(text: str, ranks: int, microbatches: int) -> None:
    path = _written(text, "schedule.csv")
    schedule, refusal = _tried(build, path, ranks, microbatches)
    os.remove(path)
    if schedule is None:
        assert path in refusal
    else:
        assert len(schedule) == ranks
        _assert_runs(schedule)


@QUICK
@given(PROGRAMS, st.booleans())
def test_lists_of_ops(programs: dict[int, list[Op]], forward_only: bool) -> None:
    _, refusal = _tried(check, programs, forward_only)
    if not refusal:
        _assert_runs(programs)
    for look in (lower, simulate):
        _tried(look, programs)


@QUICK
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_any_order_that_could_be_run_is_accepted_and_runs(data: st.DataObject, stages: int, microbatches: int) -> None:
    schedule = data.draw(schedules(stages, microbatches))
    check(schedule)
    assert from_csv(to_csv(schedule)) == schedule
    _assert_runs(schedule)


@QUICK
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_one_op_left_out_or_moved_to_another_place(data: st.DataObject, stages: int, microbatches: int) -> None:
    """Left out: refused. Moved: refused, or it runs."""
    schedule = data.draw(schedules(stages, microbatches))
    rank = data.draw(st.integers(0, stages - 1))
    place = data.draw(st.integers(0, len(schedule[rank]) - 1))
    op = schedule[rank].pop(place)
    with pytest.raises(ValueError):  # noqa: PT011 (which message depends on what is missing)
        check(schedule)
    schedule[rank].insert(data.draw(st.integers(0, len(schedule[rank]))), op)
    _, refusal = _tried(check, schedule)
    if refusal:
        assert "<-- here" in refusal
    else:
        _assert_runs(schedule)


def _assert_runs(schedule: dict[int, list[Op]]) -> None:
    """Every op once, no rank before what it waits for, and each message sent and received."""
    timeline = simulate(schedule)
    assert len(timeline.spans) == sum(map(len, schedule.values()))
    assert 0 <= timeline.bubble_fraction < 1
    programs = lower(schedule).programs.values()
    kinds = [op.kind for program in programs for op in program]
    assert kinds.count(Kind.SEND_F) == kinds.count(Kind.RECV_F)
    assert kinds.count(Kind.SEND_B) == kinds.count(Kind.RECV_B)


NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
VALUES = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3), st.dictionaries(st.text(max_size=2), NUMBERS, max_size=2))
NAMES = st.sampled_from(["forward", "backward", "input", "weight", "transfer", "stage", "overlap", ""])


@QUICK
@given(st.one_of(st.dictionaries(NAMES, VALUES), VALUES, st.text()), st.integers(1, 3), st.booleans())
def test_costs_files(found: Any, stages: int, is_table: bool) -> None:
    if is_table and isinstance(found, dict):
        text = ",".join(found) + "\n" + "\n".join(",".join(map(str, found.values())) for _ in range(stages))
    else:
        text = found if isinstance(found, str) else json.dumps(found)
    path = _written(text, "costs.csv" if is_table else "costs.json")
    costs, refusal = _tried(read_costs, path, stages)
    os.remove(path)
    if costs is None:
        assert path in refusal
        return
    timeline, refusal = _tried(simulate, build("1f1b", stages, 3), costs)
    assert refusal or 0 <= timeline.bubble_fraction <= 1


#: sizes stay small: a picture of a million micro-batches is drawn, and takes as long as that takes
VALUES_GIVEN = st.one_of(
    st.integers(-2, 9).map(str), st.floats().map(str), st.text(max_size=4), st.sampled_from(["1f1b", "/", "."])
)
SCHEDULE_OPTIONS = [
    "--stages", "--microbatches", "--schedule", "--forward", "--backward", "--transfer", "--costs", "--trace",
    "--compare", "--input", "--weight",
]  # fmt: skip
PLAN_OPTIONS = [
    "--batch", "--stages", "--microbatches", "--device-memory", "--device-flops", "--bandwidth", "--balance",
    "--latency", "--schedule", "--layers", "--split", "--json", "--optimizer", "--config",
]  # fmt: skip


def _arguments(options: list[str], first: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    pairs = st.lists(st.tuples(st.sampled_from(options), VALUES_GIVEN), max_size=5)
    return st.builds(lambda begin, rest: [*begin, *(word for pair in rest for word in pair)], first, pairs)


SCHEDULE_BEGINS = st.sampled_from([[], ["--stages", "3", "--microbatches", "4"]])
PLAN_BEGINS = st.sampled_from([[], ["nowhere:Model"], ["tests.models:MLP"], ["tests.models"], [":"], ["os:getcwd"]])


@QUICK
@given(_arguments(SCHEDULE_OPTIONS, SCHEDULE_BEGINS))
def test_arguments_of_schedule(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    _assert_answers_or_exits(["schedule", *arguments], capsys)


@settings(QUICK, max_examples=20)
@given(_arguments(PLAN_OPTIONS, PLAN_BEGINS))
def test_arguments_of_plan(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    _assert_answers_or_exits(["plan", *arguments], capsys)


def _assert_answers_or_exits(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    said = capsys.readouterr()
    if code == 2:
        assert said.err.count("\n") == 1, said.err
        assert "error: " in said.err
    else:
        assert (code, said.err) == (0, "")
        assert said.out


def _calls() -> list[tuple[str, str, ast.Call]]:
    """Every call in the package: file, what is called as it is written, the call."""
    folder = Path(lightning_pp.__file__).parent
    return [
        (str(path.relative_to(folder)), ast.unparse(node.func), node)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_no_text_of_the_user_is_run() -> None:
    """Pickles travel within the job's own process groups, and nowhere else (``metrics`` tries its own error)."""
    run = {"eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"}
    assert [(file, name) for file, name, _ in _calls() if name in run] == []
    unpickled = {file for file, name, _ in _calls() if name in ("pickle.loads", "pickle.load", "pickle.Unpickler")}
    assert unpickled == {"metrics/shared.py", "runtime/flush.py", "saving/courier.py"}


def test_checkpoints_are_read_with_the_limits_of_lightning() -> None:
    """Each ``torch.load`` says ``weights_only``, and none says that it does not matter."""
    loads = [(file, call) for file, name, call in _calls() if name == "torch.load"]
    assert loads
    for file, call in loads:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert "weights_only" in given, file
        assert given["weights_only"] != "False", file
