"""Random models in random pipelines: the numbers of the plain run, or a refusal before the first step.

The number of examples is that of the hypothesis profile: ``HYPOTHESIS_PROFILE=many`` runs 500 of them.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis.errors import InvalidArgument

from tests.launch import Failed
from tests.properties.descriptions import MAX_STAGES, RunSpec, runs
from tests.properties.random_model import BlockSpec, ModelSpec, NodeSpec, RandomModel
from tests.properties.warm import WarmRanks, warm_ranks
from tests.training import Outcome, assert_same, fit

#: seconds for one example; a machine with other work to do may stop a process for minutes
_HANGS_AFTER = 240

#: what torch says of a reentrant checkpoint of which nothing is trained, and of writing into a view that one returns
_NO_MODEL = (
    "none of output has requires_grad=True, this checkpoint() is not necessary",
    "CheckpointFunction is a view and is being modified inplace",
)

pytestmark = pytest.mark.timeout(0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, WarmRanks]]:
    with warm_ranks(range(1, MAX_STAGES + 1), _HANGS_AFTER) as pools:
        yield pools


def train(run: RunSpec, stages: int, schedule: str) -> Outcome:
    """One rank of ``run`` in so many stages; none is the plain Trainer."""
    strategy = {"stages": stages, "microbatches": run.microbatches, "schedule": schedule, **dict(run.options)}
    return fit(
        "random",
        strategy if stages else None,
        dict(run.trainer),
        devices=max(1, stages),
        cls=partial(RandomModel, run.model),  # type: ignore[arg-type]
        validate=run.validate,
    )


def assert_equal_or_refused(run: RunSpec, pools: dict[int, WarmRanks]) -> None:
    """Train ``run`` without and with the pipeline and compare all that can be seen."""
    reference = pools[1].run(train, run, int(run.model.draws), "1f1b")[0]
    if isinstance(reference, Failed):
        if any(text in reference.text for text in _NO_MODEL):
            return _note("no model: fails without a pipeline as well")
        assert run.model.draws, f"the plain run fails:\n{reference.text}"
        _note("refused")
        return _assert_refused(run, [reference.text])  # it is a pipeline as well, of one stage
    with tempfile.TemporaryDirectory() as folder:
        schedule = run.schedule
        if run.rows is not None:
            schedule = str(Path(folder, "schedule.csv"))
            Path(schedule).write_text(run.rows, encoding="utf-8")
        outcomes = pools[run.stages].run(train, run, run.stages, schedule)
    failures = [outcome.text for outcome in outcomes if isinstance(outcome, Failed)]
    if not failures:
        _note("equal")
        return assert_same(reference, outcomes)
    assert len(failures) == run.stages, f"some ranks failed, and others did not:\n{failures[0]}"
    _note("refused")
    return _assert_refused(run, failures)


def _note(what: str) -> None:
    """Count it, where hypothesis is drawing."""
    with contextlib.suppress(InvalidArgument):
        event(what)


def _assert_refused(run: RunSpec, failures: list[str]) -> None:
    assert all("MisconfigurationException" in text for text in failures), "\n---\n".join(failures)
    assert not any("_call_strategy_hook" in text for text in failures), f"a step has run:\n{failures[0]}"
    kinds = {run.model.blocks[node.block].kind for node in run.model.nodes}
    if "writes into its arguments in place" in failures[0]:
        assert dict(run.options).get("activation_checkpointing"), failures[0]
        assert "into_input" in kinds, failures[0]
        return
    if "use_reentrant=True" in failures[0]:
        assert any(node.around.startswith("reentrant") for node in run.model.nodes), failures[0]
        return
    assert re.search(r"calls only \d+ layer\(s\)", failures[0]), failures[0]
    calls = 1 + sum(not _is_glue(run.model.blocks[node.block]) for node in run.model.nodes)
    assert run.stages > calls, failures[0]


def _is_glue(block: BlockSpec) -> bool:
    return block.place != "list" and block.kind in ("silent", "same")


@settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)
@given(run=runs())
def test_random_pipelines(ranks: dict[int, WarmRanks], run: RunSpec) -> None:
    assert_equal_or_refused(run, ranks)


#: found by the test above
FOUND = {
    "a stage without a gradient, clipped by value": RunSpec(
        ModelSpec((BlockSpec("linear", frozen=True), BlockSpec("curved")), (NodeSpec(0, 0, 0), NodeSpec(1, 1, 0))),
        stages=2,
        microbatches=3,
        options=(("split", ("blocks.1",)),),
        trainer=(("gradient_clip_val", 0.02), ("gradient_clip_algorithm", "value"), ("max_epochs", 1)),
    ),
    "a layer that is recomputed, and writes into its argument": RunSpec(
        ModelSpec(
            (BlockSpec("into_input"), BlockSpec("curved")), (NodeSpec(0, 0, 0, before="copy"), NodeSpec(1, 1, 0))
        ),
        stages=2,
        microbatches=2,
        options=(("activation_checkpointing", True),),
        trainer=(("max_epochs", 1),),
    ),
    "a value that is detached behind the cut, and weights that decay": RunSpec(
        ModelSpec(
            (BlockSpec("curved"), BlockSpec("curved")),
            (NodeSpec(0, 0, 0), NodeSpec(1, 1, 0, after="detach")),
            optimizer="adamw",
        ),
        stages=2,
        microbatches=2,
        options=(("split", ("head",)),),
        trainer=(("max_epochs", 1),),
    ),
    "a checkpoint around a layer that the next stage calls as well": RunSpec(
        ModelSpec(
            (BlockSpec("linear"), BlockSpec("curved"), BlockSpec("linear")),
            (
                NodeSpec(0, 0, 0),
                NodeSpec(1, 1, 0, around="checkpoint", after="tanh"),
                NodeSpec(2, 2, 0),
                NodeSpec(1, 3, 0),
            ),
        ),
        stages=2,
        microbatches=2,
        options=(("split", ("blocks.2",)),),
        trainer=(("max_epochs", 1),),
    ),
    "a cut behind a reentrant checkpoint that adds to what its layer gives": RunSpec(
        ModelSpec(
            (BlockSpec("linear"), BlockSpec("curved"), BlockSpec("linear")),
            (NodeSpec(0, 0, 0), NodeSpec(1, 1, 0, around="reentrant", after="residual"), NodeSpec(2, 2, 0)),
        ),
        stages=2,
        microbatches=2,
        options=(("split", ("blocks.2",)),),
        trainer=(("max_epochs", 1),),
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_found_before(ranks: dict[int, WarmRanks], case: str) -> None:
    assert_equal_or_refused(FOUND[case], ranks)


def test_a_rank_that_cannot_read_its_example_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not died: a module that changes while ranks are started anew is not a fault of the pipeline."""
    source = tmp_path / "changing.py"
    source.write_text("def work():\n    return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    work = importlib.import_module("changing").work
    source.write_text("def work(\n", encoding="utf-8")
    with warm_ranks(range(1, 2), 60) as pools:
        assert "SyntaxError" in pools[1].run(work)[0].text
        assert pools[1].run(len, "three") == [5]
