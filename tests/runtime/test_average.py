"""Gradients over replicas: buckets of any size, parameters that some do not use, copies that stay equal."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.runtime import average
from lightning_pp.runtime.average import GradientAverage
from lightning_pp.runtime.gradients import GradientHold
from tests.launch import run_ranks
from tests.runtime.ranks import connect, leave


def made(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(31 * seed + rank)).to(dtype)


SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 5), torch.float64),
    ((7,), torch.float32),
    ((), torch.float64),
    ((4, 4), torch.complex128),
    ((2, 9), torch.float64),
]


def averaged(bucket_bytes: int, unused: dict[int, set[int]]) -> list[Any]:
    """Sum gradients of several shapes and dtypes; ``unused`` names what a rank has no gradient for."""
    rank = connect()
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in SHAPES]
    parameters[0] = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64).t())
    for index, (parameter, (shape, dtype)) in enumerate(zip(parameters, SHAPES, strict=True)):
        if index not in unused.get(rank, set()):
            parameter.grad = made(rank, index, shape, dtype)
            if index == 0:
                parameter.grad = parameter.grad.t().contiguous().t()
    with patch.object(average, "_BUCKET_BYTES", bucket_bytes):
        sums = GradientAverage(parameters, dist.group.WORLD, {}, frozenset())
        sums.start()
        sums.finish()
    leave()
    return [None if parameter.grad is None else parameter.grad for parameter in parameters]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_sums_of_any_shape(bucket_bytes: int) -> None:
    size = 3
    unused = {0: {2, 4}, 1: {1, 4}, 2: {4}}
    for grads in run_ranks(averaged, size, bucket_bytes, unused):
        for index, (shape, dtype) in enumerate(SHAPES[:4]):
            ranks = [rank for rank in range(size) if index not in unused[rank]]
            expected = sum(made(rank, index, shape, dtype) for rank in ranks)
            torch.testing.assert_close(grads[index], expected)
        assert grads[4] is None, "nobody has used it: an optimizer must pass over it"


def tied_copies() -> list[Tensor]:
    """Two stages in three replicas: rank = 3 * stage + replica; the second parameter is tied."""
    rank = connect()
    stage, replica = divmod(rank, 3)
    stages = [dist.new_group([replica_, 3 + replica_]) for replica_ in range(3)]
    replicas = [dist.new_group([3 * stage_ + r for r in range(3)]) for stage_ in range(2)]
    # the tied one has other neighbours in its bucket on each stage
    sizes = [11, 7] if stage == 0 else [5, 7, 23]
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.float32)) for size in sizes]
    first = frozenset({1} if stage == 0 else ())
    sums = GradientAverage(parameters, replicas[stage], {1: dist.group.WORLD}, first)
    hold = GradientHold(parameters, {1: stages[replica]}, sums)
    hold.start(True, False, averages=True)
    for index, parameter in enumerate(parameters):
        (parameter * made(rank, index, (sizes[index],), torch.float32)).sum().backward()
    hold.backward_done()
    hold.finish(True)
    hold.hand_over()
    leave()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def test_copies_of_a_tied_gradient_are_bit_equal_in_all_replicas() -> None:
    """A sum of three floats depends on the order, which libraries choose by a message's layout."""
    found = run_ranks(tied_copies, 6)
    expected = sum(made(rank, 1, (7,), torch.float64) for rank in range(6))
    for grads in found:
        assert torch.equal(grads[1], found[0][1])
        torch.testing.assert_close(grads[1].double(), expected, atol=1e-5, rtol=0)
    for stage in range(2):
        for index in (0, 2)[: 2 if stage else 1]:
            own = [found[3 * stage + replica][index] for replica in range(3)]
            assert torch.equal(own[0], own[1])
            assert torch.equal(own[0], own[2])
