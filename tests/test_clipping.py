"""Norms of gradients and clipping by hand, in hooks that know of no stages; stages that differ are told so."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import GPT, MLP
from tests.test_optimizers import Runs, assert_runs_as_plain, train

INF = float("inf")


class ClosureFirst(MLP):
    """Clips by hand between its own call of the closure and the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()


class Rotated(MLP):
    """Has a complex parameter, and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.exp(1j * torch.arange(8, dtype=torch.float64)))
        self.steps = nn.Parameter(torch.arange(8), requires_grad=False)
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss([(x * self.phases**self.steps).real, y])

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        self.seen.append(clip_grad_norm_(self.parameters(), 0.02).item())


class Norms(GPT):
    """Logs norms before and after clipping; has tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm1.requires_grad_(False)
        self.seen: list[float] = []

    def total(self, order: float) -> Tensor:
        norm = getattr(self.trainer.strategy, "grad_norm", None)
        if norm is not None:
            own = norm(order)
            assert torch.equal(own, norm(order, self.trainer.optimizers[0]))
            return own
        return grad_norm(self, order)[f"grad_{float(order)}_norm_total"]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen += [self.total(order).item() for order in (1, 2, 3.5, INF)]
        self.log("norm", self.total(2))

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.seen.append(self.total(2).item())
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        self.seen.append(self.total(2).item())


class ClipsAll(Norms):
    """By hand, by its own norm of each kind, twice."""

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.seen.append(clip_grad_norm_(self.parameters(), 0.3, norm_type=1, foreach=False).item())
        norm = torch.nn.utils.clip_grad_norm_((p for p in self.parameters() if p.requires_grad), 0.02, INF)
        self.seen.append(norm.item())


class ClipsWhatHasGradients(Norms):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        having = [p for p in self.parameters() if p.grad is not None]
        self.seen.append(torch.nn.utils.get_total_norm([p.grad for p in having]).item())
        self.seen.append(clip_grad_norm_(having, 0.05, error_if_nonfinite=True).item())
        own = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
        own.grad = torch.full((3,), 2.0, dtype=torch.float64)
        self.seen.append(clip_grad_norm_(own, 1.0).item())  # what is not of the model is clipped on its own


class ClipsParts(Norms):
    """Each block by its own norm, a group by name, and one parameter alone."""

    def on_after_backward(self) -> None:
        self.seen.append(clip_grad_norm_(self.tok.parameters(), 0.03).item())

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        for block in self.blocks:
            self.seen.append(clip_grad_norm_(block.parameters(), 0.02).item())
        group = [p for n, p in self.named_parameters() if n.endswith("bias")]
        self.seen.append(clip_grad_norm_(group, 0.01).item())
        self.seen.append(clip_grad_norm_(self.pos_emb, 0.005).item())


RUNS: Runs = {
    "closure first": (ClosureFirst, {}),
    "norms": (Norms, {"accumulate_grad_batches": 2}),
    "complex and whole numbers": (Rotated, {}),
    "clips all": (ClipsAll, {}),
    "clips what has gradients": (ClipsWhatHasGradients, {}),
    "clips parts": (ClipsParts, {"accumulate_grad_batches": 2}),
}


def test_norms_and_clipping_by_hand() -> None:
    assert assert_runs_as_plain(RUNS)["norms"].extra["seen"]


class ClipsWhereItHolds(MLP):
    """By parameter, on the stage that has its gradient: the others would wait, or mix other norms in."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                clip_grad_norm_(parameter, 1.0)


class ClipsOnOneStage(MLP):
    def on_after_backward(self) -> None:
        if self.trainer.strategy.stage_index == 1:  # type: ignore[attr-defined]
            clip_grad_norm_(self.parameters(), 1.0)


class ClipsSomeWithGradients(MLP):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        clip_grad_norm_([p for n, p in self.named_parameters() if p.grad is not None and "bias" in n], 1.0)


@pytest.mark.parametrize("cls", [ClipsWhereItHolds, ClipsOnOneStage, ClipsSomeWithGradients])
def test_stages_that_clip_by_other_parameters_are_told_so(cls: type[LightningModule]) -> None:
    for text in run_ranks(failing_fit, 2, cls):
        assert "MisconfigurationException: Gradients are clipped, or their norm is taken, by other parameters" in text


def failing_fit(cls: type[LightningModule]) -> str:
    untouched = torch.nn.utils.clip_grad._get_total_norm, torch.nn.utils.clip_grad._clip_grads_with_norm_
    try:
        train(cls(), {"stages": int(os.environ["WORLD_SIZE"]), "microbatches": 2}, precision="64-true")
    except Exception as error:
        assert untouched == (torch.nn.utils.clip_grad._get_total_norm, torch.nn.utils.clip_grad._clip_grads_with_norm_)
        return f"{type(error).__name__}: {error}"
    return "not refused"


class LooksOn(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


def fit_with_a_spectator() -> int:
    callbacks = [LooksOn()] if os.environ["LOCAL_RANK"] == "0" else []
    return train(MLP(), {"stages": 2, "microbatches": 2}, precision="64-true", callbacks=callbacks).global_step


def test_a_callback_on_one_rank_only() -> None:
    """The other rank compares notes with it all the same."""
    assert run_ranks(fit_with_a_spectator, 2) == [6, 6]


class FailsInHook(MLP):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.trainer.strategy.stage_index == 1:  # type: ignore[attr-defined]
            raise KeyError("what the hook was looking for")
        clip_grad_norm_(self.parameters(), 1.0)


def test_a_stage_that_fails_between_backward_and_step() -> None:
    """The other one waits for its norm, and is told at once."""
    waiting, failing = run_ranks(failing_fit, 2, FailsInHook)
    assert failing == "KeyError: 'what the hook was looking for'"
    assert "The pipeline was stopped by rank 1: KeyError: 'what the hook was looking for'" in waiting


def test_norms_that_do_not_exist() -> None:
    with pytest.raises(RuntimeError, match="only while the Trainer fits"):
        PipelineStrategy().grad_norm()
    assert "norm_type=0.0: allowed is a positive number or inf" in run_ranks(failing_fit, 1, NoSuchNorm)[0]


class NoSuchNorm(MLP):
    def on_after_backward(self) -> None:
        self.trainer.strategy.grad_norm(0)  # type: ignore[attr-defined]
