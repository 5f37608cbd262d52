"""Pipelines side by side: the result is that of the plain run on the union of their batches."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from tests.launch import run_ranks, try_ranks
from tests.models import MODELS
from tests.training import Outcome, fit, plain


class Union(Sampler[list[int]]):
    """The batches of several replicas, each taken together as one batch; shuffled as Lightning shuffles theirs."""

    def __init__(self, dataset: Any, replicas: int, batch_size: int, shuffle: bool = True) -> None:
        self.samplers = [
            DistributedSampler(dataset, replicas, rank, shuffle=shuffle, seed=0) for rank in range(replicas)
        ]
        self.batch_size = batch_size
        self.sampler = self  # Lightning looks for ``set_epoch`` there

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        shares = [list(sampler) for sampler in self.samplers]
        for start in range(0, len(shares[0]), self.batch_size):
            yield [index for share in shares for index in share[start : start + self.batch_size]]

    def __len__(self) -> int:
        return -(-len(self.samplers[0]) // self.batch_size)


class UnionLoader:
    """Makes a model's loader with ``samples`` samples; for the plain run that of the union."""

    def __init__(
        self, name: str, replicas: int, batch_size: int, samples: int, union: bool, shuffle: bool = True
    ) -> None:
        self.arguments = (name, replicas, batch_size, samples, union, shuffle)

    def __repr__(self) -> str:
        return repr(self.arguments)

    def __call__(self) -> DataLoader[Any]:
        name, replicas, batch_size, samples, union, shuffle = self.arguments
        loader = MODELS[name].loader()
        dataset = torch.utils.data.Subset(loader.dataset, [i % len(loader.dataset) for i in range(samples)])
        if union:
            sampler = Union(dataset, replicas, batch_size, shuffle)
            return DataLoader(dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)
        return DataLoader(dataset, batch_size=batch_size, collate_fn=loader.collate_fn)


def side_by_side(
    name: str, stages: int, replicas: int, microbatches: int = 3, samples: int = 22, batch_size: int = 4, **options: Any
) -> tuple[Outcome, list[Outcome]]:
    """The plain run, and what each rank of ``stages`` times ``replicas`` saw."""
    reference = plain(name, loader=UnionLoader(name, replicas, batch_size, samples, True), **options)
    outcomes = run_ranks(
        fit,
        stages * replicas,
        name,
        strategy={"stages": stages, "microbatches": microbatches},
        devices=stages * replicas,
        loader=UnionLoader(name, replicas, batch_size, samples, False),
        **options,
    )
    return reference, outcomes


def assert_union(reference: Outcome, outcomes: list[Outcome], replicas: int, tolerance: float = 1e-9) -> None:
    """Parameters, steps and logged values are those of the plain run, on every rank; copies are bit-equal."""
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, parameter in outcome.parameters.items():
            assert name not in found or torch.equal(found[name], parameter), f"copies of {name} differ"
            found[name] = parameter
    assert found.keys() == reference.parameters.keys()
    for name, expected in reference.parameters.items():
        torch.testing.assert_close(found[name], expected, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    for rank, outcome in enumerate(outcomes):
        assert outcome.global_step == reference.global_step
        assert len(outcome.metrics) == len(reference.metrics)
        for ours, theirs in zip([*outcome.metrics, outcome.final], [*reference.metrics, reference.final], strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert abs(ours[name] - value) <= tolerance, f"rank {rank}, {name}: {ours[name]} instead of {value}"
        assert outcome.batches == outcomes[rank % replicas].batches, "stages of one replica saw different batches"


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [("MLP", 2, 2), ("MLP", 1, 2), ("GPT", 2, 2), ("UNet", 2, 2), ("FrozenHalf", 2, 2), ("WeightedGPT", 2, 2)],
)
def test_two_replicas_train_as_one_on_the_union(name: str, stages: int, replicas: int) -> None:
    """WeightedGPT's batches weigh differently on each replica; GPT ties parameters over stages."""
    reference, outcomes = side_by_side(name, stages, replicas)
    assert_union(reference, outcomes, replicas)
    if replicas > 1:
        assert outcomes[0].batches != outcomes[1].batches


def test_a_loss_over_the_samples_of_all_replicas() -> None:
    """``all_gather`` with gradients in the step, which is planned by each rank alone."""
    reference, outcomes = side_by_side("Contrasting", 2, 2, microbatches=1)
    assert_union(reference, outcomes, 2)


def test_three_replicas_keep_tied_copies_bit_equal() -> None:
    reference, outcomes = side_by_side("GPT", 2, 3, samples=21)
    assert_union(reference, outcomes, 3)


class GradientsAreThose(Callback):
    """Writes down the gradients that the optimizer is about to use."""

    outcome: Outcome

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        grads = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}
        self.outcome.extra.setdefault("grads", []).append(grads)


