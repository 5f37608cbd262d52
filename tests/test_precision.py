"""Loss scaling: stages skip the same steps and hold the same scale as the plain run; dtypes in which layers run."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR

from lightning_pp import PipelineStrategy
from lightning_pp.optimization import precision
from tests.launch import run_ranks
from tests.models import GPT, MLP, MODELS
from tests.test_replicas import assert_union, side_by_side
from tests.training import QUIET, Outcome, Watcher, assert_same

#: small enough not to overflow by itself, so that it is the tests that say when; grows after two steps
SCALER = {"init_scale": 2.0**8, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}


class Overflowing(MLP):
    """The gradient of one parameter overflows in the last sample of one batch."""

    parameter = "net.0.weight"
    overflows_in = (1,)
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9})

    def __init__(self) -> None:
        super().__init__()
        self.present = -1
        self.get_parameter(self.parameter).register_hook(self.change)

    def change(self, grad: Tensor) -> Tensor:
        return grad * float("inf") if self.present in self.overflows_in else grad

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.present += 1

    def configure_optimizers(self) -> Any:
        cls, options = self.optimizer
        optimizer = cls([p for p in self.parameters() if p.requires_grad], **options)
        schedule = LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OverflowingLast(Overflowing):
    parameter = "net.6.bias"


class OverflowingMiddleTwice(Overflowing):
    parameter = "net.2.bias"
    overflows_in = (0, 3, 4)


class LargeLoss(Overflowing):
    """Its gradient overflows by itself, in the half precision of the activations."""

    overflows_in = ()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + (loss - loss.detach()) * (1e7 if self.present == 2 else 0.0)


class FrozenFirst(Overflowing):
    """Stages without a gradient follow the decision of one that has some."""

    parameter = "net.6.weight"

    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)


class FrozenLast(Overflowing):
    def __init__(self) -> None:
        super().__init__()
        self.net[2:].requires_grad_(False)


class FusedOverflowing(Overflowing):
    """Its optimizer unscales inside of ``step``."""

    optimizer = (torch.optim.AdamW, {"lr": 0.01, "fused": True, "eps": 1e-3})


class TiedOverflowing(GPT):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.present = -1
        self.tok.weight.register_hook(self.change)

    change = Overflowing.change
    overflows_in = (1,)
    optimizer = (torch.optim.SGD, {"lr": 0.1})
    on_train_batch_start = Overflowing.on_train_batch_start
    configure_optimizers = Overflowing.configure_optimizers


RUNS: dict[str, tuple[type[LightningModule], dict[str, Any]]] = {
    "first": (Overflowing, {}),
    "last": (OverflowingLast, {}),
    "thrice": (OverflowingMiddleTwice, {}),
    "large loss": (LargeLoss, {}),
    "no gradients on the first stages": (FrozenFirst, {}),
    "no gradients on the last stages": (FrozenLast, {}),
    "fused": (FusedOverflowing, {}),
    "tied": (TiedOverflowing, {"gradient_clip_val": 0.05}),
    "accumulated": (Overflowing, {"accumulate_grad_batches": 2}),
    "clipped": (OverflowingLast, {"gradient_clip_val": 0.05}),
    "clipped by value": (Overflowing, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


class ScaleWatch(Callback):
    """Notes after each batch the scale, whether parameters moved, the rate and the gradient norm of the step."""

    outcome: Outcome

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = self.outcome.extra
        self.seen |= {"scales": [], "moved": [], "rates": [], "losses": []}
        self.before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.before = [p.detach().clone() for p in pl_module.parameters() if not p.is_meta and p.requires_grad]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.seen["losses"].append(loss.item())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        after = [p for p in pl_module.parameters() if not p.is_meta and p.requires_grad]
        moved = [not torch.equal(one, other) for one, other in zip(self.before, after, strict=True)]
        self.seen["moved"].append(any(moved) if moved else None)
        self.seen["scales"].append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]
        self.seen["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])


def trainer_for(outcome: Outcome, strategy: dict[str, Any] | None, **options: Any) -> Trainer:
    if strategy is not None:
        options["strategy"] = PipelineStrategy(**strategy)
    watch = ScaleWatch()
    watch.outcome = outcome
    plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", **SCALER))
    return Trainer(
        accelerator="cpu",
        devices=strategy["stages"] if strategy is not None else 1,
        plugins=[plugin],
        callbacks=[Watcher(outcome), watch],
        **{"max_epochs": 2, **QUIET, **options},
    )


def run_all(strategy: dict[str, Any] | None) -> dict[str, Outcome]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outcomes = {}
    for name, (cls, options) in RUNS.items():
        torch.manual_seed(5)
        module = cls()
        outcome = outcomes[name] = Outcome()
        trainer = trainer_for(outcome, strategy, **options)
        untouched = torch.nn.utils.clip_grad._get_total_norm, torch.nn.utils.get_total_norm
        trainer.fit(module, module.loader())
        assert untouched == (torch.nn.utils.clip_grad._get_total_norm, torch.nn.utils.get_total_norm)
        assert "_unscale_grads_" not in vars(trainer.precision_plugin.scaler)  # type: ignore[union-attr]
        assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
        outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
        outcome.final = {key: value.item() for key, value in trainer.callback_metrics.items()}
        outcome.global_step = trainer.global_step
    return outcomes


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Outcome]:
    return run_ranks(run_all, 1, None)[0]


def test_the_plain_runs_skip_steps(plain_runs: dict[str, Outcome]) -> None:
    """So that the comparisons below are about something."""
    assert plain_runs["first"].extra["moved"] == [True, False, True, True, True, True]
    assert plain_runs["first"].extra["scales"] == [256.0, 64.0, 64.0, 256.0, 256.0, 1024.0]
    assert plain_runs["large loss"].extra["moved"].count(False) == 1
    assert all(False in outcome.extra["moved"] for outcome in plain_runs.values())


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 4)])
def test_one_decision_for_all_stages(plain_runs: dict[str, Outcome], stages: int, microbatches: int) -> None:
    ranks = run_ranks(run_all, stages, {"stages": stages, "microbatches": microbatches})
    for name, reference in plain_runs.items():
        found = [outcomes[name] for outcomes in ranks]
        for outcome in found:
            assert outcome.extra["scales"] == reference.extra["scales"], name
            assert outcome.extra["rates"] == reference.extra["rates"], name
            assert outcome.extra["moved"] in (reference.extra["moved"], [None] * 6), name
            assert outcome.extra["losses"] == pytest.approx(reference.extra["losses"], rel=3e-3), name
        assert_same(reference, found, 1e-6 if microbatches == 1 and "clipped" not in name else 2e-3)


def save_and_resume(strategy: dict[str, Any] | None, folder: str, starts: list[str]) -> list[Outcome]:
    """Train an epoch, save it as ``starts[-1]``, and train another from each of ``starts``."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = trainer_for(Outcome(), strategy, max_epochs=1)
    torch.manual_seed(5)
    trainer.fit(Overflowing(), Overflowing.loader())
    trainer.save_checkpoint(f"{folder}/{starts[-1]}")
    outcomes = []
    for start in starts:
        outcome = Outcome()
        module = Overflowing()
        trainer = trainer_for(outcome, strategy, max_epochs=2)
        trainer.fit(module, module.loader(), ckpt_path=f"{folder}/{start}")
        outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
        outcomes.append(outcome)
    return outcomes


