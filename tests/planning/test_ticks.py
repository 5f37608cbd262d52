"""The fast simulation gives what the slow one gives."""

from __future__ import annotations

import random

import pytest

from lightning_pp.planning import ticks
from lightning_pp.schedule import SCHEDULES, Costs, build, in_flight, simulate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("has_transfers", [False, True])
def test_equals_the_simulator(name: str, has_transfers: bool) -> None:
    draw = random.Random(1)
    for _ in range(60):
        ranks, mbs = draw.randint(1, 7), draw.randint(1, 20)
        forward = [draw.uniform(0.5, 2) for _ in range(ranks)]
        backward = [draw.uniform(0.5, 4) for _ in range(ranks)]
        transfer, back = ([draw.uniform(0, 3) if has_transfers else 0.0 for _ in range(ranks)] for _ in range(2))
        pairs = {}
        for rank in range(1, ranks):
            pairs[rank - 1, rank], pairs[rank, rank - 1] = transfer[rank], back[rank]
        schedule = build(name, ranks, mbs)
        expected = simulate(schedule, Costs(forward=forward, backward=backward, transfer=pairs)).makespan
        assert ticks.makespan(name, mbs, forward, backward, transfer, back) == pytest.approx(expected, rel=1e-12)
        assert ticks.depths(name, ranks, mbs) == list(in_flight(schedule).values())


def test_knows_every_schedule_of_the_package() -> None:
    assert set(ticks.KNOWN) == set(SCHEDULES)
