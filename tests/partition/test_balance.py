"""The cut is the best one: compared with all cuts."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.partition.balance import balanced_cut

COSTS = st.one_of(st.integers(0, 9).map(float), st.floats(0, 10))


@st.composite
def problems(draw):
    num_calls = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, num_calls))
    costs = draw(st.lists(COSTS, min_size=num_calls, max_size=num_calls))
    factors = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    crossing = draw(st.lists(st.integers(0, 4).map(float), min_size=num_calls, max_size=num_calls))
    return costs, factors, crossing


@given(problems())
@settings(deadline=None, max_examples=150)
def test_equals_brute_force(problem):
    costs, factors, crossing = problem
    num_calls, num_stages = len(costs), len(factors)

    def cost(stage, start, stop):
        return factors[stage] * sum(costs[start:stop])

    def largest(bounds):
        return max(cost(stage, *run) for stage, run in enumerate(pairwise(bounds)))

    def crossed(bounds):
        return sum(crossing[cut] for cut in bounds[1:-1])

    every = [(0, *inner, num_calls) for inner in combinations(range(1, num_calls), num_stages - 1)]
    smallest = min(map(largest, every))
    best = balanced_cut(num_calls, num_stages, cost, crossing)
    assert best in every
    assert largest(best) <= smallest * (1 + 1e-9)
    allowed = [bounds for bounds in every if largest(bounds) <= smallest * (1 + 1e-9)]
    assert crossed(best) == min(map(crossed, allowed))


def test_fewest_bytes_among_equals():
    costs = [4.0, 0.0, 2.0, 1.0, 1.0]  # no cut is worse than 4 but the last
    cut = balanced_cut(5, 2, lambda stage, start, stop: sum(costs[start:stop]), [0, 9, 5, 1, 0])
    assert cut == (0, 2, 5)
    assert balanced_cut(4, 2, lambda *run: 0.0, [0, 3, 1, 2]) == (0, 2, 4)


def test_as_many_stages_as_calls():
    assert balanced_cut(3, 3, lambda *run: 0.0, [0, 0, 0]) == (0, 1, 2, 3)


def test_two_hundred_calls_in_64_stages_take_no_time():
    sums = [0.0]
    for call in range(200):
        sums.append(sums[-1] + 1 + call * 7 % 5)
    start = time.perf_counter()
    bounds = balanced_cut(200, 64, lambda stage, start, stop: sums[stop] - sums[start], [1.0] * 200)
    assert time.perf_counter() - start < 2
    assert len(bounds) == 65
