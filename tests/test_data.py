"""One stream of data for all stages, the plain run's, with nothing lost to planning."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from tests.launch import run_ranks, try_ranks
from tests.training import Outcome, Table, assert_same, fit, piped, plain


class Numbered(Dataset[Any]):
    """Sample i has a target of i / 100, so that a batch says what it holds."""

    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.sin(index * torch.arange(8, dtype=torch.float64)), torch.full(
            (3,), index / 100, dtype=torch.float64
        )


class Augmented(Numbered):
    """Draws from torch, Python and numpy for each sample."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(()).double() + random.random() + np.random.rand(), y


class Stream(IterableDataset[Any]):
    """A stream that cannot be read twice."""

    def __init__(self, length: int = 13) -> None:
        self.source = iter([Numbered()[i] for i in range(length)])

    def __iter__(self) -> Any:
        return self.source


class Counted:
    """A loader with a length and a place of its own, like those that stream shards."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        while self.position < 5:
            self.position += 1
            yield [torch.full((4, 8), self.position / 5).double(), torch.ones(4, 3).double()]


class OneShot:
    """A loader that is its own iterator."""

    def __init__(self) -> None:
        self.batches = iter([[torch.full((4, 8), i / 5).double(), torch.ones(4, 3).double()] for i in range(5)])

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


def in_order() -> Any:
    return DataLoader(Numbered(), batch_size=5)


def shuffled() -> Any:
    return DataLoader(Numbered(), batch_size=5, shuffle=True)


def shuffled_by_generator() -> Any:
    return DataLoader(Numbered(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3))


def weighted() -> Any:
    return DataLoader(Numbered(), batch_size=5, sampler=WeightedRandomSampler(torch.arange(22).double(), 22))


def augmented() -> Any:
    return DataLoader(Augmented(), batch_size=5, shuffle=True)


def augmented_by_workers() -> Any:
    return DataLoader(Augmented(), batch_size=5, shuffle=True, num_workers=2, persistent_workers=True)


def stream() -> Any:
    return DataLoader(Stream(), batch_size=4)


def stream_with_worker() -> Any:
    return DataLoader(Stream(), batch_size=4, num_workers=1)


def counted() -> Any:
    return Counted()


def one_shot() -> Any:
    return OneShot()


def two_loaders() -> Any:
    return {"a": in_order(), "b": DataLoader(Numbered(), batch_size=7)}


LOADERS = Table(
    {
        loader.__name__: {
            "name": "MLP",
            "loader": loader,
            "trainer": {"max_epochs": 1 if loader in (stream, counted, one_shot) else 3},
        }
        for loader in (in_order, shuffled, shuffled_by_generator, weighted, augmented, stream, counted, one_shot)
    }
)


@pytest.mark.parametrize("loader", LOADERS.keys)
@pytest.mark.parametrize("stages", [1, 2])
def test_batches_are_those_of_the_plain_run(loader: str, stages: int) -> None:
    assert_same(LOADERS.plain(loader), LOADERS.piped(loader, stages))


@pytest.mark.parametrize("loader", [shuffled, weighted, augmented, augmented_by_workers, stream_with_worker])
def test_stages_agree_without_a_seed(loader: Any) -> None:
    """Every process starts from another random state here."""
    epochs = 1 if loader is stream_with_worker else 3
    one, two, three = run_ranks(
        unseeded_fit, 3, {"stages": 3, "microbatches": 2}, loader, {"max_epochs": epochs}, 3, timeout=90
    )
    assert one.batches == two.batches == three.batches
    if epochs > 1:
        first, second = one.batches[:5], one.batches[5:10]
        assert first != second, "the same order in every epoch"


def unseeded_fit(strategy: Any, loader: Any, trainer: Any, devices: int) -> Outcome:
    torch.seed()
    random.seed()
    np.random.seed()
    return fit("MLP", strategy=strategy, loader=loader, trainer=trainer, devices=devices, seed=None)


def test_workers_augment_alike_on_all_stages() -> None:
    """With ``seed_everything(workers=True)`` Lightning seeds workers by global rank."""
    one, two = run_ranks(seeded_workers, 2, timeout=90)
    assert one.batches == two.batches


def seeded_workers() -> Outcome:
    from lightning.pytorch import seed_everything

    seed_everything(3, workers=True, verbose=False)
    return fit("MLP", strategy={"stages": 2, "microbatches": 2}, loader=augmented_by_workers, devices=2, seed=None)


@pytest.mark.parametrize("stages", [1, 2])
def test_every_sample_is_used_once_per_epoch(stages: int) -> None:
    for outcome in LOADERS.piped("shuffled", stages):
        assert len(outcome.batches) == 3 * 5
        for epoch in (outcome.batches[:5], outcome.batches[5:10], outcome.batches[10:]):
            rows = sorted(row for batch in epoch for row in batch[1])
            assert rows == pytest.approx([3 * index / 100 for index in range(22)])


def test_planning_leaves_every_random_state_alone() -> None:
    """When the first batch is trained on, as many numbers have been drawn as without the strategy."""
    before = plain("MLP", loader=shuffled, callbacks=(StatesAtStart,)).extra["states"]
    for outcome in piped("MLP", 2, 3, loader=shuffled, callbacks=(StatesAtStart,)):
        assert outcome.extra["states"] == before


class StatesAtStart(Callback):
    outcome: Outcome

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        numbers = (torch.rand(()).item(), random.random(), float(np.random.rand()))
        self.outcome.extra.setdefault("states", numbers)


def test_several_loaders_at_once() -> None:
    plain_batches = run_ranks(fit_two_loaders, 1, None)[0]
    for outcome in run_ranks(fit_two_loaders, 2, {"stages": 2, "microbatches": 3}):
        assert outcome == plain_batches


def fit_two_loaders(strategy: Any) -> Any:
    from lightning_pp import PipelineStrategy
    from tests.models import MLP
    from tests.training import QUIET

    class Both(MLP):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch["a"]) + 1e-3 * batch["b"][0].mean()

    torch.manual_seed(0)
    module = Both()
    options: Any = {} if strategy is None else {"strategy": PipelineStrategy(**strategy), "devices": 2}
    trainer = Trainer(accelerator="cpu", max_epochs=2, precision="64-true", **{"devices": 1, **options}, **QUIET)
    trainer.fit(module, two_loaders())
    return round(trainer.callback_metrics["train_loss"].item(), 9)


def test_stages_that_see_different_batches_are_told() -> None:
    failures = try_ranks(different_batches, 2, timeout=60)
    assert all("The stages saw different batches" in failure.text for failure in failures)


def different_batches() -> Any:
    import os

    class Private(Numbered):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + float(os.environ["LOCAL_RANK"]), y

    return fit("MLP", {"stages": 2, "microbatches": 2}, devices=2, loader=lambda: DataLoader(Private(), batch_size=5))


class Uneven(IterableDataset[Any]):
    """A stream with one sample more on odd ranks, and other samples for each replica."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def __iter__(self) -> Any:
        rank = dist.get_rank()
        return iter([Numbered()[2 * i + rank % self.replicas] for i in range(5 + rank % 2)])


