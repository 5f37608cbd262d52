"""Who runs: the strategy under a Trainer, torch's pipeline on the same stages, and each stage alone for the ideal.

Every contestant runs a few steps of one batch on all ranks and returns how long each took on its rank, from a barrier
to its end. They take turns in the same processes, so that all see the same machine.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader

from lightning_pp import PipelineStrategy
from lightning_pp.schedule import Kind, Op, build, lower


def join(size: int) -> None:
    """Make the process group that all contestants share."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=size)


Loss = Callable[[Tensor, Tensor], Tensor]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class TimedStrategy(PipelineStrategy):
    """Measures its training steps: all of a batch but Lightning's hooks and the optimizer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seconds: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        _meet()
        start = time.perf_counter()
        output = super().training_step(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return output


def ours(
    module: LightningModule,
    batch: Any,
    microbatches: int,
    steps: int,
    warmup: int = 1,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> list[float]:
    """Train ``module`` under a Trainer; the warm-up steps do not count."""
    return timed(module, [batch] * (steps + warmup), microbatches, callbacks, **arguments)[warmup:]


def timed(
    module: LightningModule, batches: Sequence[Any], microbatches: int, callbacks: Sequence[Callback], **arguments: Any
) -> list[float]:
    """Train ``module`` on ``batches`` under a Trainer; seconds of each step."""
    strategy = TimedStrategy(stages=_size(), microbatches=microbatches, **arguments)
    trainer = Trainer(
        accelerator="cpu",
        devices=_size(),
        strategy=strategy,
        max_epochs=1,
        callbacks=list(callbacks),
        log_every_n_steps=1,
        **QUIET,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return strategy.seconds


def torchs(
    stage_module: nn.Module, batch: Any, microbatches: int, steps: int, loss: Loss, gpipe: bool = False, warmup: int = 1
) -> list[float]:
    """Run this rank's stage under ``torch.distributed.pipelining``."""
    x, target = batch
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = (ScheduleGPipe if gpipe else Schedule1F1B)(stage, microbatches, loss_fn=loss)

    def step() -> None:
        inputs = (x,) if rank == 0 else ()
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": target, "losses": losses} if rank == size - 1 else {}
        schedule.step(*inputs, **last)

    return _times(stage_module, step, steps + warmup)[warmup:]


def bare(
    stage_module: nn.Module, batch: Any, microbatches: int, steps: int, loss: Loss, schedule: str, warmup: int = 1
) -> list[float]:
    """Run this rank's stage in a loop that can do nothing else: one tensor of a known shape crosses every cut.

    It sends and receives as early as the package does, so that it shows what any pipeline takes here.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    program = lower(build(schedule, size, microbatches)).programs[rank]
    inputs, targets = (part.tensor_split(microbatches) for part in batch)
    step = partial(_Loop, stage_module, inputs, targets, loss, program)
    return _times(stage_module, lambda: step().run(), steps + warmup)[warmup:]


class _Loop:
    """One step of :func:`bare`."""

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss: Loss, program: Sequence[Op]
    ) -> None:
        self._module, self._inputs, self._targets, self._loss = module, inputs, targets, loss
        self._program = program
        self._rank, self._last = dist.get_rank(), dist.get_world_size() - 1
        self._sent: list[Any] = []
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._waiting: dict[Op, tuple[Tensor, Any]] = {}
        self._coming = {kind: iter([op for op in program if op.kind is kind]) for kind in (Kind.RECV_F, Kind.RECV_B)}

    def run(self) -> None:
        """Go through the program."""
        for kind in self._coming:
            self._post(kind)
        for op in self._program:
            if op.kind is Kind.F:
                given = self._inputs[op.mb] if self._rank == 0 else self._take(Op(op.stage, Kind.RECV_F, op.mb))
                output = self._module(given.requires_grad_(self._rank > 0))
                if self._rank == self._last:
                    output = self._loss(output, self._targets[op.mb]) / len(self._inputs)
                else:
                    self._send(output.detach(), 1)
                self._saved[op.mb] = given, output
            elif op.kind is Kind.B:
                given, output = self._saved.pop(op.mb)
                if self._rank == self._last:
                    output.backward()
                else:
                    output.backward(self._take(Op(op.stage, Kind.RECV_B, op.mb)))
                if self._rank:
                    assert given.grad is not None
                    self._send(given.grad, -1)
        for _, work in self._sent:
            work.wait()

    def _send(self, tensor: Tensor, step: int) -> None:
        self._sent.append((tensor, dist.isend(tensor, self._rank + step)))

    def _post(self, kind: Kind) -> None:
        op = next(self._coming[kind], None)
        if op is not None:
            tensor = torch.empty_like(self._inputs[op.mb])
            work = dist.irecv(tensor, self._rank + (-1 if kind is Kind.RECV_F else 1))
            self._waiting[op] = tensor, work

    def _take(self, op: Op) -> Tensor:
        tensor, work = self._waiting.pop(op)
        work.wait()
        self._post(op.kind)
        return tensor


def alone(
    stage_module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor] | None, steps: int, loss: Loss
) -> list[float]:
    """Run this rank's stage on its micro-batches one by one, forward and backward, without any communication.

    Args:
        stage_module: The stage.
        inputs: What it gets for each micro-batch; floating-point inputs get gradients.
        targets: Of each micro-batch; None for all stages but the last.
        steps: How often.
        loss: Of the last stage.
    """

    def step() -> None:
        for index, given in enumerate(inputs):
            x = given.detach().requires_grad_(given.is_floating_point() and dist.get_rank() > 0)
            output = stage_module(x)
            if targets is None:
                output.backward(output.detach())
            else:
                (loss(output, targets[index]) / len(inputs)).backward()

    return _times(stage_module, step, steps)


def _times(stage_module: nn.Module, step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each step, from a barrier on, with gradients that begin anew."""
    seconds = []
    for _ in range(steps):
        for parameter in stage_module.parameters():
            parameter.grad = None
        _meet()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
