"""What hypothesis draws: models, pipelines, and schedules that are valid by construction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from lightning_pp.schedule import Kind, Op, Schedule, to_csv
from tests.properties.random_blocks import KINDS
from tests.properties.random_model import (
    AFTER,
    BEFORE,
    BLOCK_CHECKPOINTS,
    CHECKPOINTS,
    NO_TENSOR,
    WRITABLE,
    BlockSpec,
    ModelSpec,
    NodeSpec,
)

MAX_STAGES = 4


@dataclass(frozen=True)
class RunSpec:
    """A model and how it is trained."""

    model: ModelSpec
    stages: int
    microbatches: int
    schedule: str = "1f1b"
    rows: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()
    validate: bool = False


@st.composite
def schedules(draw: st.DrawFn, stages: int, microbatches: int) -> Schedule:
    """Any order in which the ranks could get through: some rank runs one of the ops that have what they need."""
    todo = [Op(stage, kind, mb) for stage in range(stages) for kind in (Kind.F, Kind.B) for mb in range(microbatches)]
    done: set[Op] = set()
    schedule: Schedule = {stage: [] for stage in range(stages)}
    while todo:
        ready = [op for op in todo if all(need in done for need in _needs(op, stages))]
        op = draw(st.sampled_from(ready))
        schedule[op.stage].append(op)
        todo.remove(op)
        done.add(op)
    return schedule


def _needs(op: Op, stages: int) -> list[Op]:
    if op.kind is Kind.F:
        return [replace(op, stage=op.stage - 1)] if op.stage else []
    return [replace(op, kind=Kind.F)] + ([replace(op, stage=op.stage + 1)] if op.stage + 1 < stages else [])


@st.composite
def block_lists(draw: st.DrawFn) -> tuple[BlockSpec, ...]:
    found: list[BlockSpec] = []
    for number in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        tied = [n for n in range(number) if _has_linear(found[n].kind)] if _has_linear(kind) else []
        found.append(
            BlockSpec(
                kind,
                draw(st.sampled_from(["list", "list", "dict", "attribute"])),
                frozen=draw(st.integers(0, 5)) == 0,
                tied_to=draw(st.sampled_from(tied)) if tied and draw(st.integers(0, 3)) == 0 else None,
            )
        )
    return tuple(found)


def _has_linear(kind: str) -> bool:
    return kind not in ("silent", "same", "recurrent", "nested")


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    blocks = draw(block_lists())
    order = list(range(len(blocks))) + draw(st.lists(st.integers(0, len(blocks) - 1), max_size=2))
    nodes = tuple(draw(_nodes(number, block, blocks[block].kind)) for number, block in enumerate(order))
    some = st.lists(st.integers(0, len(nodes) - 1), max_size=2, unique=True).map(tuple)
    return ModelSpec(
        blocks,
        nodes,
        supervised=draw(some),
        logged=draw(some),
        returns=draw(st.sampled_from(["tensor", "dict"])),
        as_dict=draw(st.booleans()),
        keeps=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        samples=draw(st.integers(1, 11)),
        batch_size=draw(st.integers(1, 7)),
        turns=draw(st.integers(0, len(blocks) - 1)) if draw(st.integers(0, 5)) == 0 else None,
    )


@st.composite
def _nodes(draw: st.DrawFn, number: int, block: int, kind: str) -> NodeSpec:
    earlier = st.integers(0, number)
    after = [name for name in sorted(AFTER) if name != "added in place" or kind in WRITABLE]
    return NodeSpec(
        block,
        first=draw(st.one_of(st.just(number), earlier)),
        second=draw(earlier),
        before="copy" if kind == "into_input" else draw(st.sampled_from(sorted(BEFORE))),
        after=draw(st.sampled_from(after)),
        no_grad=draw(st.integers(0, 9)) == 0,
        around=draw(_arounds(kind)) if draw(st.integers(0, 4)) == 0 else "nothing",
        by_name=draw(st.booleans()),
    )


def _arounds(kind: str) -> st.SearchStrategy[str]:
    """Gradient checkpoints run a block a second time, which must not write into its argument."""
    if kind == "into_input":
        return st.just("nothing")
    return st.sampled_from(CHECKPOINTS if kind in NO_TENSOR else CHECKPOINTS + BLOCK_CHECKPOINTS)


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    model, stages = draw(models()), draw(st.integers(1, MAX_STAGES))
    microbatches = draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "eager_1f1b", "1f1b+1", "file"]))
    options: dict[str, Any] = {"balance": draw(st.sampled_from(["flops", "params", "memory"]))}
    if draw(st.integers(0, 3)) == 0:
        options["activation_checkpointing"] = draw(st.sampled_from([True, ("head",)]))
    epochs = 1 if model.turns is None else 3
    trainer: dict[str, Any] = {"accumulate_grad_batches": draw(st.integers(1, 3)), "max_epochs": epochs}
    clip = draw(st.sampled_from(["nothing", "norm", "value"]))
    if clip != "nothing":
        trainer |= {"gradient_clip_val": 0.3 if clip == "norm" else 0.02, "gradient_clip_algorithm": clip}
    rows = to_csv(draw(schedules(stages, microbatches))) if schedule == "file" else None
    items = tuple(options.items()), tuple(trainer.items())
    return RunSpec(model, stages, microbatches, schedule, rows, *items, validate=draw(st.booleans()))
