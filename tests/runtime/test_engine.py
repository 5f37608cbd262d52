"""The engine, without Lightning and without a model: a small stage with five tensors at every cut, against autograd."""

from typing import Any

import pytest
import torch

from lightning_pp.runtime.engine import Engine, PipelineError
from lightning_pp.runtime.job import Job, SignaturePlan
from lightning_pp.schedule import (
    SCHEDULES,
    Kind,
    Op,
    Schedule,
    from_csv,
    in_flight,
    linear,
    looped,
    lower,
    placement_of,
    v,
)
from tests.launch import Failed, run_ranks, try_ranks
from tests.runtime.ranks import (
    FakeStage,
    connect,
    engine_for,
    evaluation_of,
    expected,
    greedy,
    job_for,
    leave,
    parts_of,
    weight,
)

SAMPLES = 13


def cases_for(num_ranks: int) -> dict[str, Schedule]:
    """Every schedule and placement, with fewer and with more micro-batches than stages; 13 samples in unequal parts."""
    cases = {f"{name} {m}": make(num_ranks, m) for name, make in SCHEDULES.items() for m in (1, 2, 7)}
    placements = {"linear": linear(num_ranks), "looped": looped(num_ranks, 2), "v": v(num_ranks, 2)}
    placements["three chunks"] = v(num_ranks, 3)
    for shape, placement in placements.items():
        for first in (Kind.B, Kind.F):
            cases |= {f"{shape} {first.value} first {m}": greedy(placement, m, first) for m in (2, 5)}
    return cases


def one_case(schedule: Schedule, rank: int) -> dict[str, Any]:
    """Two training batches around an evaluation, on one engine."""
    engine = engine_for(schedule, rank)
    num_microbatches = 1 + max(op.mb for op in schedule[0])
    parts = parts_of(SAMPLES, num_microbatches)
    job = job_for(schedule, engine, parts)
    engine.run(job)
    with torch.no_grad():
        evaluation = evaluation_of(schedule, num_microbatches)
        seen = engine.run(job_for(evaluation, engine, parts))
    for parameter in engine._stage.parameters.values():  # type: ignore[attr-defined]
        parameter.grad = None
    peak = engine.in_flight_peak
    engine.reset_peaks()
    again = Job(job.lowered, job.step, job.plans, job.loss_of, job.scales)  # known shapes: no header
    results = engine.run(again)
    left = [engine._inbox, engine._outbox, engine._grads_in, engine._grads_out, engine._saved]
    return {
        "losses": [results[mb]["loss"].item() for mb in sorted(results)],
        "evaluated": [seen[mb]["loss"].item() for mb in sorted(seen)],
        "gradients": {s: p.grad for s, p in engine._stage.parameters.items()},  # type: ignore[attr-defined]
        "in_flight": (peak, engine.in_flight_peak),
        "buffers": engine.buffers_peak,
        "left": sum(map(len, left)),
        "graph": any(r["loss"].requires_grad for r in results.values()),
    }


def all_cases(num_ranks: int) -> dict[str, dict[str, Any]]:
    rank = connect()
    outcome = {name: one_case(schedule, rank) for name, schedule in cases_for(num_ranks).items()}
    leave()
    return outcome


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_are_those_of_autograd(num_ranks: int) -> None:
    """For every schedule and placement, several stages per rank and neighbours on one rank included."""
    by_rank = run_ranks(all_cases, num_ranks, num_ranks, timeout=90)
    for name, schedule in cases_for(num_ranks).items():
        placement = placement_of(schedule)
        losses, gradients = expected(len(placement), SAMPLES, 1 + max(op.mb for op in schedule[0]))
        held = in_flight(schedule)
        for rank in range(num_ranks):
            found = by_rank[rank][name]
            last = rank == placement[-1]
            assert found["losses"] == pytest.approx(losses if last else [], abs=1e-12), name
            assert found["evaluated"] == pytest.approx(losses if last else [], abs=1e-12), name
            assert found["gradients"].keys() == {s for s, r in enumerate(placement) if r == rank}
            for stage, gradient in found["gradients"].items():
                torch.testing.assert_close(gradient, gradients[stage], atol=1e-12, rtol=0, msg=f"{name}, stage {stage}")
            assert found["in_flight"] == (held[rank], held[rank]), name
            assert found["left"] == 0, name
            assert not found["graph"], name


