"""Models that start without memory: the initial weights of the plain run, each stage's part only on its own process."""

import gc
import os
import re
import warnings
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineStrategy
from lightning_pp.weights.materialise import Construction
from tests.launch import run_ranks
from tests.models import GPT, MLP
from tests.training import QUIET, Outcome, Watcher, assert_same, whole


class Late(GPT):
    """All in ``configure_model``: initialised by ``apply``, tied, partly frozen, with tables that glue uses."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        built = GPT(dropout=0.1, blocks=5)
        self.tok, self.blocks, self.norm, self.head = built.tok, built.blocks, built.norm, built.head
        self.pos_emb = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 10, 12), std=0.3))
        self.scales = torch.ones(12) * 1.25
        self.register_buffer("table", torch.sin(torch.ones(10, 12).cumsum(0)))
        self.apply(self._init_weights)
        self.blocks[1].mlp[0].requires_grad_(False)
        self.kept = [self.tok.weight, self.pos_emb, *self.blocks.parameters()]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tok(ids) * self.scales + self.pos_emb[:, :length] + self.table[:length]
        if self.table[0, 0] < 0:
            x = -x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(
            (p for p in self.parameters() if p.requires_grad), 0.1, initial_accumulator_value=0.2
        )


class Compiled(Late):
    """Each block compiled in place, on meta."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            block.compile(backend="eager")


class Smooth(Late):
    """The same without dropout, whose streams a pipeline has of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class Rotary(nn.Module):
    """A table that ``reset_parameters`` computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("angles", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles = torch.arange(8) / 4.0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * torch.cos(self.angles)


class Unseen(MLP):
    """For ``torch.device("meta")``: modules that set themselves, in the ways that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            Rotary(),
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Tanh()),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)),
        )
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.head.weight.requires_grad = False

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden, _ = self.lstm(self.net[:3](x).unsqueeze(1))
        return F.mse_loss(self.head(self.net[3:](hidden).squeeze(1)), y)

    def configure_optimizers(self) -> Any:
        # what is added in front of BatchNorm has no gradient but noise, which Adam would make as large as any
        return torch.optim.SGD(self.parameters(), 0.01)


class Twisted(Unseen):
    """The nanoGPT way: one method sets a module that it is given; and one tensor is shared by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0][0].weight = self.net[2][0].weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5)


#: what seed 3 gives net.0.0.weight[0, 0] of Unseen, whatever torch's own stream
FIRST_WEIGHT = -0.0659120678

MODELS: dict[str, type[Any]] = {cls.__name__: cls for cls in (Late, Compiled, Smooth, Unseen, Twisted, MLP)}


def run(
    name: str,
    how: str,
    stages: int | None = None,
    epochs: int = 2,
    resume: str | None = None,
    save: str | None = None,
    **options: Any,
) -> Outcome:
    """Train a model that is built in one of the ways: ``"always"``, ``"hook"``, ``"context"`` or ``"meta"``."""
    warnings.simplefilter("ignore")
    arguments = {"microbatches": 3, **options.pop("strategy", {})}
    outcome = Outcome()
    devices = {"devices": 1} if stages is None else {"devices": stages, "strategy": PipelineStrategy(**arguments)}
    trainer = Trainer(
        accelerator="cpu", callbacks=[Watcher(outcome)], max_epochs=epochs,
        **{"precision": "64-true", **QUIET, **devices, **options},
    )  # fmt: skip
    torch.manual_seed(5)
    if how == "context":
        with trainer.init_module(empty_init=stages is not None):
            module = MODELS[name]()
    elif how == "meta":
        with torch.device("meta"):
            module = MODELS[name]()
    else:
        module = MODELS[name]()
    trainer.fit(module, module.loader(), ckpt_path=resume)
    outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    outcome.final = {k: v.item() for k, v in trainer.callback_metrics.items()}
    outcome.global_step = trainer.global_step
    kept = getattr(module, "kept", [])
    outcome.extra = {
        "trained": {n for n, p in module.named_parameters() if p.requires_grad},
        "kept": {id(p) for p in kept} <= {id(p) for p in module.parameters()},
        "names": [n for n, _ in module.named_parameters()],
        "buffers": {n: b.clone() for n, b in module.named_buffers() if not b.is_meta},
        "after": torch.rand(3),
    }
    if stages is not None:
        outcome.extra["recorded"] = len(trainer.strategy._construction._recording._entries)  # type: ignore[attr-defined]
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome


@cache
def plain(name: str, how: str) -> Outcome:
    """The run without the strategy."""
    return run_ranks(run, 1, name, how)[0]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_layers_of_configure_model_begin_as_in_the_plain_run(stages: int) -> None:
    outcomes = run_ranks(run, stages, "Smooth", "hook", stages)
    reference = plain("Smooth", "hook")
    assert_same(reference, outcomes)
    for outcome in outcomes:
        assert outcome.extra["names"] == reference.extra["names"]
        assert outcome.extra["trained"] == reference.extra["trained"]
        assert outcome.extra["kept"], "the user's own references are to other tensors"
        assert outcome.extra["recorded"] < 12, "what has been taken is still recorded"
        assert torch.equal(outcome.extra["after"], reference.extra["after"]), "the run's stream is another one"


