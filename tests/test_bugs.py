"""One test per fault that was found and fixed, with its story, for its whole kind."""

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import MODELS, regression_data
from tests.training import QUIET, Outcome, assert_same, fit, piped, plain


@pytest.mark.parametrize("name", ["OtherNames", "BatchOnly", "AnyArguments"])
def test_step_functions_take_what_lightning_gives_them(name: str) -> None:
    """Planning looked for a parameter named ``batch_idx``; Lightning passes it by position to any second one."""
    validate = name != "AnyArguments"
    assert_same(plain(name, validate=validate), piped(name, 2, 3, validate=validate))


def test_another_default_dtype() -> None:
    """The first exchange on a channel was made in the default dtype on one end and in float32 on the other."""
    reference = run_ranks(fit_in_double, 1, None)[0]
    for outcome in run_ranks(fit_in_double, 2, {"stages": 2, "microbatches": 3}):
        for name, parameter in outcome.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], atol=1e-9, rtol=0)


def fit_in_double(strategy: Any) -> Outcome:
    torch.set_default_dtype(torch.float64)
    return fit("MLP", strategy, trainer={"precision": "32-true"}, devices=2 if strategy else 1)


def fit_nothing_then_something(stages: int) -> dict[str, float]:
    torch.manual_seed(5)
    module = MODELS["MLP"]().double()
    for loader in (DataLoader(regression_data(3), batch_size=8, drop_last=True), module.loader()):
        strategy: Any = {"strategy": PipelineStrategy(stages=stages, microbatches=3)} if stages else {}
        trainer = Trainer(
            accelerator="cpu", devices=max(1, stages), precision="64-true", max_epochs=1, **strategy, **QUIET
        )
        trainer.fit(module, loader)
    return {name: p.abs().sum().item() for name, p in module.named_parameters() if not p.is_meta}


def test_a_loader_without_batches() -> None:
    """Planning asked it for its first batch; Lightning warns and runs no step, and the module can be cut later on."""
    (reference,) = run_ranks(fit_nothing_then_something, 1, 0)
    found = run_ranks(fit_nothing_then_something, 2, 2)
    assert all(len(one) < len(reference) for one in found)
    for one in found:
        for name, value in one.items():
            assert value == pytest.approx(reference[name], abs=1e-9)


def fits(replicas: int) -> list[tuple[int, int]]:
    """Threads and open files after each of some runs in one script; nothing then holds the connection."""
    counts = []
    for _ in range(3):
        fit("MLP", {"stages": 2, "microbatches": 3}, devices=2 * replicas)
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    connection = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert connection() is None
    return counts


@pytest.mark.parametrize("replicas", [1, 2])
def test_runs_of_one_script_leave_nothing_behind(replicas: int) -> None:
    """Groups of replicas were made for each run anew, and torch keeps groups, their threads and sockets for ever."""
    for first, second, third in run_ranks(fits, 2 * replicas, replicas, timeout=90):
        assert third[0] <= second[0] <= first[0]
        assert third[1] <= second[1] <= first[1] + 2