def test_the_scale_is_saved_and_restored(tmp_path: Path) -> None:
    reference = run_ranks(save_and_resume, 1, None, str(tmp_path), ["plain"])[0][0]
    ranks = run_ranks(save_and_resume, 2, {"stages": 2, "microbatches": 1}, str(tmp_path), ["plain", "piped"])
    saved = [torch.load(tmp_path / name, weights_only=False) for name in ("plain", "piped")]
    assert saved[0]["MixedPrecision"] == saved[1]["MixedPrecision"]
    assert saved[0]["MixedPrecision"]["scale"] == 64.0
    assert saved[0]["MixedPrecision"]["_growth_tracker"] == 1
    for outcomes in ranks:
        for outcome in outcomes:
            assert outcome.extra["scales"] == reference.extra["scales"]
            for name, found in outcome.parameters.items():
                assert torch.equal(found, reference.parameters[name])


class OverflowsOnOneReplica(Overflowing):
    """On one stage of one pipeline; and the norm of the others' share is its own."""

    overflows_in = (1, 2)

    def change(self, grad: Tensor) -> Tensor:
        return super().change(grad) if getattr(self.trainer.strategy, "data_parallel_rank", 0) == 0 else grad

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = getattr(self.trainer.strategy, "grad_norm", None)
        total = norm(1) if norm is not None else grad_norm(self, 1).get("grad_1.0_norm_total")
        self.log("norm", total.nan_to_num(posinf=0.0))