def test_recomputed_activations_dropout_and_compiled_layers_of_a_model_that_begin_without_memory() -> None:
    (alone,) = run_ranks(run, 1, "Late", "hook", 1)
    strategy = {"activation_checkpointing": True}
    assert_same(alone, run_ranks(run, 2, "Compiled", "hook", 2, strategy=strategy))


def test_a_checkpoint_of_such_a_model_loads_without_a_trainer(tmp_path: Path) -> None:
    path = str(tmp_path / "late.ckpt")
    trained = whole(run_ranks(run, 2, "Smooth", "hook", 2, epochs=1, save=path))
    loaded = dict(Smooth.load_from_checkpoint(path).named_parameters())
    assert loaded.keys() == trained.keys()
    for name, expected in trained.items():
        assert torch.equal(loaded[name], expected.float()), name


@pytest.mark.parametrize(("name", "how"), [("Smooth", "hook"), ("Twisted", "context")])
def test_initial_weights_have_the_precision_that_they_would_have(name: str, how: str) -> None:
    options = {"epochs": 0, "precision": "bf16-true"}
    (expected,) = run_ranks(run, 1, name, how, **options)
    for key, parameter in whole(run_ranks(run, 2, name, how, 2, **options)).items():
        assert parameter.dtype == expected.parameters[key].dtype
        assert torch.equal(parameter, expected.parameters[key]), key


def test_a_module_under_init_module_begins_as_one_that_is_built_always() -> None:
    assert_same(plain("MLP", "context"), run_ranks(run, 2, "MLP", "context", 2))


def test_what_was_built_unseen_begins_alike_for_any_number_of_stages(tmp_path: Path) -> None:
    path, strategy = str(tmp_path / "half.ckpt"), {"microbatches": 2}
    (alone,) = run_ranks(run, 1, "Unseen", "meta", 1, strategy=strategy)
    assert 0.1 < alone.parameters["head.weight"].abs().max() < 0.36
    assert alone.extra["trained"] == set(alone.parameters) - {"head.weight"}
    run_ranks(run, 3, "Unseen", "meta", 3, epochs=1, save=path, strategy=strategy)
    resumed = run_ranks(run, 2, "Unseen", "meta", 2, resume=path, strategy=strategy)
    for key, value in whole(resumed).items():
        torch.testing.assert_close(value, alone.parameters[key], atol=1e-9, rtol=0)
    for outcome in resumed:
        for key, buffer in outcome.extra["buffers"].items():
            torch.testing.assert_close(buffer, alone.extra["buffers"][key], atol=1e-9, rtol=0)


@pytest.mark.parametrize("stream", [1, 2])
def test_modules_that_were_built_unseen_have_streams_of_their_own(stream: int) -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(stream)
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = Unseen()
    construction = Construction()
    construction.complete(model, seed=3)
    construction.fill(model, (), lambda name: name.startswith(("net", "lstm")), cpu)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.head.weight.is_meta
    assert model.net[0][0].weight[0, 0].item() == pytest.approx(FIRST_WEIGHT)
    assert not torch.equal(model.net[0][0].weight, model.net[2][0].weight)
    assert model.net[3].self_attn.out_proj.bias.abs().sum() == 0
    assert torch.equal(model.net[1].angles, torch.arange(8) / 4.0)
    other = Construction()
    with torch.device("meta"):
        model = Unseen()
    other.complete(model, seed=4)
    other.fill(model, (), lambda name: True, cpu)
    assert model.net[0][0].weight[0, 0].item() != pytest.approx(FIRST_WEIGHT)


def test_one_method_that_sets_any_module_and_a_tensor_that_two_share() -> None:
    (alone,) = run_ranks(run, 1, "Twisted", "meta", 1, strategy={"microbatches": 2})
    assert alone.parameters["head.weight"].abs().max() > 0.5
    assert_same(alone, run_ranks(run, 2, "Twisted", "meta", 2, strategy={"microbatches": 2}))


