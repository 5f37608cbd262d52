"""The optimizer path: every optimizer of torch, groups, schedulers, user overrides, norms and clipping by hand."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from lightning_pp import PipelineStrategy, checks
from tests.launch import run_ranks
from tests.models import MLP, regression_data
from tests.training import QUIET, Outcome, Watcher, assert_same


class ByName(MLP):
    """Weight decay for weights only, another rate for the head, as fine-tuning scripts have it."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("weight") and "net.6" not in n], "weight_decay": 0.3},
            {"params": [p for n, p in named if n.endswith("bias") and "net.6" not in n], "weight_decay": 0.0},
            {"params": [p for n, p in named if "net.6" in n], "lr": 0.05},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        cycle = schedulers.OneCycleLR(optimizer, max_lr=[0.02, 0.02, 0.1], total_steps=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Sequential(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 4)]
        both = schedulers.SequentialLR(optimizer, parts, milestones=[2])
        return [optimizer], [{"scheduler": both, "interval": "step"}, schedulers.StepLR(optimizer, 1, 0.5)]


class SevenBatches(MLP):
    """Its schedule ticks once per step: neither per micro-batch nor per batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": schedulers.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    @staticmethod
    def loader() -> Any:
        return DataLoader(regression_data(), batch_size=3)


class HeadOnly(MLP):
    """The first half is frozen and the optimizer is given all parameters: some stages have nothing to optimise."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Fused(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


class WarmUp(MLP):
    """The warm-up and the scheduler's step of Lightning's documentation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [schedulers.StepLR(optimizer, 1, 0.5)]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 3)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class EverySecond(MLP):
    """Steps after every second batch, and makes the other gradients all the same."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


#: name: (module, Trainer options)
Runs = dict[str, tuple[type[LightningModule], dict[str, Any]]]

RUNS: Runs = {
    "groups by name": (ByName, {}),
    "groups by name, clipped": (ByName, {"gradient_clip_val": 0.02}),
    "sequential schedulers": (Sequential, {}),
    "an incomplete window": (SevenBatches, {"accumulate_grad_batches": 3, "max_epochs": 1}),
    "windows that change": (SevenBatches, {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})]}),
    "a stage of one activation": (MLP, {"split": ["net.5", "net.6"], "gradient_clip_val": 0.02}),
    "nothing to optimise on some stages": (HeadOnly, {"gradient_clip_val": 0.02}),
    "fused": (Fused, {"gradient_clip_val": 0.02}),
    "warm-up": (WarmUp, {}),
    "every second batch": (EverySecond, {}),
}


class RateWatch(Callback):
    def __init__(self, outcome: Outcome) -> None:
        self.rates: list[Any] = []
        outcome.extra["rates"] = self.rates

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def train(module: LightningModule, strategy: dict[str, Any] | None, split: Any = None, **options: Any) -> Outcome:
    outcome = Outcome()
    if strategy is not None:
        options |= {"strategy": PipelineStrategy(split=split, **strategy), "devices": strategy["stages"]}
    options["callbacks"] = [Watcher(outcome), RateWatch(outcome), *options.get("callbacks", [])]
    trainer = Trainer(accelerator="cpu", **{"devices": 1, "max_epochs": 2, **QUIET, **options})
    trainer.fit(module.double(), module.loader())
    outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    outcome.final = {key: value.item() for key, value in trainer.callback_metrics.items()}
    outcome.global_step = trainer.global_step
    outcome.extra["seen"] = getattr(module, "seen", [])
    return outcome