class UnevenLoader:
    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def __call__(self) -> DataLoader[Any]:
        return DataLoader(Uneven(self.replicas), batch_size=1)


def pairs() -> DataLoader[Any]:
    """What two replicas see of :class:`Uneven`, while both have something."""
    return DataLoader(Numbered(10), batch_size=2)


def first_five() -> DataLoader[Any]:
    return DataLoader([Numbered()[2 * i] for i in range(5)], batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stages", "replicas", "union"), [(2, 1, first_five), (1, 2, pairs)])
def test_uneven_streams_end_together(stages: int, replicas: int, union: Any) -> None:
    reference = plain("MLP", loader=union)
    strategy = {"stages": stages, "microbatches": 2}
    outcomes = run_ranks(fit, 2, "MLP", strategy=strategy, devices=2, loader=UnevenLoader(replicas))
    for outcome in outcomes:
        assert outcome.global_step == reference.global_step == 2 * 5
        for name, parameter in outcome.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], atol=1e-9, rtol=0)


class Longer(Dataset[Any]):
    def __len__(self) -> int:
        return 20 + dist.get_rank()

    def __getitem__(self, index: int) -> Any:
        return Numbered()[index]


def longer() -> DataLoader[Any]:
    return DataLoader(Longer(), batch_size=4)


def test_loaders_of_different_lengths_are_refused() -> None:
    """A stage with a batch more would wait for the others for ever."""
    strategy = {"stages": 2, "microbatches": 2}
    for failure in try_ranks(fit, 2, "MLP", strategy=strategy, devices=2, loader=longer, timeout=30):
        assert "rank 0 has 5 batches, and this process" in failure.text or "loaders of different" in failure.text
