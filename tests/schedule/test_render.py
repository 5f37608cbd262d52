"""Drawing: the pictures, the counts a reader makes in them, and what a rank holds at each tick."""

from __future__ import annotations

import pytest

from lightning_pp.schedule import (
    SCHEDULES,
    Costs,
    Phases,
    build,
    forward_only,
    from_csv,
    gpipe,
    grid,
    held,
    in_flight,
    linear,
    one_f_one_b,
    phases,
    ticks,
)


def test_the_picture_of_1f1b():
    assert grid(one_f_one_b(4, 6)) == (
        "tick     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17\n"
        "rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5\n"
        "rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .\n"
        "rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .\n"
        "rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  ."
    )


def test_an_op_of_several_ticks():
    assert grid(gpipe(2, 2), Costs(1, 2)) == (
        "tick     0  1  2  3  4  5  6  7  8\nrank 0 | F0 F1 .  .  .  B0--- B1---\nrank 1 | .  F0 F1 B0--- B1--- .  ."
    )


def test_unequal_stages():
    assert grid(gpipe(2, 2), Costs([2, 3], [2, 1])) == (
        "tick     0  1  2  3  4  5  6  7  8  9  10 11 12\n"
        "rank 0 | F0--- F1--- .  .  .  .  .  B0--- B1---\n"
        "rank 1 | .  .  F0------ F1------ B0 B1 .  .  ."
    )


def test_several_stages_on_a_rank(v_schedule):
    assert grid(v_schedule) == (
        "tick     0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15\n"
        "rank 0 | 0F0 .   .   3F0 3B0 .   .   0B0 0F1 .   .   3F1 3I1 3W1 .   0B1\n"
        "rank 1 | .   1F0 2F0 .   .   2B0 1B0 .   .   1F1 2F1 .   .   2B1 1I1 1W1"
    )


def test_rows_stay_aligned_with_large_numbers():
    lines = grid(one_f_one_b(11, 101)).splitlines()
    assert lines[1].startswith("rank 0  | F0   F1   F2 ")
    assert lines[11].startswith("rank 10 | .    .    .  ")
    assert lines[11].index("F0 ") == lines[0].index(" 10 ") + 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_holds_every_op_in_order(name):
    schedule = build(name, 5, 7)
    for costs in (
        None,
        Costs([1, 2, 1, 1, 1.5], 2.5, transfer=0.3),
        Costs(1, 1.37, transfer=0.1),
        Costs(1e-5, 3e-5),
    ):
        for rank, row in ticks(schedule, costs).items():
            shown = [op for op, before in zip(row, [None, *row], strict=False) if op is not None and op != before]
            assert shown == schedule[rank]


def test_a_tick_divides_all_costs():
    def count(costs):
        return len(ticks(from_csv("0F0,0B0"), costs)[0])

    assert count(Costs(1, 2)) == 3
    assert count(Costs(1, 1.5)) == 5
    assert count(Costs(0.2, 0.3)) == 5
    assert count(Costs(1, 1.0001)) == 2


def test_phases():
    assert phases(one_f_one_b(4, 6)) == {
        0: Phases(3, 6, 3),
        1: Phases(2, 8, 2),
        2: Phases(1, 10, 1),
        3: Phases(0, 12, 0),
    }
    assert phases(gpipe(2, 6)) == {0: Phases(5, 2, 5), 1: Phases(5, 2, 5)}
    assert phases(forward_only(linear(1), 4)) == {0: Phases(0, 4, 0)}
    assert phases(from_csv("0F0,0F1,0I0,0W0,0I1,0W1")) == {0: Phases(1, 2, 3)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "mbs"), [(1, 1), (4, 2), (4, 8)])
def test_phases_add_up(name, ranks, mbs):
    schedule = build(name, ranks, mbs)
    for rank, parts in phases(schedule).items():
        assert parts.warm_up + parts.steady + parts.cooldown == len(schedule[rank])


def test_held():
    names = [" ".join(f"{stage}F{mb}" for stage, mb in sorted(now)) for now in held(one_f_one_b(2, 3), 0)]
    assert grid(one_f_one_b(2, 3)).splitlines()[1] == "rank 0 | F0 F1 .  B0 F2 B1 .  B2"
    assert names == ["0F0", "0F0 0F1", "0F0 0F1", "0F0 0F1", "0F1 0F2", "0F1 0F2", "0F2", "0F2"]


def test_held_until_the_weight_gradient():
    sets = held(from_csv("0F0,0I0,0F1,0W0,0I1,0W1"), 0)
    assert [len(now) for now in sets] == [1, 1, 2, 2, 1, 1]


@pytest.mark.parametrize("costs", [None, Costs(1, 2), Costs([1, 2, 3, 1], 2.5, transfer=0.5)])
def test_the_most_held_is_the_number_in_flight(costs, zb_h1):
    schedules = [build(name, 4, 8) for name in SCHEDULES] + [zb_h1]
    for schedule in schedules:
        for rank, peak in in_flight(schedule).items():
            sets = held(schedule, rank, costs)
            assert max(map(len, sets)) == peak
            assert len(sets) == len(ticks(schedule, costs)[rank])


def test_evaluation_holds_nothing():
    assert set(held(forward_only(linear(2), 3), 1)) == {frozenset()}


def test_held_names_the_ranks():
    with pytest.raises(ValueError, match="there is no rank 4: the schedule has ranks 0 to 3"):
        held(one_f_one_b(4, 2), 4)
