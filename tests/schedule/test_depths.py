"""The fewest extra micro-batches in flight."""

import itertools

import pytest

from lightning_pp.schedule import SCHEDULES, Costs, build, extra_in_flight, named, one_f_one_b, simulate


@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=1.0, backward=2.0),
        Costs(forward=1.0, backward=2.0, transfer=0.1),
        Costs(forward=1.0, backward=2.0, transfer={(1, 2): 0.4, (2, 1): 0.4}),
        Costs(forward=[1.0, 2.0, 1.0, 0.5], backward=[2.0, 4.0, 2.5, 1.0], transfer=0.2),
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 3, 16])
def test_nothing_smaller_is_as_fast(costs: Costs, num_microbatches: int) -> None:
    def step(extra: tuple[int, ...]) -> float:
        return simulate(one_f_one_b(4, num_microbatches, extra), costs).makespan

    found = tuple(extra_in_flight(4, num_microbatches, costs))
    limit = step((3, 2, 1, 0)) * 1.003
    assert step(found) <= limit
    for rank in range(4):
        fewer = tuple(number - (at == rank) for at, number in enumerate(found))
        if found[rank] and all(b <= a + 1 for a, b in itertools.pairwise(fewer)):
            assert step(fewer) > limit


def test_many_ranks_take_no_time() -> None:
    found = extra_in_flight(40, 200, Costs(forward=1.0, backward=2.0, transfer=0.05))
    assert found[-1] == 0
    assert found == [min(found[0], 39 - rank) for rank in range(40)]


def test_names() -> None:
    assert build("1f1b+3", 4, 9) == SCHEDULES["eager_1f1b"](4, 9)
    assert build("1f1b+0", 4, 9) == build("auto_1f1b", 4, 9) == SCHEDULES["1f1b"](4, 9)
    assert build("1f1b+2,1,0", 3, 9) == one_f_one_b(3, 9, [2, 1, 0])
    for name in ("1f1b+", "1f1b+-1", "1f1b+1,", "1f1b + 1", "2f1b+1", "1f1b+1.5", ""):
        assert named(name) is None
        with pytest.raises(ValueError, match="no schedule and no file"):
            build(name, 2, 2)
    with pytest.raises(ValueError, match="extra_in_flight needs 3 numbers"):
        build("1f1b+1,0", 3, 9)
