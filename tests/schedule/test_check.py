"""The check: refuses what cannot run, says where and why, and lets nothing but ValueError out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.schedule import (
    Kind,
    Op,
    check,
    eager_1f1b,
    forward_only,
    from_csv,
    gpipe,
    in_flight,
    linear,
    one_f_one_b,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0,0B0", "0F0 on rank 0 comes after 0F0; .*\nrank 0: 0F0 .0F0 <-- here. 0B0"),
        ("0F0,0B0,0B0", "0B0 on rank 0 comes after 0B0"),
        ("0F0,0B0,0W0", "0W0 on rank 0 comes after 0B0; a stage runs F once, and B once or I and W once"),
        ("0F0,0I0,0B0", "0B0 on rank 0 comes after 0I0"),
        ("0F0,0I0,0I0,0W0", "0I0 on rank 0 comes after 0I0"),
        ("0F0", "rank 0 lacks 0B0: every micro-batch needs B, or I and W .a schedule for evaluation"),
        ("0F0,0I0", "rank 0 lacks 0W0: every micro-batch needs B, or I and W$"),
        ("0F0,0W0", "rank 0 lacks 0I0"),
        ("0B0", "rank 0 lacks 0F0: every micro-batch needs F"),
        ("0F1,0B1", "stage 0 .rank 0. has no op for micro-batch 0, but micro-batch 1 occurs"),
        ("0F0,0B0\n1F0,1B0,1F1,1B1", "stage 0 .rank 0. has no op for micro-batch 1"),
        ("0F0,0W0,0I0", "deadlock: 0W0 on rank 0 waits for 0I0"),
        ("0F0,0B0\n1B0,1F0", "deadlock: 1B0 on rank 1 waits for 1F0"),
        ("0F0,0B0\n1F0,1W0,1I0", "rank 0: 0F0 .0B0 <-- here, waits for 1I0."),
    ],
)
def test_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        check(from_csv(text))


def test_deadlock_shows_every_waiting_rank():
    schedule = one_f_one_b(3, 3)
    schedule[1][:2] = schedule[1][1::-1]  # 1F1 before 1F0: allowed in itself ...
    schedule[2][:2] = schedule[2][1::-1]  # ... but 2B0 before 2F0 is not
    with pytest.raises(ValueError, match="deadlock") as error:
        check(schedule)
    assert str(error.value).splitlines() == [
        "deadlock: 2B0 on rank 2 waits for 2F0, which comes later or waits itself",
        "rank 2: [2B0 <-- here, waits for 2F0] 2F0 2F1 2B1 2F2 ...",
        "rank 0: 0F0 0F1 0F2 [0B0 <-- here, waits for 1B0] 0B1 0B2",
        "rank 1: 1F1 1F0 [1B0 <-- here, waits for 2B0] 1F2 1B1 1B2",
    ]


def test_deadlock_between_two_ranks():
    schedule = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(
        ValueError, match=r"0B0 on rank 0 waits for 1B0.*\nrank 0.*\nrank 1.*1F1 <-- here, waits for 0F1"
    ):
        check(schedule)


def test_a_long_report_is_cut():
    schedule = gpipe(40, 2)
    schedule[39].reverse()
    with pytest.raises(ValueError, match=r"and 24 more ranks wait$"):
        check(schedule)


def test_messages_have_no_place_in_a_schedule():
    with pytest.raises(ValueError, match="0SEND_F0 on rank 0 is a message"):
        check({0: [Op(0, Kind.F, 0), Op(0, Kind.SEND_F, 0)]})
    with pytest.raises(ValueError, match="count from 0"):
        check({0: [Op(0, Kind.F, -1)]})


def test_forward_only_has_no_backward():
    check(forward_only(linear(3), 2), forward_only=True)
    with pytest.raises(ValueError, match="0B0 on rank 0 is a backward; a forward-only schedule holds F only"):
        check(gpipe(3, 2), forward_only=True)
    with pytest.raises(ValueError, match="lacks 0B0"):
        check(forward_only(linear(3), 2))


def test_huge_numbers_are_no_trouble():
    with pytest.raises(ValueError, match="has no op for micro-batch 0"):
        check(from_csv("0F999999999,0B999999999"))
    with pytest.raises(ValueError, match="no rank runs stage 0"):
        check(from_csv("999999999F0,999999999B0"))


def test_in_flight_counts_a_split_backward_to_its_end(zb_h1):
    assert in_flight(from_csv("0F0,0I0,0F1,0W0,0I1,0W1")) == {0: 2}
    assert in_flight(from_csv("0F0,0I0,0W0,0F1,0I1,0W1")) == {0: 1}
    assert max(in_flight(zb_h1).values()) == 4


def test_hand_written_schedules_pass(interleaved, zb_h1, v_schedule):
    for schedule in (interleaved, zb_h1, v_schedule):
        check(schedule)


CELLS = st.builds(
    Op, st.integers(0, 2), st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F]), st.integers(0, 2)
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 3), st.lists(CELLS, max_size=8), max_size=4), st.booleans())
def test_raises_nothing_but_value_error(schedule, forward):
    try:
        check(schedule, forward_only=forward)
    except ValueError:
        return
    assert schedule


def _can_run(schedule):
    """The same question, asked the slow way: repeat over all ranks until nothing moves."""
    last, done, position = len(schedule) - 1, set(), dict.fromkeys(schedule, 0)
    moved = True
    while moved:
        moved = False
        for rank, ops in schedule.items():
            if position[rank] == len(ops):
                continue
            op = ops[position[rank]]
            needs = {
                Kind.F: [(op.stage - 1, Kind.F)] if op.stage else [],
                Kind.B: [(op.stage, Kind.F)] + ([(op.stage + 1, Kind.B)] if op.stage < last else []),
            }[op.kind]
            if all((stage, kind, op.mb) in done for stage, kind in needs):
                done.add((op.stage, op.kind, op.mb))
                position[rank] += 1
                moved = True
    return all(position[rank] == len(ops) for rank, ops in schedule.items())


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([gpipe, one_f_one_b, eager_1f1b]), st.integers(1, 4), st.integers(1, 5), st.integers())
def test_agrees_with_the_slow_way_on_shuffled_programs(make, ranks, mbs, seed):
    schedule, draw = make(ranks, mbs), random.Random(seed)
    for _ in range(draw.randrange(4)):
        ops = schedule[draw.randrange(ranks)]
        first, second = draw.randrange(len(ops)), draw.randrange(len(ops))
        ops[first], ops[second] = ops[second], ops[first]
    try:
        check(schedule)
        passed = True
    except ValueError:
        passed = False
    assert passed == _can_run(schedule)
