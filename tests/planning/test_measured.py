"""The plan of the example GPT against its run in a pipeline: what each rank really held."""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pp.__main__ import main
from lightning_pp.runtime.stage import Stage
from tests.launch import run_ranks
from tests.program import ROOT
from tests.training import fit

ALPHABET = "".join(map(chr, range(33, 130)))
SIZE, CONTEXT = 36, 24


def gpt() -> LightningModule:
    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import CharGPT

    return CharGPT(ALPHABET, width=64, layers=5, context=CONTEXT)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.arange(2 * SIZE * (CONTEXT + 1)).reshape(-1, CONTEXT + 1) % len(ALPHABET), SIZE)


class Box:
    """A saved tensor, for as long as the graph needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Held:
    """Counts what the graphs of all stages hold, each storage once."""

    def __init__(self) -> None:
        self.excluded: set[int] = set()
        self.users: dict[int, int] = {}
        self.bytes = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self.excluded:
            return tensor
        box = Box(tensor)
        if not self.users.get(key):
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self.users[key] = self.users.get(key, 0) + 1
        weakref.finalize(box, self.release, key, storage.nbytes())
        return box

    def release(self, key: int, size: int) -> None:
        self.users[key] -= 1
        self.bytes -= 0 if self.users[key] else size


class Measures(Callback):
    outcome: Any

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = held = Held()
        held.excluded |= {p.untyped_storage().data_ptr() for p in pl_module.parameters() if not p.is_meta}
        forward = Stage.forward

        def watched(*args: Any) -> Any:
            unpack = lambda box: box.tensor if isinstance(box, Box) else box  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(held.pack, unpack):
                return forward(*args)

        Stage.forward = watched  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, _: int) -> None:
        self.held.excluded.add(batch.untyped_storage().data_ptr())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        here = [p for p in pl_module.parameters() if not p.is_meta]
        states = trainer.optimizers[0].state
        self.outcome.extra |= {
            "weights": sum(p.nbytes for p in here),
            "gradients": sum(p.grad.nbytes for p in here if p.grad is not None),
            "optimizer": sum(t.nbytes for p in here for t in states[p].values()),
            "peak": self.held.peak,
            "left": self.held.bytes,
        }


def planned(capsys: Any, monkeypatch: Any, *args: str) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    init = json.dumps({"alphabet": ALPHABET, "width": 64, "layers": 5, "context": CONTEXT})
    batch = f"int64[{SIZE}, {CONTEXT + 1}]"
    assert main(["plan", "train_gpt:CharGPT", "--init-args", init, "--batch", batch, "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("stages", "schedule", "precision"), [(2, "gpipe", "bf16-mixed"), (4, "1f1b", "32-true")])
def test_memory(capsys: Any, monkeypatch: Any, stages: int, schedule: str, precision: str) -> None:
    strategy = {"stages": stages, "microbatches": 6, "schedule": schedule}
    outcomes = run_ranks(
        fit, stages, "", strategy=strategy, devices=stages, cls=gpt, loader=loader, callbacks=(Measures,),
        trainer={"precision": precision, "max_epochs": 1},
    )  # fmt: skip
    options = ("--stages", str(stages), "--microbatches", "6", "--schedule", schedule, "--precision", precision)
    (found,) = planned(capsys, monkeypatch, *options)["forecasts"]
    for rank, (outcome, stage) in enumerate(zip(outcomes, found["stages"], strict=True)):
        extra = outcome.extra
        assert extra["left"] == 0
        for key in ("weights", "gradients", "optimizer", "in_flight"):
            assert stage[key] == extra[key], f"rank {rank}: {key}"
        assert stage["in_flight"] * stage["saved"] == extra["peak"], f"rank {rank}"
