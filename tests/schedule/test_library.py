"""The library: every schedule is valid, holds what it promises, and looks like its docstring."""

from __future__ import annotations

import inspect
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.schedule import (
    SCHEDULES,
    Kind,
    Op,
    build,
    check,
    eager_1f1b,
    forward_only,
    gpipe,
    grid,
    in_flight,
    linear,
    looped,
    one_f_one_b,
    placement_of,
    to_csv,
    truncate,
    v,
    write_csv,
)

SIZES = [
    (1, 1),
    (1, 7),
    (2, 1),
    (2, 2),
    (3, 2),
    (4, 6),
    (4, 64),
    (7, 3),
    (8, 5),
    (13, 29),
    (32, 1),
    (32, 256),
]
IN_FLIGHT = {
    "gpipe": lambda ranks, mbs, rank: mbs,
    "1f1b": lambda ranks, mbs, rank: min(mbs, ranks - rank),
    "eager_1f1b": lambda ranks, mbs, rank: min(mbs, 2 * (ranks - rank) - 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "mbs"), SIZES)
def test_is_valid_and_holds_exactly(name, ranks, mbs):
    schedule = build(name, ranks, mbs)
    check(schedule)
    assert placement_of(schedule) == linear(ranks)
    assert in_flight(schedule) == {rank: IN_FLIGHT[name](ranks, mbs, rank) for rank in range(ranks)}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 32), st.integers(1, 256))
def test_any_size_is_valid(name, ranks, mbs):
    if ranks * mbs > 1500:
        mbs = 1 + 1500 // ranks
    test_is_valid_and_holds_exactly(name, ranks, mbs)


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (gpipe, gpipe(4, 6)),
        (one_f_one_b, one_f_one_b(4, 6)),
        (eager_1f1b, eager_1f1b(4, 6)),
        (forward_only, forward_only(linear(4), 6)),
    ],
)
def test_docstring_holds_the_picture(make, schedule):
    assert textwrap.indent(grid(schedule), "    ") in inspect.getdoc(make)


def test_1f1b_programs():
    programs = {rank: " ".join(map(str, ops)) for rank, ops in one_f_one_b(3, 4).items()}
    assert programs == {
        0: "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        1: "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        2: "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    }


def test_1f1b_with_fewer_microbatches_than_ranks():
    assert " ".join(map(str, one_f_one_b(4, 2)[0])) == "0F0 0F1 0B0 0B1"
    assert " ".join(map(str, one_f_one_b(4, 1)[2])) == "2F0 2B0"


def test_extra_in_flight_is_capped_by_the_microbatches():
    assert in_flight(one_f_one_b(4, 8, [1, 1, 0, 0])) == {0: 5, 1: 4, 2: 2, 3: 1}
    assert in_flight(one_f_one_b(4, 4, [9, 1, 0, 0])) == {0: 4, 1: 4, 2: 2, 3: 1}
    check(one_f_one_b(4, 8, [0, 1, 2, 3]))
    assert one_f_one_b(4, 8, [0] * 4) == one_f_one_b(4, 8)


@pytest.mark.parametrize("extra", [[1], [0, 0, 0, -1], []])
def test_extra_in_flight_of_the_wrong_form(extra):
    with pytest.raises(ValueError, match="needs 4 numbers of at least 0, one per rank; got"):
        one_f_one_b(4, 8, extra)


def test_extra_in_flight_that_could_not_be_fed():
    with pytest.raises(ValueError, match=r"lets rank 2 hold 5 micro-batches, but rank 1 only 3.*at least 2"):
        one_f_one_b(4, 8, [0, 0, 3, 0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 9))
def test_extra_in_flight_is_valid_or_refused(extra, mbs):
    try:
        schedule = one_f_one_b(len(extra), mbs, extra)
    except ValueError:
        return
    check(schedule)


@pytest.mark.parametrize("placement", [linear(1), linear(4), looped(4, 2), looped(3, 3), v(4, 2), v(3, 3), (1, 1, 0)])
@pytest.mark.parametrize("mbs", [1, 2, 5, 16])
def test_forward_only_is_valid(placement, mbs):
    schedule = forward_only(placement, mbs)
    check(schedule, forward_only=True)
    assert placement_of(schedule) == placement
    assert set(in_flight(schedule).values()) == {0}


@pytest.mark.parametrize("placement", [(), (0, 2), (1, 2)])
def test_forward_only_refuses_gaps(placement):
    with pytest.raises(ValueError, match=r"a placement names ranks 0, 1, \.\.\. without gaps"):
        forward_only(placement, 2)


@pytest.mark.parametrize("mbs", [1, 3, 7, 8])
def test_truncate_stays_valid(mbs, interleaved, zb_h1):
    for schedule in (gpipe(4, 8), one_f_one_b(4, 8), eager_1f1b(4, 8), interleaved, zb_h1):
        shorter = truncate(schedule, mbs)
        check(shorter)
        assert {op.mb for ops in shorter.values() for op in ops} == set(range(mbs))
    check(truncate(forward_only(v(4, 2), 8), mbs), forward_only=True)


def test_truncate_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="has 8 micro-batches, 9 were asked for: use at most 8"):
        truncate(gpipe(2, 8), 9)
    with pytest.raises(ValueError, match="num_microbatches must be"):
        truncate(gpipe(2, 8), 0)


def test_a_wrong_program_is_caught():
    """P-k warm-up forwards and then F before B keeps one micro-batch more; the exact count shows it."""
    off_by_one = one_f_one_b(4, 8, [1, 1, 1, 1])
    check(off_by_one)
    assert in_flight(off_by_one) == {0: 5, 1: 4, 2: 3, 3: 2} != in_flight(one_f_one_b(4, 8))


@pytest.mark.parametrize("make", SCHEDULES.values())
def test_sizes_below_one(make):
    with pytest.raises(ValueError, match="num_ranks must be a whole number of at least 1, got 0"):
        make(0, 4)
    with pytest.raises(ValueError, match="num_microbatches must be a whole number of at least 1, got 0"):
        make(4, 0)


def test_build_from_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(gpipe(2, 6), path)
    assert build(str(path), 2, 6) == build(path, 2, 6) == gpipe(2, 6)
    assert build(str(path), 2, 4) == gpipe(2, 4)
    with pytest.raises(ValueError, match=r"mine.csv' has 2 rows, one per rank, but there are 3 ranks"):
        build(str(path), 3, 4)
    with pytest.raises(ValueError, match=r"mine.csv': the schedule has 6 micro-batches, 7 were asked for"):
        build(str(path), 2, 7)


def test_build_checks_the_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv({0: [Op(0, Kind.B, 0), Op(0, Kind.F, 0)]}))
    with pytest.raises(ValueError, match=r"mine.csv': deadlock: 0B0 on rank 0 waits for 0F0"):
        build(str(path), 1, 1)


def test_build_lists_the_names(tmp_path):
    for name in ("1f2b", str(tmp_path), ""):
        with pytest.raises(ValueError, match="use gpipe, 1f1b, eager_1f1b or a CSV file"):
            build(name, 4, 8)


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = gpipe
