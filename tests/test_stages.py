"""What lies on which stage, and how much of it at a time."""

import gc
import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.models import GPT, MODELS, Module
from tests.training import QUIET, Table, assert_same, piped, plain, whole


def wide_batch(samples: int) -> Any:
    source = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(samples, 8, generator=source), torch.randn(samples, 3, generator=source)),
        batch_size=samples,
    )


def batch_of_64() -> Any:
    return wide_batch(64)


FLIGHTS = Table(
    {
        (schedule, microbatches): {
            "name": "MLP",
            "microbatches": microbatches,
            "strategy": {"schedule": schedule},
            "loader": batch_of_64,
            "trainer": {"max_epochs": 1},
        }
        for schedule in ("1f1b", "gpipe", "eager_1f1b")
        for microbatches in (1, 2, 8, 64)
    }
)


@pytest.mark.parametrize("microbatches", [1, 2, 8, 64])
@pytest.mark.parametrize("stages", [2, 4])
def test_micro_batches_in_flight(stages: int, microbatches: int) -> None:
    """Counted in the running program: min(M, P - k) on rank k for 1F1B, M for GPipe; buffers do not grow with M."""
    found = FLIGHTS.piped(("1f1b", microbatches), stages)
    assert [o.extra["in_flight"] for o in found] == [min(microbatches, stages - k) for k in range(stages)]
    assert all(o.extra["buffers"] <= 4 for o in found)
    found = FLIGHTS.piped(("gpipe", microbatches), stages)
    assert [o.extra["in_flight"] for o in found] == [microbatches] * stages
    found = FLIGHTS.piped(("eager_1f1b", microbatches), stages)
    assert [o.extra["in_flight"] for o in found] == [min(microbatches, 2 * (stages - k) - 1) for k in range(stages)]


@pytest.mark.parametrize("stages", [2, 4])
def test_receive_buffers_do_not_grow_with_micro_batches(stages: int) -> None:
    """Two are posted ahead on each of a rank's incoming edges."""
    eight, many = ([o.extra["buffers"] for o in FLIGHTS.piped(("1f1b", m), stages)] for m in (8, 64))
    assert eight == many
    assert eight == [2, *[4] * (stages - 2), 2]


class HeldBytes:
    """Counts the bytes that autograd keeps for backward, each storage once, parameters and the batch left out."""

    def __init__(self, parameters: set[int]) -> None:
        self.held: dict[int, list[int]] = {}
        self.peak = 0
        self._parameters = parameters

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return tensor
        entry = self.held.setdefault(storage.data_ptr(), [storage.nbytes(), 0])
        entry[1] += 1
        self.peak = max(self.peak, sum(size for size, _ in self.held.values()))
        return Held(self, tensor)

    def release(self, key: int) -> None:
        self.held[key][1] -= 1
        if not self.held[key][1]:
            del self.held[key]


