"""Stages that sleep: what is left of a step beyond the sleeping is the pipeline's own cost."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contestants import bare, join, ours, torchs
from benchmarks.models import Sleepers, mean_square
from tests.launch import run_ranks


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        stages: P.
        microbatches: M.
        forward: Milliseconds.
        backward: Milliseconds.
        width: Numbers in an activation of one sample, of 4 bytes.
    """

    stages: int
    microbatches: int
    forward: float
    backward: float
    width: int = 64


CASES = (Case(4, 64, 10, 20), Case(4, 64, 2, 4), Case(4, 64, 10, 20, 2**18), Case(8, 64, 2, 4))
NAMES = ("torch 1F1B", "1f1b", "eager_1f1b", BARE := "bare loop, eager")


def measure(case: Case, rounds: int, steps: int = 2) -> dict[str, list[float]]:
    """Step over ideal for each contestant, one number per step, the slowest rank of each."""
    ranks = run_ranks(_rounds, case.stages, case, rounds, steps, timeout=600)
    return {name: [max(step) for step in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def _rounds(case: Case, rounds: int, steps: int) -> dict[str, list[float]]:
    join(case.stages)
    seconds = (case.forward / 1000, case.backward / 1000)
    batch = torch.ones(case.microbatches, case.width), torch.ones(case.microbatches, 8)
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            module = Sleepers(case.stages, seconds)
            block: Any = module.blocks[dist.get_rank()]
            if name == "torch 1F1B":
                taken = torchs(block, batch, case.microbatches, steps, mean_square)
            elif name == BARE:
                taken = bare(block, batch, case.microbatches, steps, mean_square, "eager_1f1b")
            else:
                taken = ours(module, batch, case.microbatches, steps, schedule=name)
            found[name] += [one / _ideal(case, block) for one in taken]
    return found


def _ideal(case: Case, block: Any) -> float:
    """Seconds of a step with nothing but sleeping, by the times that the block has really slept."""
    each = statistics.mean(block.slept.forward) + statistics.mean(block.slept.backward)
    return (case.microbatches + case.stages - 1) * each