@pytest.mark.parametrize("name", ["1f1b", "eager_1f1b"])
def test_buffers_do_not_grow_with_the_number_of_micro_batches(name: str) -> None:
    by_rank = run_ranks(all_buffers, 3, name)
    assert max(map(max, by_rank)) <= 2 * 3  # two edges into the middle rank


def all_buffers(name: str) -> list[int]:
    rank = connect()
    peaks = []
    for num_microbatches in (5, 13):
        schedule = SCHEDULES[name](3, num_microbatches)
        engine = engine_for(schedule, rank)
        job = job_for(schedule, engine, parts_of(SAMPLES, num_microbatches))
        engine.run(job)
        engine.run(Job(job.lowered, job.step, job.plans, job.loss_of, job.scales))
        peaks.append(engine.buffers_peak)
    leave()
    return peaks


# --- what cannot be executed ---


def test_split_backward_is_refused_before_anything_runs() -> None:
    schedule = from_csv("0F0,0F1,0B0,0I1,0W1")
    engine = lone_engine()
    job = job_for(schedule, engine, parts_of(5, 2))
    with pytest.raises(ValueError, match=r"splits the backward of stage 0 \(0I1 on rank 0\).*use B in their place"):
        engine.run(job)
    assert job.results == {}
    with pytest.raises(ValueError, match="Split backwards"):
        engine.prepare(job.lowered)


def test_a_split_on_another_rank_is_refused_on_every_rank() -> None:
    lowered = lower(from_csv("0F0,0B0\n1F0,1I0,1W0"))
    with pytest.raises(ValueError, match="stage 1"):
        lone_engine().prepare(lowered)


def test_a_loss_of_several_numbers_is_refused() -> None:
    schedule = SCHEDULES["1f1b"](1, 2)
    engine = lone_engine()
    job = job_for(schedule, engine, parts_of(5, 2))
    job.loss_of = lambda result: result["hidden"]
    with pytest.raises(PipelineError, match=r"must be a single number; it has shape \[3, 3\]"):
        engine.run(job)


# --- failures ---