class Held:
    def __init__(self, counter: HeldBytes, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor

    def __del__(self) -> None:
        self.counter.release(self.tensor.untyped_storage().data_ptr())


def held_bytes(schedule: str, microbatches: int, stages: int) -> int:
    """Peak bytes on this rank for micro-batches of two samples."""
    torch.manual_seed(0)
    module = MODELS["MLP"]()
    strategy = PipelineStrategy(stages=stages, microbatches=microbatches, schedule=schedule)
    trainer = Trainer(accelerator="cpu", devices=stages, strategy=strategy, max_epochs=1, **QUIET)
    counters = []

    def counting(self: Module, batch: Any, batch_idx: int) -> Tensor:
        if not counters:
            others = [*batch, *(p for p in self.parameters() if not p.is_meta)]
            counters.append(HeldBytes({tensor.untyped_storage().data_ptr() for tensor in others}))
        with torch.autograd.graph.saved_tensors_hooks(
            counters[0].pack, lambda held: held.tensor if isinstance(held, Held) else held
        ):
            return self.loss(batch)

    type(module).training_step = counting  # type: ignore[method-assign]
    original = strategy.training_step

    def measured(*args: Any) -> Any:
        counters.clear()  # what planning ran does not count
        return original(*args)

    strategy.training_step = measured  # type: ignore[method-assign]
    trainer.fit(module, wide_batch(2 * microbatches))
    gc.collect()
    assert not counters[0].held, "nothing outlives the step"
    return counters[0].peak


def test_bytes_held_for_backward_do_not_grow_with_micro_batches() -> None:
    stages = 3
    eight = run_ranks(held_bytes, stages, "1f1b", 8, stages)
    many = run_ranks(held_bytes, stages, "1f1b", 64, stages)
    assert eight == many
    assert eight[1] > 0
    gpipe = [run_ranks(held_bytes, stages, "gpipe", m, stages)[1] for m in (8, 16)]
    assert gpipe[1] == 2 * gpipe[0] > eight[1]


def placement(name: str, stages: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = MODELS[name]()
    strategy = PipelineStrategy(stages=stages, microbatches=3)
    trainer = Trainer(accelerator="cpu", devices=stages, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, module.loader())  # type: ignore[attr-defined]
    states = trainer.optimizers[0].state
    return {
        "stage": strategy.stage_index,
        "here": [n for n, p in module.named_parameters() if not p.is_meta],
        "all": [n for n, _ in module.named_parameters()],
        "with state": [n for n, p in module.named_parameters() if p in states],
        "in the optimizer": len(trainer.optimizers[0].param_groups[0]["params"]),
    }


@pytest.mark.parametrize("stages", [2, 4])
def test_a_rank_holds_what_its_stage_needs(stages: int) -> None:
    found = run_ranks(placement, stages, "GPT", stages)
    names = [name for name, _ in GPT().named_parameters()]
    for rank, one in enumerate(found):
        assert one["stage"] == rank
        assert one["all"] == names, "names and order are the same everywhere"
        assert one["with state"] == one["here"], "no optimizer state for what lies elsewhere"
        assert one["in the optimizer"] == len(names)
    holders = {name: [r for r, one in enumerate(found) if name in one["here"]] for name in names}
    assert holders.pop("tok.weight") == [0, stages - 1], "tied: the embedding and the head"
    assert holders.pop("pos_emb") == [0], "whoever adds the positions"
    assert all(len(ranks) == 1 for ranks in holders.values())
    assert {rank for ranks in holders.values() for rank in ranks} == set(range(stages))


class Big(Module):
    """64 MiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Resident(Callback):
    bytes = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.bytes = resident()


def grown(stages: int) -> float:
    """MiB that this process has grown by at the end of the first step."""
    before = resident()
    watcher = Resident()
    trainer = Trainer(
        accelerator="cpu", devices=stages, strategy=PipelineStrategy(stages=stages, microbatches=2), max_epochs=1,
        callbacks=[watcher], **QUIET,
    )  # fmt: skip
    trainer.fit(Big(), DataLoader(TensorDataset(torch.randn(4, 1024)), batch_size=4))
    return (watcher.bytes - before) / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident size from /proc")
def test_off_stage_parameters_take_no_memory() -> None:
    """Weights and gradients: 128 MiB in one stage, 32 MiB on each of four."""
    (one,) = run_ranks(grown, 1, 1)
    four = run_ranks(grown, 4, 4)
    assert one > 120
    assert max(four) < one - 64, (one, four)


def test_frozen_parameters_stay_as_they_were() -> None:
    start = plain("FrozenHalf", trainer={"max_epochs": 0}).parameters
    found = whole(piped("FrozenHalf", 2, 3))
    for name in ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"):
        assert torch.equal(found[name], start[name])
    assert not torch.equal(found["net.6.weight"], start["net.6.weight"])


def messages(name: str, stages: int) -> int:
    """Gradient tensors that this rank has sent."""
    from lightning_pp.runtime import channel

    sent = []
    original = channel.Sender.send

    def send(self: channel.Sender, message: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        sent.append(sum(tensor.numel() > 0 for tensor in tensors))
        original(self, message, tensors, *args, **kwargs)

    channel.Sender.send = send  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator="cpu", devices=stages, max_epochs=1, limit_train_batches=1,
        strategy=PipelineStrategy(stages=stages, microbatches=2, split=["net.2", "net.4"]), **QUIET,
    )  # fmt: skip
    trainer.fit(MODELS[name](), MODELS[name].loader())  # type: ignore[attr-defined]
    return sum(sent)


def test_backward_stops_where_nothing_trains() -> None:
    """With the first two of three stages frozen, activations are all that is sent: 2 micro-batches over each cut."""
    assert run_ranks(messages, 3, "FrozenHalf", 3) == [2, 2, 0]
    assert run_ranks(messages, 3, "MLP", 3) == [2, 4, 2]


CUTS = Table(
    {balance: {"name": "GPT", "strategy": {"balance": balance}} for balance in ("flops", "params", "time", "memory")}
    | {"split": {"name": "GPT", "strategy": {"split": ["blocks.1", "blocks.3"], "layers": ["tests.models.Block"]}}}
)


@pytest.mark.parametrize("cut", CUTS.keys)
def test_every_cut_trains_alike(cut: str) -> None:
    assert_same(plain("GPT"), CUTS.piped(cut, 3))


def test_explicit_split_and_layers() -> None:
    found = CUTS.piped("split", 3)
    here = [{name.split(".")[1] for name in o.parameters if name.startswith("blocks")} for o in found]
    assert here == [{"0"}, {"1", "2"}, {"3"}]
    whole_model = piped("GPT", 1, 2, strategy={"layers": [nn.ModuleList]})
    assert_same(plain("GPT"), whole_model)


assert F is not None
