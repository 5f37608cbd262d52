"""Placements: the three shapes, and reading one off a schedule."""

from __future__ import annotations

import pytest

from lightning_pp.schedule import forward_only, from_csv, linear, looped, placement_of, v


def test_shapes():
    assert linear(4) == (0, 1, 2, 3)
    assert looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v(3, 2) == (0, 1, 2, 2, 1, 0)
    assert v(2, 3) == (0, 1, 1, 0, 0, 1)
    assert linear(1) == looped(1, 1) == v(1, 1) == (0,)


@pytest.mark.parametrize("placement", [linear(1), linear(5), looped(3, 2), v(3, 2), v(2, 3), (1, 0, 2)])
def test_is_read_off_a_schedule(placement):
    assert placement_of(forward_only(placement, 3)) == placement


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n0F1,0B1", "stage 0 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0", "no rank runs stage 1, but rank 1 runs stage 2"),
        ("0F0,0B0\n,\n1F0,1B0", "rank 1 of 3 has no ops"),
        ("", "ranks 0, 1, 2, ... without gaps"),
    ],
)
def test_says_why_there_is_none(text, message):
    with pytest.raises(ValueError, match=message):
        placement_of(from_csv(text))


def test_ranks_without_gaps():
    with pytest.raises(ValueError, match=r"without gaps; got \[0, 2\]"):
        placement_of({0: [], 2: []})


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2"])
def test_sizes_are_whole_and_positive(bad):
    with pytest.raises(ValueError, match="num_ranks must be a whole number of at least 1, got"):
        linear(bad)
    with pytest.raises(ValueError, match="num_chunks must be"):
        v(2, bad)