MODELS["OverflowsOnOneReplica"] = OverflowsOnOneReplica


def test_one_decision_for_all_replicas() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", **SCALER))
    options: dict[str, Any] = {
        "callbacks": (ScaleWatch,),
        "trainer": {"precision": None, "plugins": [plugin], "gradient_clip_val": 0.1},
    }
    reference, found = side_by_side("OverflowsOnOneReplica", 2, 2, microbatches=2, **options)
    assert reference.extra["moved"] == [True, False, False, True, True, True]
    for outcome in found:
        assert outcome.extra["scales"] == reference.extra["scales"]
        assert outcome.extra["moved"] == reference.extra["moved"]
        assert outcome.final["norm"] == found[0].final["norm"]
    assert_union(reference, found, 2, tolerance=5e-3)


class DtypeWatch(Callback):
    """Which dtypes layers get and give, in training and in validation."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str, bool]] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, layer in pl_module.named_modules():
            if isinstance(layer, nn.Linear | nn.LayerNorm):
                layer.register_forward_hook(self.hook(name, layer))

    def hook(self, name: str, layer: nn.Module) -> Any:
        def note(_: nn.Module, given: Any, output: Any) -> None:
            weight = layer.weight
            if not weight.is_meta:
                dtypes = f"{given[0].dtype} x {weight.dtype} -> {output.dtype}"
                self.seen.add((name, dtypes, layer.training))

        return note


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.LayerNorm(8))


def dtypes(strategy: dict[str, Any] | None) -> dict[str, set[tuple[str, str, bool]]]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    for name in ("64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"):
        watch = DtypeWatch()
        options: dict[str, Any] = {"devices": 1, "precision": name}
        if name == "16-mixed":
            options |= {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))], "precision": None}
        if strategy is not None:
            options |= {"devices": strategy["stages"], "strategy": PipelineStrategy(**strategy)}
        trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[watch], **options, **QUIET)
        trainer.fit(Normed(), MLP.loader(), MLP.loader())
        found[name] = watch.seen
    return found


def test_layers_run_in_the_dtypes_of_the_plain_run() -> None:
    reference = run_ranks(dtypes, 1, None)[0]
    ranks = run_ranks(dtypes, 2, {"stages": 2, "microbatches": 3})
    half = "torch.float16 x torch.float32 -> torch.float16"
    assert {("net.2", half, True), ("net.2", half, False)} <= reference["16-mixed"]
    for name, expected in reference.items():
        assert all(found[name] for found in ranks), "every stage has layers"
        assert set.union(*(found[name] for found in ranks)) == expected, name


class OwnScaler(GradScaler):
    """Could look for overflows elsewhere."""


class OwnMixedPrecision(MixedPrecision):
    """Could scale in another way."""


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (MixedPrecision("16-mixed", "cpu", OwnScaler("cpu")), "a tests.test_precision.OwnScaler as loss scaler"),
        (MixedPrecision("16-mixed", "cpu", ShardedGradScaler("cpu")), "sharded_grad_scaler.ShardedGradScaler as loss"),
        (OwnMixedPrecision("bf16-mixed", "cpu"), "OwnMixedPrecision \\(precision='bf16-mixed'\\). Supported are"),
    ],
)
def test_what_could_decide_otherwise_is_refused(plugin: MixedPrecision, text: str) -> None:
    with pytest.raises(MisconfigurationException, match=text):
        precision.check(plugin)


def test_known_scalers_with_any_settings() -> None:
    precision.check(MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0, enabled=False)))
    assert precision.loss_scaling(MixedPrecision("bf16-mixed", "cpu")) is None
