"""Simulation: closed forms, reference values of the papers, unequal costs, and what transfers cost."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.schedule import (
    SCHEDULES,
    Costs,
    Op,
    build,
    eager_1f1b,
    forward_only,
    from_csv,
    gpipe,
    linear,
    one_f_one_b,
    simulate,
    v,
)

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"


def percent_over(schedule, free, **costs):
    """How much longer a step takes than ``free``, in percent, for F 1 and B 2."""
    return 100 * (simulate(schedule, Costs(1, 2, **costs)).makespan / free - 1)


@pytest.mark.parametrize(("name", "peaks"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_reference_values(name, peaks):
    timeline = simulate(build(name, 4, 8))
    assert timeline.makespan == 33
    assert timeline.bubble_fraction == pytest.approx(3 / 11, abs=1e-15)
    assert list(timeline.in_flight.values()) == peaks
    assert list(timeline.idle.values()) == [9, 9, 9, 9]


def test_reference_value_of_interleaved(interleaved):
    timeline = simulate(interleaved)
    assert timeline.makespan == 57
    assert timeline.bubble_fraction == pytest.approx(3 / 19, abs=1e-15)


def test_reference_value_of_zb_h1(zb_h1):
    timeline = simulate(zb_h1)
    assert timeline.makespan == 27
    assert timeline.bubble_fraction == pytest.approx(1 / 9, abs=1e-15)
    assert max(timeline.in_flight.values()) == 4


def test_unit_costs():
    timeline = simulate(one_f_one_b(4, 6), Costs(1, 1))
    assert (timeline.makespan, timeline.bubble_fraction) == (18, pytest.approx(1 / 3))
    assert timeline.bubble_fractions == {rank: pytest.approx(1 / 3) for rank in range(4)}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 9),
    st.integers(1, 20),
    st.floats(0.1, 9),
    st.floats(0.1, 9),
)
def test_closed_form_for_equal_stages(name, ranks, mbs, forward, backward):
    timeline = simulate(build(name, ranks, mbs), Costs(forward, backward))
    assert timeline.makespan == pytest.approx((mbs + ranks - 1) * (forward + backward))
    assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (mbs + ranks - 1), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 12))
def test_closed_form_of_gpipe_with_unequal_stages(costs, mbs):
    """Each half is a flow shop: once through all stages, and the slowest stage for each other one."""
    forward, backward = (list(numbers) for numbers in zip(*costs, strict=True))
    expected = sum(forward) + sum(backward) + (mbs - 1) * (max(forward) + max(backward))
    assert simulate(gpipe(len(costs), mbs), Costs(forward, backward)).makespan == expected


def test_1f1b_with_unequal_stages_by_hand():
    """F 1 and 2, B 3 and 5: rank 1 starts at 1, works without a pause, and rank 0 ends with its last B."""
    timeline = simulate(one_f_one_b(2, 4), Costs([1, 2], [3, 5]))
    assert timeline.makespan == 1 + 4 * (2 + 5) + 3
    assert timeline.idle == {0: 32 - 16, 1: 32 - 28}
    assert [str(span.op) for span in timeline.of_rank(0)] == [
        "0F0",
        "0F1",
        "0B0",
        "0F2",
        "0B1",
        "0F3",
        "0B2",
        "0B3",
    ]
    assert [span.start for span in timeline.of_rank(0)] == [0, 1, 8, 11, 15, 18, 22, 29]


def test_a_chain_of_one_microbatch_adds_everything_up():
    costs = Costs([1, 2, 3], [4, 5, 6], transfer={(0, 1): 0.5, (1, 2): 0.25, (2, 1): 2, (1, 0): 1})
    assert simulate(one_f_one_b(3, 1), costs).makespan == 21 + 3.75
    assert simulate(forward_only(linear(3), 1), costs).makespan == 6.75


def test_stages_of_one_rank_exchange_nothing():
    assert simulate(forward_only(v(2, 2), 1), Costs(transfer=10)).makespan == 4 + 2 * 10
    assert simulate(gpipe(1, 3), Costs(transfer=10)).makespan == 9


def test_messages_of_one_edge_follow_one_another():
    """Rank 1's last input is there after a forward and four transfers, each longer than a forward."""
    timeline = simulate(forward_only(linear(2), 4), Costs(transfer=5))
    assert timeline.makespan == 1 + 4 * 5 + 1
    assert [span.start for span in timeline.of_rank(1)] == [6, 11, 16, 21]


def test_weight_gradients_cost_time():
    """A whole backward is I plus W, and W alone is charged, also when it costs most."""
    costs = Costs(forward=1, input=1, weight=10)
    assert costs.of(Op.parse("0B0")) == 11
    assert simulate(from_csv("0F0,0B0"), costs).makespan == simulate(from_csv("0F0,0I0,0W0"), costs).makespan == 12