class Bare(MLP):
    """A parameter and a table that nobody can know without the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.arange(8.0))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x * self.scale + self.table), y)


class NeedsNumbers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        self.net = MLP().net
        self.norm = torch.from_dlpack(self.net[0].weight.detach()).sum()


class NotTwice(MLP):
    def configure_model(self) -> None:
        self.net = MLP().net


def attempt(name: str, path: str | None = None, strict: bool = True) -> str:
    """What is said to a fit, and to an evaluation after it."""
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="pipeline", max_epochs=1, **QUIET
    )
    with torch.device("meta" if name == "Bare" else "cpu"):
        module: LightningModule = {"Bare": Bare, "NeedsNumbers": NeedsNumbers, "NotTwice": NotTwice}[name]()
    module.strict_loading = strict
    try:
        trainer.fit(module, MLP.loader(), ckpt_path=path)
        (metrics,) = trainer.validate(module, MLP.loader(), verbose=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{metrics['val_loss']:.4f}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Bare", "MisconfigurationException: scale is on the meta device.*define `Bare.reset_parameters`"),
        ("NeedsNumbers", r"MisconfigurationException: Building the model failed.*with torch.device\('cpu'\)"),
        ("NotTwice", "MisconfigurationException: NotTwice.configure_model has built 'net.0' anew"),
    ],
)
def test_what_cannot_begin_without_memory_is_refused(name: str, text: str) -> None:
    for said in run_ranks(attempt, 2, name):
        assert re.search(text, said), said


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_brings_the_values_that_nothing_else_says(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    model = Bare()
    trainer.fit(model, Bare.loader())
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    (metrics,) = trainer.validate(model, Bare.loader(), verbose=False)
    part = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    del part["state_dict"]["table"]
    torch.save(part, tmp_path / "part.ckpt")
    assert run_ranks(attempt, 2, "Bare", str(tmp_path / "whole.ckpt")) == [f"{metrics['val_loss']:.4f}"] * 2
    for said in run_ranks(attempt, 1, "Bare", str(tmp_path / "part.ckpt")):
        assert "Missing key" in said
    for said in run_ranks(attempt, 1, "Bare", str(tmp_path / "part.ckpt"), strict=False):
        assert said.startswith("MisconfigurationException: table is on the meta device")


class Constant(nn.Linear):
    """Nothing to draw: that would take the most time."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / self.in_features)


class Wide(LightningModule):
    """About 450 MB of parameters, in pieces that go back to the system when freed (of over 32 MB, for glibc)."""

    def __init__(self, width: int = 3072, depth: int = 12) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            kinds = [nn.Linear if index % 4 == 1 else Constant for index in range(self.depth)]
            self.layers = nn.Sequential(*(kind(self.width, self.width, bias=False) for kind in kinds))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layers(batch[0]).mean())

    def loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(1, self.width)))


class ResidentBytes:
    """How much more memory a process has held at most than it held at the start."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        self.start = self.read("VmRSS")

    def growth(self) -> int:
        return self.read("VmHWM") - self.start

    @staticmethod
    def read(key: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024


def measured(stages: int | None) -> tuple[int, float]:
    strategy = {} if stages is None else {"strategy": PipelineStrategy(microbatches=1)}
    trainer = Trainer(accelerator="cpu", devices=stages or 1, **strategy, **QUIET)
    module = Wide()
    torch.manual_seed(2)
    resident = ResidentBytes()
    (metrics,) = trainer.validate(module, module.loader(), verbose=False)
    return resident.growth(), metrics["loss"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux' /proc")
def test_a_process_holds_its_share_of_the_model_and_little_more() -> None:
    size = 12 * 3072 * 3072 * 4
    ((whole_model, loss),) = run_ranks(measured, 1, None)
    assert whole_model > size
    for growth, found in run_ranks(measured, 4, 4):
        assert growth < 0.45 * size, f"{growth / size:.0%} of the model"
        assert growth > 0.2 * size
        assert abs(found - loss) < 1e-6


class Watched(MLP):
    """Real weights, of which everything keeps hold: an optimizer with state, a list, hooks, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("table", torch.ones(8))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(self.lstm(x.unsqueeze(1))[0].squeeze(1) * self.table), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.1)


def released() -> dict[str, Any]:
    """Which storages live on after the cut, and what the hooks saw."""
    module, calls = Watched(), []
    weak = weakref.ref(module.net[6].weight)  # then another object must take its place
    module.kept = list(module.parameters())
    module.net[4].weight.register_hook(lambda grad: calls.append("net.4.weight"))
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("net.0.weight"))
    storages = {name: StorageWeakRef(parameter.untyped_storage()) for name, parameter in module.named_parameters()}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(), max_epochs=1, **QUIET)
    trainer.fit(module, module.loader())
    (optimizer,) = trainer.strategy.optimizers
    gc.collect()
    return {
        "alive": {name for name, storage in storages.items() if not storage.expired()},
        "here": {name for name, parameter in module.named_parameters() if not parameter.is_meta},
        "kept": {id(p) for p in module.kept if p is not weak()} - {id(p) for p in module.parameters()},
        "state": len(optimizer.state),
        "calls": set(calls),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_holds_on_to_what_other_stages_own(rank: int) -> None:
    result = released_on_both()[rank]
    assert result["alive"] == result["here"]
    assert 0 < len(result["here"]) < 12
    assert result["state"] == len(result["here"])
    assert result["calls"] == result["here"] & {"net.0.weight", "net.4.weight"}
    assert not result["kept"]


@cache
def released_on_both() -> list[dict[str, Any]]:
    return run_ranks(released, 2)