class Spectator(GradientsAreThose):
    """Looks at gradients before the backward as well, so that they are held back."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        pass


@pytest.mark.parametrize("watch", [GradientsAreThose, Spectator])
def test_accumulated_gradients_are_averaged_once(watch: type[Callback]) -> None:
    """Three batches per epoch in windows of two: the last one is incomplete."""
    options: dict[str, Any] = {
        "callbacks": (watch,),
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    }
    reference, outcomes = side_by_side("GPT", 2, 2, **options)
    assert_union(reference, outcomes, 2)
    for outcome in outcomes:
        assert len(outcome.extra["grads"]) == len(reference.extra["grads"]) == reference.global_step
        for ours, theirs in zip(outcome.extra["grads"], reference.extra["grads"], strict=True):
            for name, grad in ours.items():
                torch.testing.assert_close(grad, theirs[name], atol=1e-9, rtol=0)


class Asks(Callback):
    """Uses what a module uses to talk to other processes."""

    outcome: Outcome

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        own = torch.full((2,), float(trainer.strategy.data_parallel_rank + 1))  # type: ignore[attr-defined]
        strategy = trainer.strategy
        wanted = own.clone().requires_grad_()
        (pl_module.all_gather(wanted, sync_grads=True).sum() * own[0]).backward()
        self.outcome.extra["asked"] = {
            "gathered": pl_module.all_gather(own).tolist(),
            "mean": strategy.reduce(own, reduce_op="mean").tolist(),
            "sum": strategy.reduce(own, reduce_op="sum").tolist(),
            "max": strategy.reduce(own, reduce_op="max").tolist(),
            "integer mean": strategy.reduce(own.int(), reduce_op="mean").tolist(),
            "plain": strategy.reduce(7),
            "every": strategy.reduce_boolean_decision(trainer.global_rank < 3),
            "any": strategy.reduce_boolean_decision(trainer.global_rank == 3, all=False),
            "gradient": wanted.grad.tolist() if wanted.grad is not None else None,
            "own": own.tolist(),
        }


def test_processes_talk_to_their_replicas() -> None:
    """Stages of one pipeline hold one value: sums and means are over the pipelines."""
    strategy = {"stages": 2, "microbatches": 3}
    loader = UnionLoader("MLP", 2, 4, 22, False)
    outcomes = run_ranks(fit, 4, "MLP", strategy=strategy, devices=4, loader=loader, callbacks=(Asks,))
    for rank, outcome in enumerate(outcomes):
        asked = outcome.extra["asked"]
        assert asked["own"] == [rank % 2 + 1.0] * 2
        assert asked["gathered"] == [[1.0, 1.0], [2.0, 2.0]]
        assert (asked["mean"], asked["sum"], asked["max"]) == ([1.5, 1.5], [3.0, 3.0], [2.0, 2.0])
        assert asked["integer mean"] == [1.5, 1.5]
        assert asked["plain"] == 7
        assert (asked["every"], asked["any"]) == (False, True)
        assert asked["gradient"] == [3.0, 3.0], "the other replica's share of the gradient comes back"


class Fails(Callback):
    outcome: Outcome

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 2 and batch_idx == 1:
            raise ValueError("planted on one rank of one replica")


def test_a_failure_in_one_replica_ends_the_others() -> None:
    strategy = {"stages": 2, "microbatches": 3}
    loader = UnionLoader("MLP", 2, 4, 22, False)
    started = time.monotonic()
    failures = try_ranks(fit, 4, "MLP", strategy=strategy, devices=4, loader=loader, callbacks=(Fails,))
    assert time.monotonic() - started < 30
    for failure in failures:
        assert "planted on one rank of one replica" in failure.text
    assert "Rank 1 (stage 0)" in failures[1].text, "not its position in its pipeline"


class Statistics(Callback):
    """Looks at BatchNorm's statistics when validation begins."""

    outcome: Outcome

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        buffers = {n: b.clone() for n, b in pl_module.named_buffers() if not b.is_meta}
        self.outcome.extra.setdefault("statistics", []).append(buffers)


def test_replicas_evaluate_with_equal_statistics() -> None:
    """Each has seen other samples; those of the first are taken, as by DistributedDataParallel."""
    outcomes = run_ranks(
        fit,
        2,
        "Normalised",
        strategy={"stages": 1, "microbatches": 1},
        devices=2,
        loader=UnionLoader("MLP", 2, 4, 22, False),
        callbacks=(Statistics,),
        validation=MODELS["MLP"].loader,
    )
    one, other = (outcome.extra["statistics"] for outcome in outcomes)
    assert len(one) == len(other) == 3
    assert not torch.equal(one[0]["net.1.running_mean"], one[1]["net.1.running_mean"])
    for ours, theirs in zip(one, other, strict=True):
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