WAITED = {0.05: "+3.3 %", 0.1: "+6.5 %", 0.2: "+13.0 %", 0.4: "+26.1 %"}
ASYNCHRONOUS = {0.05: "+2.5 %", 0.1: "+5.0 %", 0.2: "+10.0 %", 0.4: "+19.9 %"}
ONE_MORE = {0.05: "+1.1 %", 0.1: "+3.3 %", 0.2: "+7.6 %", 0.4: "+16.1 %"}
EAGER = {0.05: "+0.1 %", 0.1: "+0.3 %", 0.2: "+0.6 %", 0.4: "+1.2 %"}
TRANSFER_TABLE = [
    ("1F1B, waited for", one_f_one_b(4, 64), False, WAITED),
    ("1F1B", one_f_one_b(4, 64), True, ASYNCHRONOUS),
    ("1F1B, one more in flight on ranks 0 to 2", one_f_one_b(4, 64, [1, 1, 1, 0]), True, ONE_MORE),
    ("eager 1F1B", eager_1f1b(4, 64), True, EAGER),
]


@pytest.mark.parametrize(("label", "schedule", "overlap", "expected"), TRANSFER_TABLE)
def test_what_transfers_cost(label, schedule, overlap, expected):
    assert simulate(schedule, Costs(1, 2)).makespan == 201
    for transfer, text in expected.items():
        assert percent_over(schedule, 201, transfer=transfer, overlap=overlap) == pytest.approx(
            float(text.rstrip(" %")), abs=0.05 + 1e-9
        )
    assert f"| {label} | {' | '.join(expected.values())} |" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize(("ranks", "plain", "one_more", "eager"), [(4, 12.8, 1.1, 0.4), (8, 11.8, 1.4, 0.5)])
def test_one_slow_link(ranks, plain, one_more, eager):
    """A link of 0.4 F in the middle, 0.02 F elsewhere; the ranks before it get one more micro-batch."""
    half, free = ranks // 2, 3 * (64 + ranks - 1)
    transfer = {(s, t): 0.02 for s in range(ranks) for t in (s - 1, s + 1)}
    transfer[half - 1, half] = transfer[half, half - 1] = 0.4
    ahead = one_f_one_b(ranks, 64, [1] * half + [0] * half)
    for schedule, expected in (
        (one_f_one_b(ranks, 64), plain),
        (ahead, one_more),
        (eager_1f1b(ranks, 64), eager),
    ):
        assert percent_over(schedule, free, transfer=transfer) == pytest.approx(expected, abs=0.051)
    row = f"| {ranks} | +{plain} % | +{one_more} % | +{eager} % |"
    assert row in DOCS.read_text(encoding="utf-8")


def test_waited_messages_may_deadlock(interleaved):
    with pytest.raises(ValueError, match=r"overlap=False.*deadlocks: rank 0 at 4SEND_B0.*use overlap=True"):
        simulate(interleaved, Costs(transfer=0.1, overlap=False))


@pytest.mark.parametrize("overlap", [True, False])
def test_spans_are_the_schedule(overlap):
    schedule = one_f_one_b(3, 5)
    timeline = simulate(schedule, Costs([1, 2, 1], [2, 1, 3], transfer=0.3, overlap=overlap))
    for rank, ops in schedule.items():
        spans = timeline.of_rank(rank)
        assert [span.op for span in spans] == ops
        assert all(before.end <= after.start for before, after in pairwise(spans))
        busy = sum(span.end - span.start for span in spans)
        assert timeline.idle[rank] == pytest.approx(timeline.makespan - busy)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 1]), "costs: forward has 2 entries, but there is a stage 2: one per stage"),
        (Costs(backward=0), "costs: backward of stage 2 must be a finite number above 0, got 0"),
        (Costs(forward=float("nan")), "costs: forward of stage 0 must be a finite number above 0, got nan"),
        (Costs(transfer=-1), "costs: transfer 0->1 must be a finite number of at least 0, got -1"),
        (Costs(transfer={(2, 1): float("inf")}), "costs: transfer 2->1 must be a finite number"),
    ],
)
def test_wrong_costs(costs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        simulate(one_f_one_b(3, 3), costs)


def test_refuses_what_cannot_run():
    with pytest.raises(ValueError, match="deadlock"):
        simulate(from_csv("0B0,0F0"))


def test_is_fast_and_repeatable():
    schedule = one_f_one_b(32, 256)
    start = time.perf_counter()
    timeline = simulate(schedule)
    assert time.perf_counter() - start < 5  # it takes 0.2 s; the rest is for busy machines
    assert timeline.makespan == 3 * (256 + 31)
    assert timeline == simulate(schedule)
