"""Trains, saves and resumes in every way; runs inside the test processes."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pp import PipelineStrategy
from tests.models import GPT, UntiedDropoutGPT, generator
from tests.training import QUIET

TOLERANCE = 1e-9


class Scheduled(GPT):
    """Tied weights, two groups with rates of their own, a schedule, and a hyper-parameter."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.double()  # Lightning loads a checkpoint before the precision plugin converts the module

    def configure_optimizers(self) -> Any:
        plain = [p for p in self.parameters() if p.ndim < 2]
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        rate = self.hparams["rate"]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": rate / 3}]
        optimizer = torch.optim.AdamW(groups, lr=rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    @staticmethod
    def batches(batch_size: int) -> DataLoader[Any]:
        ids = torch.randint(0, GPT.vocabulary, (30, 7), generator=generator(8))
        return DataLoader(TensorDataset(ids), batch_size=batch_size)


class Dropping(UntiedDropoutGPT):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    batches = staticmethod(Scheduled.batches)


class Counted(nn.Linear):
    """A layer with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).tanh()

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Late(LightningModule):
    """Built in ``configure_model``; counts its losses, which only the last stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = 0

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.tok = nn.Embedding(GPT.vocabulary, 12)
            self.layers = nn.ModuleList(Counted() for _ in range(3))
            self.head = nn.Linear(12, GPT.vocabulary)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.tok(batch[0][:, :-1])
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())
        self.losses += 1
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # has no state at all

    def get_extra_state(self) -> dict[str, int]:
        return {"losses": self.losses}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.losses = state["losses"]


class Resumable:
    """A loader that knows where it is, so that a resumed run goes on with the next batch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.position %= len(self)  # the loop does not ask for more than it wants
        while self.position < len(self):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Counter(Callback):
    """A callback with a state of its own."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "tensor": torch.tensor([self.seen])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].item() == state["seen"]
        self.seen = state["seen"]


class SaveAt(Callback):
    """Saves after a step, wherever in an epoch that is."""

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def train(
    kind: str,
    folder: str,
    resume: str | None = None,
    model: str = "Scheduled",
    replicas: int = 1,
    callbacks: tuple[Any, ...] = (),
    **strategy: Any,
) -> Trainer:
    """Train 2 epochs of 3 batches; ``mid.ckpt`` is saved after step 4 and ``end.ckpt`` at the end.

    Args:
        kind: ``"plain"``, ``"ddp"``, or the number of stages.
        folder: Where checkpoints go.
        resume: What to start from.
        model: ``"Scheduled"``, or one whose loader is resumed, too: ``"Dropping"``, ``"Late"``.
        replicas: Pipelines side by side.
        callbacks: Further ones.
        **strategy: Arguments of the strategy.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    module = {"Scheduled": Scheduled, "Dropping": Dropping, "Late": Late}[model]()
    options: dict[str, Any] = {"devices": 1}
    if kind == "ddp":
        options = {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")}
        replicas = 2
    elif kind != "plain":
        arguments = {"stages": int(kind), "microbatches": 3, **strategy}
        options = {"devices": int(kind) * replicas, "strategy": PipelineStrategy(**arguments)}
    loader = Scheduled.batches(10 // replicas)
    if replicas > 1:
        # together the processes see the samples that the plain run sees in a step; Lightning would shuffle
        options["use_distributed_sampler"] = False
        rank = int(os.environ["LOCAL_RANK"])
        samples: Any = loader.dataset
        sampler = DistributedSampler(samples, replicas, rank % replicas, shuffle=False)
        loader = DataLoader(samples, batch_size=10 // replicas, sampler=sampler)
    trainer = Trainer(
        accelerator="cpu", precision="64-true", max_epochs=2, **options, **QUIET,
        callbacks=[Counter(), SaveAt(4, f"{folder}/mid.ckpt"), *callbacks],
    )  # fmt: skip
    data: Any = Resumable(list(loader)) if model != "Scheduled" else loader
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return trainer


def train_all(runs: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Train once after the other in the same processes; each as (kind, folder, further arguments of ``train``)."""
    for kind, folder, options in runs:
        train(kind, folder, **options)


def load(path: str | Path) -> Any:
    return torch.load(path, weights_only=False, map_location="cpu")


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with numbers for parameters, which folders know by name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def assert_alike(ours: Any, theirs: Any, where: str = "", in_order: bool = True) -> None:
    """Equal in structure, order, types and values, floating point numbers to the tolerance."""
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, where
        assert not ours.is_meta, where
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, Mapping):
        assert type(ours) is type(theirs), where
        names = (list(ours), list(theirs)) if in_order else (sorted(map(str, ours)), sorted(map(str, theirs)))
        assert names[0] == names[1], where
        for key, value in theirs.items():
            assert_alike(ours[key], value, f"{where}/{key}", in_order)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for number, value in enumerate(theirs):
            assert_alike(ours[number], value, f"{where}/{number}", in_order)
    elif isinstance(theirs, float):
        assert abs(ours - theirs) <= TOLERANCE, f"{where}: {ours} instead of {theirs}"
    else:
        assert ours == theirs, f"{where}: {ours} instead of {theirs}"
