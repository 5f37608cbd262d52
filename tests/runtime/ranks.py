"""A small pipeline without Lightning: processes that know each other, schedules for any placement, a stage to run."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.runtime.comm import job_store
from lightning_pp.runtime.engine import Engine
from lightning_pp.runtime.job import Job, SignaturePlan
from lightning_pp.runtime.links import open_links
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.schedule import Kind, Op, Schedule, forward_only, has_backward, lower, placement_of

CPU = torch.device("cpu")
WIDTH = 3


def connect(timeout: float = 30) -> int:
    """Join the job; returns this process's rank."""
    rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    return rank


def leave() -> None:
    """Wait for the others before the process ends: its connections must stay, and the store lives in rank 0."""
    store, ranks = job_store(), range(dist.get_world_size())
    for word in ("left", "gone"):
        store.set(f"{word}/{dist.get_rank()}", "")
        if word == "left" or dist.get_rank() == 0:
            store.wait([f"{word}/{rank}" for rank in ranks])


def greedy(placement: Sequence[int], num_microbatches: int, first: Kind = Kind.B) -> Schedule:
    """A schedule for any placement: in every tick every rank runs something ready, of kind ``first`` if it can."""
    done: set[Op] = set()
    last = len(placement) - 1
    schedule: Schedule = {rank: [] for rank in sorted(set(placement))}
    left = [Op(s, k, mb) for k in (Kind.F, Kind.B) for mb in range(num_microbatches) for s in range(last + 1)]

    def is_ready(op: Op) -> bool:
        if op.kind is Kind.F:
            return op.stage == 0 or Op(op.stage - 1, Kind.F, op.mb) in done
        return Op(op.stage, Kind.F, op.mb) in done and (op.stage == last or Op(op.stage + 1, Kind.B, op.mb) in done)

    while left:
        now = []
        for rank, ops in schedule.items():
            ready = [op for op in left if placement[op.stage] == rank and is_ready(op)]
            if ready:
                now.append(min(ready, key=lambda op: (op.kind is not first, op.mb, op.stage)))
                ops.append(now[-1])
        done.update(now)
        left = [op for op in left if op not in done]
    return schedule


def weight(stage: int) -> Tensor:
    """The parameter of one stage."""
    values = torch.arange(WIDTH * WIDTH, dtype=torch.float64).reshape(WIDTH, WIDTH)
    return torch.sin(values + 7 * stage).requires_grad_(True)


def first_message(x: Tensor) -> list[Tensor]:
    """What a batch begins with; five tensors of all sorts cross every cut."""
    rows = len(x)
    return [x, torch.zeros(rows, WIDTH, dtype=torch.float64), torch.arange(rows), x.new_zeros(0, 2), x[:, :1] > 0]


def run_stage(stage: int, parameter: Tensor, message: list[Tensor]) -> list[Tensor]:
    """One stage: a hidden state, a skip from the first stage, whole numbers, nothing, and a mask."""
    hidden, skip, ids, empty, mask = message
    hidden = torch.tanh(hidden @ parameter) + 0.5 * skip
    if stage == 0:
        skip = 2 * hidden
    return [hidden, skip, ids + 1, empty, mask]


def loss_of_message(message: list[Tensor]) -> Tensor:
    hidden, skip, ids, _, mask = message
    return ((hidden + skip) * mask * ids[:, None]).pow(2).mean()


class FakeStage:
    """Runs :func:`run_stage`; the layout of a stage is its number."""

    def __init__(self, parameters: dict[int, Tensor], num_stages: int, raise_at: str = "") -> None:
        self.parameters = parameters
        self.num_stages = num_stages
        self.raise_at = raise_at
        self.frame: Any = None

    def forward(self, layout: int, step: Callable[[], Any], received: list[Tensor]) -> tuple[Any, list[Tensor]]:
        if f"{layout}F" == self.raise_at:
            raise ZeroDivisionError("from the user's step")
        x = step()
        message = received or first_message(x)
        gives = run_stage(layout, self.parameters[layout], message)
        if layout == self.num_stages - 1:
            return {"loss": loss_of_message(gives), "hidden": gives[0]}, []
        return None, gives

    def backward(
        self, layout: int, roots: Sequence[Any], grads: Sequence[Tensor | None], received: Sequence[Tensor]
    ) -> None:
        if f"{layout}B" == self.raise_at:
            raise ZeroDivisionError("from the backward pass")
        torch.autograd.backward(roots, grads)

    def skip_backward(self, received: Sequence[Tensor]) -> None:
        """There is nothing to forget."""


def batch(num_samples: int) -> Tensor:
    return torch.cos(torch.arange(num_samples * WIDTH, dtype=torch.float64)).reshape(num_samples, WIDTH)


def expected(num_stages: int, num_samples: int, num_microbatches: int) -> tuple[list[float], list[Tensor]]:
    """Losses by micro-batch and gradients by stage, by plain autograd."""
    parameters = [weight(stage) for stage in range(num_stages)]
    losses = []
    for part, share in parts_of(num_samples, num_microbatches):
        message = first_message(part)
        for stage, parameter in enumerate(parameters):
            message = run_stage(stage, parameter, message)
        loss = loss_of_message(message)
        (loss * share).backward()
        losses.append(loss.item())
    return losses, [parameter.grad for parameter in parameters]  # type: ignore[misc]


def parts_of(num_samples: int, num_microbatches: int) -> list[tuple[Tensor, float]]:
    """Micro-batches of unequal sizes with their weights."""
    x = batch(num_samples)
    return [(part, len(part) / num_samples) for part in torch.tensor_split(x, num_microbatches)]


def engine_for(schedule: Schedule, rank: int, timeout: float = 30, raise_at: str = "") -> Engine:
    """This rank's engine, connected to the others."""
    placement = placement_of(schedule)
    lowered = lower(schedule)
    senders, receivers = open_links(Mesh(rank, len(schedule)), lowered.edges, CPU, "gloo", timedelta(seconds=timeout))
    parameters = {stage: weight(stage) for stage, owner in enumerate(placement) if owner == rank}
    return Engine(rank, placement, FakeStage(parameters, len(placement), raise_at), senders, receivers)  # type: ignore[arg-type]


def plans_for(engine: Engine, parts: Sequence[tuple[Tensor, float]]) -> list[SignaturePlan]:
    """One plan per size."""
    stages = {stage: stage for stage, rank in enumerate(engine._placement) if rank == engine._rank}
    by_size = {len(part): SignaturePlan(stages) for part, _ in parts}  # type: ignore[arg-type]
    return [by_size[len(part)] for part, _ in parts]


def job_for(schedule: Schedule, engine: Engine, parts: Sequence[tuple[Tensor, float]]) -> Job:
    training = has_backward(schedule)
    return Job(
        lower(schedule),
        step=lambda mb: parts[mb][0],
        plans=plans_for(engine, parts),
        loss_of=(lambda result: result["loss"]) if training else None,
        scales=[share for _, share in parts],
    )


def evaluation_of(schedule: Schedule, num_microbatches: int) -> Schedule:
    return forward_only(placement_of(schedule), num_microbatches)
