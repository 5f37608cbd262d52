"""A collective of the stages outside of their steps: where one of them is gone, the others say why."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_pp.launch import failure
from lightning_pp.runtime.comm import job_store, losing_peers

__all__: list[str] = []


def all_reduce(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce ``tensor`` in place over ``group``.

    Raises:
        PipelineError: Another process has failed meanwhile, and has said why.
        PeerLost: It has not said why.
    """
    with failure.explained(job_store()), losing_peers():
        dist.all_reduce(tensor, op, group=group)
