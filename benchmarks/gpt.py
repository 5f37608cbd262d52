"""A GPT that computes: how far a step is from the ideal, and from the peer's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestants import alone, join, ours, torchs
from benchmarks.models import GPT, next_token_loss
from tests.launch import run_ranks

NAMES = ("torch 1F1B", "1f1b", "eager_1f1b")
#: samples of a micro-batch
SAMPLES = 4
CONTEXT = 128


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        stages: P.
        microbatches: M.
    """

    stages: int
    microbatches: int


CASES = (Case(2, 16), Case(2, 64))


def measure(case: Case, rounds: int, steps: int = 2) -> dict[str, list[float]]:
    """Seconds per step of each contestant, and of the ideal, the slowest rank of each."""
    ranks = run_ranks(_rounds, case.stages, case, rounds, steps, timeout=900)
    found = {name: [max(step) for step in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    found["ideal"] = [one * (case.microbatches + case.stages - 1) / case.microbatches for one in found["ideal"]]
    return found


def _rounds(case: Case, rounds: int, steps: int) -> dict[str, list[float]]:
    join(case.stages)
    torch.manual_seed(0)
    tokens = torch.randint(256, (case.microbatches * SAMPLES, CONTEXT + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found: dict[str, list[float]] = {name: [] for name in (*NAMES, "ideal")}
    for _ in range(rounds):
        for name in NAMES:
            if name == "torch 1F1B":
                stage = GPT().stage(dist.get_rank(), case.stages)
                found[name] += torchs(stage, batch, case.microbatches, steps, next_token_loss)
                found["ideal"] += _alone(case, batch, stage, steps)
            else:
                split = GPT().split(case.stages)
                found[name] += ours(GPT(), batch, case.microbatches, steps, schedule=name, split=split)
    return found


def _alone(case: Case, batch: tuple[Tensor, Tensor], stage: torch.nn.Module, steps: int) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, targets = (part.tensor_split(case.microbatches) for part in batch)
    inputs = tokens if rank == 0 else [torch.randn(SAMPLES, CONTEXT, 256)] * case.microbatches
    return alone(stage, inputs, targets if rank == size - 1 else None, steps, next_token_loss)
