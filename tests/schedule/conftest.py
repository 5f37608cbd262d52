"""Schedules that the package does not make yet, written out for the tests: chunks and split backwards."""

from __future__ import annotations

import pytest

from lightning_pp.schedule import Kind, Op, Schedule, from_csv


def _interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021, section 2.2); micro-batches a multiple of the ranks."""
    num_ops = num_chunks * num_microbatches
    schedule: Schedule = {}
    for rank in range(num_ranks):
        forwards, backwards = [], []
        for i in range(num_ops):
            chunk = i // num_ranks % num_chunks
            mb = i // (num_ranks * num_chunks) * num_ranks + i % num_ranks
            forwards.append(Op(chunk * num_ranks + rank, Kind.F, mb))
            backwards.append(Op((num_chunks - 1 - chunk) * num_ranks + rank, Kind.B, mb))
        warm_up = min(num_ops, 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks)
        pairs = [op for pair in zip(forwards[warm_up:], backwards, strict=False) for op in pair]
        schedule[rank] = forwards[:warm_up] + pairs + backwards[num_ops - warm_up :]
    return schedule


def _zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al., 2023, section 2.2.1): 1F1B's memory, weight gradients moved into the gaps of rank k.

    Rank k runs I where 1F1B runs B and keeps its W back by k micro-batches; num_microbatches >= num_ranks.
    """
    schedule: Schedule = {}
    for rank in range(num_ranks):
        ahead = num_ranks - rank - 1
        ops = [Op(rank, Kind.F, mb) for mb in range(ahead)]
        weights = 0
        for mb in range(num_microbatches):
            if mb + ahead < num_microbatches:
                ops.append(Op(rank, Kind.F, mb + ahead))
            ops.append(Op(rank, Kind.I, mb))
            if mb >= rank:
                ops.append(Op(rank, Kind.W, weights))
                weights += 1
        ops += [Op(rank, Kind.W, mb) for mb in range(weights, num_microbatches)]
        schedule[rank] = ops
    return schedule


_V = """\
0F0,3F0,3B0,0B0,0F1,3F1,3I1,3W1,0B1
1F0,2F0,2B0,1B0,1F1,2F1,2B1,1I1,1W1
"""


@pytest.fixture
def interleaved() -> Schedule:
    """4 ranks, 2 chunks each, 8 micro-batches."""
    return _interleaved(4, 2, 8)


@pytest.fixture
def zb_h1() -> Schedule:
    """4 ranks, 8 micro-batches, backwards split."""
    return _zb_h1(4, 8)


@pytest.fixture
def v_schedule() -> Schedule:
    """2 ranks with 2 chunks each, v-placed: stages 1 and 2 share rank 1."""
    return from_csv(_V)
