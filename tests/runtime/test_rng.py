"""Random streams: what they depend on, and what they leave as it was."""

import random

import numpy as np
import pytest
import torch

from lightning_pp.runtime import rng


def test_seeds_depend_on_every_number_and_their_order() -> None:
    seeds = {rng.stream_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rng.stream_seed(1, 23) != rng.stream_seed(12, 3)
    assert rng.stream_seed(1, 2) == rng.stream_seed(1, 2)


def test_a_stream_starts_torch_and_if_asked_the_others() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    rng.start_stream(5, python_too=True)
    first = draw()
    draw()
    rng.start_stream(5, python_too=True)
    assert draw() == first
    after = draw()
    rng.start_stream(5, python_too=False)
    again = draw()
    assert again[0] == first[0]
    assert again[1:] not in (first[1:], after[1:])


def test_layer_seeds_come_from_the_stream_and_differ() -> None:
    torch.manual_seed(3)
    seeds = [rng.layer_seed() for _ in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(3)
    assert rng.layer_seed() == seeds[0]


def test_a_layer_draws_from_its_own_stream_and_the_glue_goes_on() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    for layer_draws in (0, 1, 17):
        torch.manual_seed(3)
        first = torch.rand(1)
        drawn = rng.seeded(11, lambda n, scale: scale * torch.rand(n), (layer_draws,), {"scale": 2})
        assert torch.equal(torch.cat([first, torch.rand(3)]), expected)
        torch.manual_seed(11)
        assert torch.equal(drawn, 2 * torch.rand(layer_draws))


def test_the_stream_goes_on_after_a_failure_too() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        rng.seeded(11, lambda: torch.rand(2) / (1 // 0), (), {})
    assert torch.equal(torch.get_rng_state(), state)