def run_all(strategy: dict[str, Any] | None, runs: Runs) -> dict[str, Outcome]:
    """Train every row of ``runs`` in one process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outcomes = {}
    for name, (cls, options) in runs.items():
        torch.manual_seed(5)
        outcomes[name] = train(cls(), strategy, precision="64-true", **options)
    return outcomes


def test_what_is_between_gradients_and_parameters() -> None:
    plain_runs = assert_runs_as_plain(RUNS)
    assert plain_runs["an incomplete window"].global_step == 3
    assert plain_runs["an incomplete window"].extra["rates"][-2:] == [[0.025], [0.0125]]
    assert plain_runs["windows that change"].global_step == 7 + 2


def assert_runs_as_plain(runs: Runs) -> dict[str, Outcome]:
    """Train every row of ``runs`` in three stages as well; returns the plain runs."""
    plain_runs: dict[str, Outcome] = run_ranks(run_all, 1, None, runs, timeout=100)[0]
    ranks = run_ranks(run_all, 3, {"stages": 3, "microbatches": 3}, runs, timeout=100)
    for name, reference in plain_runs.items():
        for outcomes in ranks:
            assert outcomes[name].extra["rates"] == reference.extra["rates"], name
            assert outcomes[name].extra["seen"] == pytest.approx(reference.extra["seen"], abs=1e-9), name
            assert outcomes[name].extra["seen"] == ranks[0][name].extra["seen"], "the same bits on all ranks"
        assert_same(reference, [outcomes[name] for outcomes in ranks])
    return plain_runs


class WithOptimizer(MLP):
    """Trained by one optimizer or another; one row of its embedding is never looked up."""

    def __init__(self, cls: type[Optimizer], options: dict[str, Any], matrices: bool, sparse: bool) -> None:
        super().__init__()
        self.make = lambda parameters: cls(parameters, **options)
        self.matrices = matrices
        self.sparse = sparse
        if sparse:
            self.net = nn.Sequential(*[nn.EmbeddingBag(8, 3, sparse=True) for _ in range(4)])

    def loss(self, batch: Any) -> Tensor:
        if not self.sparse:
            return super().loss(batch)
        rows = batch[0].argsort(dim=1)[:, :3]
        out = sum(layer((rows + index) % 7) for index, layer in enumerate(self.net))
        return (out - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.ndim == 2 or not self.matrices])


def optimizers() -> dict[str, tuple[type[Optimizer], dict[str, Any]]]:
    """Every optimizer of this version of torch, some with the options that bring state or kernels of their own."""
    found: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
        name: (cls, {"lr": 0.01})
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls not in (Optimizer, torch.optim.LBFGS)
    }
    found["SGD with momentum"] = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True})
    found["Adam, amsgrad, fused"] = (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "fused": True})
    found["Adam, maximize"] = (torch.optim.Adam, {"maximize": True, "weight_decay": 0.1, "foreach": True})
    found["RMSprop, centered"] = (torch.optim.RMSprop, {"centered": True, "momentum": 0.5})
    found["Adagrad with a start"] = (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1})
    return found


def run_optimizers(strategy: dict[str, Any] | None, folder: str) -> dict[str, Outcome]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outcomes = {}
    for name, (cls, options) in optimizers().items():
        torch.manual_seed(5)
        module = WithOptimizer(cls, options, matrices=name == "Muon", sparse=name == "SparseAdam")
        outcomes[name] = train(module, strategy, precision="64-true", max_epochs=1, limit_train_batches=2)
        module.trainer.save_checkpoint(f"{folder}/{name}")
    return outcomes


def saved(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=False)["optimizer_states"][0]


def test_every_optimizer_of_torch(tmp_path: Path) -> None:
    for folder in ("plain", "piped"):
        (tmp_path / folder).mkdir()
    plain = run_ranks(run_optimizers, 1, None, str(tmp_path / "plain"))[0]
    ranks = run_ranks(run_optimizers, 2, {"stages": 2, "microbatches": 3}, str(tmp_path / "piped"), timeout=100)
    assert {"Adagrad", "ASGD", "Rprop", "SparseAdam", "Adafactor"} <= plain.keys()
    for name, reference in plain.items():
        assert_same(reference, [outcomes[name] for outcomes in ranks])
        expected, found = saved(tmp_path / "plain", name), saved(tmp_path / "piped", name)
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys(), name
        for index, state in expected["state"].items():
            torch.testing.assert_close(found["state"][index], state, atol=1e-9, rtol=0, msg=name)


def named(name: str, base: type[Optimizer] = torch.optim.SGD) -> type[Optimizer]:
    return type(name, (base,), {})


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (torch.optim.LBFGS, {}, "does not support LBFGS: its line search"),
        (named("Own", torch.optim.LBFGS), {}, "does not support Own: its line search"),
        (named("Prodigy"), {}, "does not support Prodigy: it estimates one step size"),
        (named("DAdaptAdam"), {}, "does not support DAdaptAdam: it estimates one step size"),
        (named("SAM"), {}, "does not support SAM: it moves all parameters by one norm"),
        (named("Lamb"), {"max_grad_norm": 1.0}, "Lamb clips by the norm .* max_grad_norm=None"),
    ],
)
def test_optimizers_that_mix_parameters(cls: type[Optimizer], options: dict[str, Any], text: str) -> None:
    optimizer = cls(MLP().parameters(), lr=0.1)  # type: ignore[call-arg]
    optimizer.param_groups[0].update(options)
    checks.check_optimizers([optimizer], 1)
    with pytest.raises(MisconfigurationException, match=text):
        checks.check_optimizers([optimizer], 2)


def test_an_optimizer_that_could_clip_and_does_not() -> None:
    optimizer = named("Adan")(MLP().parameters(), lr=0.1)  # type: ignore[call-arg]
    optimizer.param_groups[0]["max_grad_norm"] = 0.0
    checks.check_optimizers([optimizer], 2)