def lone_engine(raise_at: str = "") -> Engine:
    return Engine(0, (0,), FakeStage({0: weight(0)}, 1, raise_at), {}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("raise_at", ["0F", "0B"])
def test_a_failed_step_leaves_nothing_to_the_next(raise_at: str) -> None:
    schedule = SCHEDULES["gpipe"](1, 3)
    engine = lone_engine(raise_at)
    job = job_for(schedule, engine, parts_of(7, 3))
    with pytest.raises(PipelineError, match=rf"failed in {raise_at}0, micro-batch 0: ZeroDivisionError") as raised:
        engine.run(job)
    assert f"[{raise_at}0 <-- here]" in str(raised.value)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert not engine._saved
    assert not engine._inbox
    engine._stage.raise_at = ""  # type: ignore[attr-defined]
    engine._stage.parameters[0].grad = None  # type: ignore[attr-defined]
    engine.run(job_for(schedule, engine, parts_of(7, 3)))
    torch.testing.assert_close(engine._stage.parameters[0].grad, expected(1, 7, 3)[1][0])  # type: ignore[attr-defined]


def test_an_interrupt_leaves_nothing_either() -> None:
    engine = lone_engine()
    job = job_for(SCHEDULES["gpipe"](1, 3), engine, parts_of(7, 3))
    seen = []

    def step(mb: int) -> Any:
        seen.append(mb)
        if mb == 2:
            raise KeyboardInterrupt
        return parts_of(7, 3)[mb][0]

    job.step = step
    with pytest.raises(KeyboardInterrupt):
        engine.run(job)
    assert seen == [0, 1, 2]
    assert not engine._saved


def fail_twice() -> tuple[str, str]:
    rank = connect()
    schedule = SCHEDULES["1f1b"](2, 3)
    engine = engine_for(schedule, rank, raise_at="0B" if rank == 0 else "")
    texts = []
    for _ in range(2):
        try:
            engine.run(job_for(schedule, engine, parts_of(7, 3)))
        except PipelineError as error:
            texts.append(str(error))
        if rank == 0:
            engine.close()
    return texts[0], texts[1]


def test_after_a_failure_a_pipeline_of_several_ranks_says_that_it_is_over() -> None:
    """Its messages are out of step; without a word it would wait for its peers until the timeout."""
    (first, again), (lost, never) = run_ranks(fail_twice, 2)
    assert "failed in 0B0" in first
    assert again.startswith("This pipeline cannot go on after its failure.")
    assert "Rank 1 (stage 1) lost its peer in 1" in lost
    assert "from rank 0" in lost or "for rank 0 to take" in lost
    assert "cannot go on" in never
    assert lost in never


def change_shape() -> str:
    rank = connect()
    schedule = SCHEDULES["gpipe"](2, 2)
    engine = engine_for(schedule, rank)
    parts = parts_of(5, 2)  # three samples and two
    job = job_for(schedule, engine, parts)
    plan = SignaturePlan({rank: rank})  # type: ignore[dict-item]
    job.plans = [plan, plan]
    try:
        engine.run(job)
    except PipelineError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_shapes_that_depend_on_values_are_named() -> None:
    first, _ = run_ranks(change_shape, 2)
    assert "What crosses from stage 0 to 1 changed between micro-batches of the same shapes" in first
    assert "first [3, 3] torch.float64, [3, 3] torch.float64, [3] torch.int64" in first
    assert "now [2, 3] torch.float64" in first


def die(at: int) -> str:
    import os

    rank = connect()
    schedule = SCHEDULES["1f1b"](3, 4)
    engine = engine_for(schedule, rank, timeout=30)
    job = job_for(schedule, engine, parts_of(SAMPLES, 4))
    if rank == at:
        step = job.step
        job.step = lambda mb: os._exit(3) if mb == 2 else step(mb)
    try:
        engine.run(job)
    except PipelineError as error:
        engine.close()
        return str(error)
    return "ended"


@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_that_dies_ends_the_others_at_once(at: int) -> None:
    """Within a fraction of the timeout of 30 s; rank 0 stays, as it holds the store."""
    results = try_ranks(die, 3, at, timeout=12)
    for rank, result in enumerate(results):
        if rank == at:
            assert isinstance(result, Failed)
            assert "exit code 3" in result.text
        else:
            assert not isinstance(result, Failed), result
            assert "lost its peer in" in result


# --- frozen stages ---


def freeze() -> dict[str, Any]:
    rank = connect()
    schedule = SCHEDULES["1f1b"](3, 4)
    engine = engine_for(schedule, rank)
    stage: Any = engine._stage
    if rank < 2:
        stage.parameters[rank].requires_grad_(False)
    walked = []
    inner = stage.backward
    stage.backward = lambda layout, *rest: (walked.append(layout), inner(layout, *rest))
    job = job_for(schedule, engine, parts_of(SAMPLES, 4))
    engine.run(job)
    leave()
    return {"grad": stage.parameters[rank].grad, "walked": walked}


def test_stages_below_frozen_ones_run_no_backward() -> None:
    first, second, third = run_ranks(freeze, 3)
    assert (first["walked"], second["walked"], third["walked"]) == ([], [], [2] * 4)
    assert first["grad"] is None
    torch.testing.assert_close(third["grad"], expected(3, SAMPLES, 4)[1][2])


def test_greedy_schedules_are_what_the_tests_take_them_for() -> None:
    assert greedy(linear(2), 2)[1] == [Op(1, Kind.F, 0), Op(1, Kind.B, 0), Op(1, Kind.F, 1), Op(1, Kind.B, 1)]
    assert greedy(linear(2), 2, Kind.F) == SCHEDULES["gpipe"](2, 2)
