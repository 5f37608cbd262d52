"""What comes back over cuts: gradients that are there, and word of those that are not, for every placement."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pp.runtime.channel import Spec, Specs
from lightning_pp.runtime.job import SignaturePlan
from lightning_pp.runtime.returned import Returns, there
from lightning_pp.schedule import SCHEDULES, Kind, Schedule, linear, looped, placement_of, v
from tests.launch import run_ranks
from tests.runtime.ranks import (
    FakeStage,
    connect,
    engine_for,
    first_message,
    greedy,
    job_for,
    leave,
    parts_of,
    run_stage,
    weight,
)

SAMPLES, MICROBATCHES = 11, 4
#: the micro-batches in which the loss does not look at the hidden state, and those in which it ignores the skip
LACKING: dict[str, tuple[set[int], set[int]]] = {
    "nothing": (set(), set()),
    "the hidden state, always": ({0, 1, 2, 3}, set()),
    "the skip, always": (set(), {0, 1, 2, 3}),
    "everything, always": ({0, 1, 2, 3}, {0, 1, 2, 3}),
    "everything, at first": ({0}, {0}),
    "everything, but at first": ({1, 2, 3}, {1, 2, 3}),
    "one or the other": ({0, 2}, {1, 3}),
    "everything, in the end": ({3}, {3}),
}


def loss_without(message: Sequence[Tensor], mb: int, lacking: tuple[set[int], set[int]]) -> Tensor:
    hidden, skip = (t.detach() if mb in which else t for t, which in zip(message[:2], lacking, strict=True))
    # an added parameter keeps the loss in a graph where all else is detached
    return (hidden + skip).pow(2).mean() + 0 * weight(9).sum()


class Lacking(FakeStage):
    """Leaves things out of its loss."""

    lacking: tuple[set[int], set[int]]
    number_of: Callable[[Tensor], int]

    def forward(self, layout: int, step: Callable[[], Any], received: list[Tensor]) -> tuple[Any, list[Tensor]]:
        result, gives = super().forward(layout, step, received)
        if result is not None:
            message = run_stage(layout, self.parameters[layout], received or first_message(step()))
            result["loss"] = loss_without(message, self.number_of(step()), self.lacking)
        return result, gives


def gradients_here(schedule: Schedule, rank: int, lacking: tuple[set[int], set[int]]) -> dict[int, Tensor | None]:
    engine = engine_for(schedule, rank)
    engine._stage.__class__ = Lacking  # type: ignore[assignment]
    stage: Any = engine._stage
    parts = parts_of(SAMPLES, MICROBATCHES)
    stage.lacking = lacking
    stage.number_of = lambda x: [id(part) for part, _ in parts].index(id(x))
    for _ in range(2):  # the second batch knows all shapes
        for parameter in stage.parameters.values():
            parameter.grad = None
        job = job_for(schedule, engine, parts)
        engine.run(job)
    return {number: parameter.grad for number, parameter in stage.parameters.items()}


def schedules_for(num_ranks: int) -> dict[str, Schedule]:
    placements = {"linear": linear(num_ranks), "looped": looped(num_ranks, 2), "v": v(num_ranks, 2)}
    found = {name: greedy(placement, MICROBATCHES, Kind.B) for name, placement in placements.items()}
    return found | {name: make(num_ranks, MICROBATCHES) for name, make in SCHEDULES.items()}


def all_gradients(num_ranks: int) -> dict[tuple[str, str], dict[int, Tensor | None]]:
    rank = connect()
    found = {
        (name, what): gradients_here(schedule, rank, lacking)
        for name, schedule in schedules_for(num_ranks).items()
        for what, lacking in LACKING.items()
    }
    leave()
    return found


def expected(num_stages: int, lacking: tuple[set[int], set[int]]) -> list[Tensor | None]:
    parameters = [weight(stage) for stage in range(num_stages)]
    for mb, (part, share) in enumerate(parts_of(SAMPLES, MICROBATCHES)):
        message = first_message(part)
        for stage, parameter in enumerate(parameters):
            message = run_stage(stage, parameter, message)
        (loss_without(message, mb, lacking) * share).backward()
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_there_is_a_gradient_where_autograd_has_one(num_ranks: int) -> None:
    by_rank = run_ranks(all_gradients, num_ranks, num_ranks, timeout=90)
    for name, schedule in schedules_for(num_ranks).items():
        num_stages = len(placement_of(schedule))
        for what, lacking in LACKING.items():
            wanted = expected(num_stages, lacking)
            for stage, found in {s: g for rank in by_rank for s, g in rank[name, what].items()}.items():
                assert (found is None) == (wanted[stage] is None), (name, what, stage)
                if found is not None:
                    torch.testing.assert_close(found, wanted[stage], atol=1e-12, rtol=0, msg=f"{name}, {what}, {stage}")


# --- the words themselves ---


def ends(num: int = 2) -> tuple[Returns, Returns]:
    """Both ends of one cut in a batch of ``num`` micro-batches, whose first message is the second's."""
    specs: Specs = (Spec((2,), torch.float64, True), Spec((3,), torch.int64, False), Spec((1,), torch.float64, True))
    plan = SignaturePlan({})
    plan.learn(2, specs)
    return Returns([plan] * num, frozenset({(1, 1)})), Returns([plan] * num, frozenset({(1, 1)}))


def received() -> list[Tensor]:
    return [torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]


def test_nothing_but_gradients_moves_behind_a_first_message_that_was_whole() -> None:
    below, above = ends()
    gradients = received()
    out = below.outgoing((1, 1), gradients, gradients)
    assert (out.tensors, out.header, out.note) == (gradients, None, [1, 1])
    assert above.known((1, 0)) is None, "it may yet have a header"
    assert above.notes.size((1, 1)) == 2
    above.notes.read((1, 1), [1, 1])
    assert (1, 0) not in above.notes.messages
    assert above.known((1, 0)) == (Spec((2,), torch.float64, False), Spec((1,), torch.float64, False))
    out = below.outgoing((1, 0), gradients, [None, gradients[1]])
    assert (out.header, out.note) == (None, None)
    assert torch.equal(out.tensors[0], torch.zeros(2, dtype=torch.float64))


def test_what_is_not_there_does_not_travel_behind_a_first_message_that_was_not_whole() -> None:
    below, above = ends()
    gradients = received()
    out = below.outgoing((1, 1), gradients, [None, gradients[1]])
    assert out.note == [0, 1]
    assert [t.shape for t in out.tensors] == [(2,), (1,)], "it was to be received before anybody knew"
    above.notes.read((1, 1), [0, 1])
    assert above.incoming((1, 1), out.tensors) == [None, out.tensors[1]]
    assert above.known((1, 0)) is None
    out = below.outgoing((1, 0), gradients, [None, gradients[1]])
    assert out.header is not None
    assert out.header[0].shape == (0,)
    assert above.incoming((1, 0), out.tensors) == [None, gradients[1]]
    assert there(["a", "b"], [None, gradients[1]]) == (["b"], [gradients[1]])


def test_a_cut_without_gradients_needs_no_word() -> None:
    plan = SignaturePlan({})
    plan.learn(2, (Spec((3,), torch.int64, False),))
    returns = Returns([plan, plan], frozenset({(1, 0)}))
    assert [returns.known((1, mb)) for mb in (0, 1)] == [(), ()]
    assert returns.notes.size((1, 0)) == 0
    assert returns.outgoing((1, 0), [], []).note is None
    assert returns.outgoing((1, 1), [], []).header is None
