"""Where the time of a step has gone, from records written by hand; and what is proposed."""

from dataclasses import replace
from datetime import timedelta

import pytest

from lightning_pp.arguments import Arguments
from lightning_pp.callbacks.hints import hint
from lightning_pp.callbacks.shares import Shares, closed_form, means_of, simulated, summary
from lightning_pp.runtime.events import Event, StepRecord
from lightning_pp.schedule import Op


def record(start: float, *parts: tuple[str, float]) -> StepRecord:
    """Events one after the other: an op or a name, and its seconds."""
    events = []
    for text, seconds in parts:
        what = Op.parse(text) if text[0].isdigit() else text
        events.append(Event(what, start, start + seconds))
        start += seconds
    return StepRecord(0, tuple(events))


#: two stages, two micro-batches: F 1 and 2, B 2 and 3 seconds
FIRST = record(
    10.0,
    ("prepare", 1), ("0F0", 1), ("0SEND_F0", 0.5), ("0F1", 1), ("0SEND_F1", 0.5), ("0RECV_B0", 4), ("0B0", 2),
    ("0RECV_B1", 3), ("0B1", 2), ("reduce", 0.25), ("share", 0.125), ("hooks", 1), ("optimizer", 0.75),
)  # fmt: skip
SECOND = record(
    9.0,
    ("prepare", 1), ("1RECV_F0", 2.5), ("1F0", 2), ("1B0", 3), ("1SEND_B0", 0.5), ("1RECV_F1", 0.25), ("1F1", 2),
    ("1B1", 3), ("1SEND_B1", 0.25), ("reduce", 1), ("share", 2), ("hooks", 1), ("optimizer", 0.75),
)  # fmt: skip
PIPELINE = [Shares.of(FIRST), Shares.of(SECOND)]


def test_a_record_adds_up() -> None:
    first, second = PIPELINE
    assert first == Shares(11.0, 25.0, 2.0, 4.0, 0.0, 7.0, 1.0, 0.25, 0.75, 0.125, 2.0, 2.0)
    # before its first computation and after its last one a stage fills and drains: 1RECV_F0 and 1SEND_B1
    assert second == Shares(12.5, 23.25, 4.0, 6.0, 0.25, 0.0, 0.5, 1.0, 0.75, 2.0, 2.0, 2.0)


def test_the_span_is_from_the_first_to_the_last_computation_of_all() -> None:
    values = summary([PIPELINE], "1f1b", one_clock=True)
    assert values["pipeline/span_seconds"] == 14.0
    assert values["pipeline/stage0/bubble_fraction"] == pytest.approx(8 / 14)
    assert values["pipeline/stage1/bubble_fraction"] == pytest.approx(4 / 14)
    assert values["pipeline/bubble_fraction"] == pytest.approx(6 / 14)
    assert values["pipeline/stage1/fill_drain_seconds"] == pytest.approx(14 - 10.75)
    assert values["pipeline/closed_form_bubble_fraction"] == pytest.approx(1 / 3)
    # on paper: 0F0 0-1, 1F0 1-3, 1B0 3-6, 1F1 6-8, 1B1 8-11, 0B1 11-13
    assert values["pipeline/simulated_bubble_fraction"] == pytest.approx(1 - (6 + 10) / (2 * 13))
    for stage in range(2):
        names = ("forward", "backward", "activation_wait", "gradient_wait", "send", "fill_drain")
        assert sum(values[f"pipeline/stage{stage}/{name}_seconds"] for name in names) == pytest.approx(14.0)


def test_clocks_that_differ_do_not_matter_where_they_are_known_to() -> None:
    first, second = PIPELINE
    shifted = replace(second, begin=second.begin + 1e6, end=second.end + 1e6)
    right = summary([PIPELINE], "1f1b", one_clock=True)
    assert summary([[first, shifted]], "1f1b", one_clock=False) == pytest.approx(right)


def test_a_first_stage_that_is_frozen_does_not_end_the_span() -> None:
    frozen = replace(PIPELINE[0], end=15.0)
    assert summary([[frozen, PIPELINE[1]]], "1f1b", one_clock=True)["pipeline/span_seconds"] == 12.25


def test_replicas_are_averaged() -> None:
    twice = [
        replace(s, begin=2 * s.begin, end=2 * s.end, forward=2 * s.forward, backward=2 * s.backward) for s in PIPELINE
    ]
    values = summary([PIPELINE, twice], "1f1b", one_clock=True)
    assert values["pipeline/span_seconds"] == 21.0
    assert values["pipeline/stage0/forward_seconds"] == 3.0
    assert values["pipeline/bubble_fraction"] == pytest.approx(6 / 14)
    assert means_of([PIPELINE, twice]) == {"forward": [1.5, 3.0], "backward": [3.0, 4.5]}


def test_a_single_stage_has_no_bubble() -> None:
    alone = record(1.0, ("prepare", 1), ("0F0", 1), ("0B0", 2), ("0F1", 1), ("0B1", 2), ("reduce", 1))
    values = summary([[Shares.of(alone)]], "1f1b", one_clock=True)
    assert {value for name, value in values.items() if name.endswith("bubble_fraction")} == {0.0}


def test_numbers_survive_the_way() -> None:
    assert [Shares(*shares.numbers()) for shares in PIPELINE] == PIPELINE


# -- hints ----------------------------------------------------------------------------------------------------------


def arguments(**given: object) -> Arguments:
    options = {"stages": 4, "microbatches": 4, "schedule": "1f1b", "layers": None, "split": None, "balance": "flops"}
    rest = {"activation_checkpointing": False, "process_group_backend": None, "timeout": timedelta(minutes=1)}
    return Arguments(**{**options, **rest, **given})  # type: ignore[arg-type]


def hinted(forward: list[float], microbatches: int = 4, **given: object) -> str | None:
    means = {"forward": forward, "backward": [2 * seconds for seconds in forward]}
    values = {"pipeline/bubble_fraction": simulated("1f1b", microbatches, means)}
    return hint(values, means, arguments(**given), microbatches)


def test_more_microbatches_are_proposed() -> None:
    assert hinted([1.0] * 4) == (
        "the bubble is 43% with 4 micro-batches, of which the schedule explains 43%:"
        " microbatches=16 would make that 16%."
    )
    assert closed_form(4, 16) == pytest.approx(0.158, abs=1e-3)


def test_a_small_batch_is_named_as_the_limit() -> None:
    means = {"forward": [1.0] * 4, "backward": [2.0] * 4}
    text = hint({"pipeline/bubble_fraction": 0.43}, means, arguments(microbatches=None), 4)
    assert text is not None
    assert "a batch of 16 samples or more" in text


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({}, "balance='time' cuts"),
        ({"balance": "time"}, "split=[...] moves"),
        ({"split": ["a", "b", "c"]}, "move layers away from it in split"),
    ],
)
def test_a_slow_stage_is_named(given: dict[str, object], advice: str) -> None:
    text = hinted([1.0, 1.0, 2.0, 1.0], microbatches=16, **given)
    assert text is not None
    assert text.startswith("stage 2 takes 1.6 times the mean of all stages")
    assert advice in text


def test_nothing_is_proposed_where_nothing_stands_out() -> None:
    means = {"forward": [1.0, 1.1, 1.0, 1.0], "backward": [2.0] * 4}
    assert hint({"pipeline/bubble_fraction": 0.1}, means, arguments(microbatches=32), 32) is None
    alone = {"forward": [1.0], "backward": [2.0]}
    assert hint({"pipeline/bubble_fraction": 0.0}, alone, arguments(stages=1), 4) is None
