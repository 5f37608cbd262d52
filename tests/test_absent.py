"""Parameters of other stages are not taken for empty where a hook computes with them.

In torch, what would be written into a real tensor from one on the meta device is left out without a word: a momentum
encoder that follows an encoder on another stage shrank to nothing.
"""

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_pp.weights.absent import Absence, AbsentTensor, absent
from lightning_pp.weights.exchange import exchange
from tests.launch import Failed, run_ranks, try_ranks
from tests.training import Outcome, assert_same, fit
from tests.zoo_own.towers import MoCo, MoCoInHook


def called(tensor: Tensor) -> str:
    return f"the one of shape {list(tensor.shape)}"


def divided() -> nn.ModuleDict:
    """A layer whose values are away, and one that is here."""
    model = nn.ModuleDict({"away": nn.Linear(3, 4), "here": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)})

    def nothing(name: str, tensor: Tensor) -> Tensor | None:
        return None if name.startswith("here") else absent(tensor, Absence(frozenset([name]), called))

    exchange(model, (), nothing)
    return model


Mixing = Callable[[Tensor, Tensor], Any]

#: what changes the first by the second
REFUSED: dict[str, Mixing] = {
    "added": lambda here, away: here.mul_(0.9).add_(away, alpha=0.1),
    "through data": lambda here, away: here.data.add_(away.data),
    "detached": lambda here, away: here.detach().add_(away.detach()),
    "computed with": lambda here, away: here.add_(0.1 * away.data.clone().square()),
    "copied": lambda here, away: here.copy_(away),
    "lerp": lambda here, away: here.lerp_(away, 0.1),
    "operator": lambda here, away: here.__iadd__(away),
    "a part": lambda here, away: here.__setitem__(0, away[0]),
    "a part that is here": lambda here, away: here[0].add_(away[1]),
    "transposed": lambda here, away: here.t().add_(away.t()),
    "out": lambda here, away: torch.add(here, away, out=here),
    "a number": lambda here, away: here.mul_(away.norm()),
    "a sum": lambda here, away: torch.zeros(()).add_(away.sum()),
    "assigned data": lambda here, away: setattr(here, "data", here.data * 0.9 + away.data * 0.1),
    "out of place": lambda here, away: here + away,
    "lists": lambda here, away: torch._foreach_add_([away, here], [here.clone(), away]),
    "lists, and a factor": lambda here, away: torch._foreach_lerp_([here.clone(), here], [here, away], 0.1),
    "lists, by a number": lambda here, away: torch._foreach_mul_([here], away.sum()),
    "one vector": lambda here, away: nn.utils.parameters_to_vector([here, away]),
}
#: what each process may do with its own part
ALLOWED: dict[str, Mixing] = {
    "what is away, by what is away": lambda here, away: away.mul_(0.9).add_(away.clone(), alpha=0.1),
    "what is away, by what is here": lambda here, away: away.mul_(0.9).add_(here),
    "by a number that is here": lambda here, away: away.mul_(torch.tensor(0.9)).add_(away * torch.tensor(0.1)),
    "assigned data": lambda here, away: setattr(away, "data", away.data * 0.9 + away.data.clone() * 0.1),
    "masked": lambda here, away: away.mul_(torch.ones(4, 3)),
    "drawn": lambda here, away: away.copy_(torch.randn_like(away)),
    "lists side by side": lambda here, away: torch._foreach_lerp_([away, here], [away.clone(), here.clone()], 0.5),
    "lerp": lambda here, away: away.lerp_(here, 0.1),
    "a part by a mask": lambda here, away: away.__setitem__(here > 0, 0.0),
    "norms": lambda here, away: torch._foreach_norm([away, here]),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_here_is_not_changed_by_what_is_not(kind: str) -> None:
    model = divided()
    before = model["here"].weight.clone()
    with pytest.raises(MisconfigurationException, match=r"test_absent.py:\d+: .*(shape|away\.weight).*one stage"):
        REFUSED[kind](model["here"].weight, model["away"].weight)
    found = model["here"].weight
    assert torch.equal(found, before) or torch.equal(found, before * 0.9), "at most what came before the mixture"


@torch.no_grad()
@pytest.mark.parametrize("kind", ALLOWED)
def test_each_process_may_do_its_own_part(kind: str) -> None:
    model = divided()
    ALLOWED[kind](model["here"].weight, model["away"].weight)
    assert model["away"].weight.is_meta
    assert not model["here"].weight.is_meta


def test_both_are_named() -> None:
    model = divided()
    with pytest.raises(
        MisconfigurationException, match=r"changes the one of shape \[4, 3\] by .* from away\.weight\. "
    ):
        model["here"].weight.data.add_(model["away"].weight * model["away"].weight)


def test_a_parameter_stays_one_and_copies_of_it_are_plain_elsewhere() -> None:
    model = divided()
    weight, mean = model["away"].weight, model["norm"].running_mean
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.is_leaf
    assert isinstance(mean, AbsentTensor)
    assert not isinstance(mean, nn.Parameter)
    copied = copy.deepcopy(model)
    assert isinstance(copied["away"].weight, nn.Parameter)
    with pytest.raises(MisconfigurationException):
        model["here"].weight.data.add_(copied["away"].weight)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for found in (pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)):
        assert type(found["away"].weight) is nn.Parameter
        assert type(found["norm"].running_mean) is Tensor
        assert found["away"].weight.is_meta


def test_an_absent_tensor_that_gets_values_is_plain_again() -> None:
    model = divided()
    exchange(model, (), lambda name, tensor: torch.ones(tensor.shape) if tensor.is_meta else None)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {type(b) for b in model.buffers()} == {Tensor}
    assert not vars(model["away"].weight)


# --- in a pipeline ---


class MoCoByData(MoCoInHook):
    """As the authors of momentum contrast wrote it."""

    @torch.no_grad()
    def follow(self) -> None:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1


class MoCoByLists(MoCoInHook):
    @torch.no_grad()
    def follow(self) -> None:
        torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 0.1)


class MoCoInOptimizerStep(MoCo):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.contrast(batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.follow()


class MoCoByCallback(MoCo):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.contrast(batch)


class Follow(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.follow()  # type: ignore[operator]


@pytest.mark.parametrize("cls", [MoCoInHook, MoCoByData, MoCoByLists, MoCoInOptimizerStep, MoCoByCallback])
def test_a_hook_that_mixes_parameters_of_two_stages_is_told_so(cls: type[MoCo]) -> None:
    callbacks = (Follow,) if cls is MoCoByCallback else ()
    strategy = {"stages": 2, "microbatches": 1}
    results = try_ranks(fit, 2, cls.__name__, strategy=strategy, devices=2, cls=cls, callbacks=callbacks)
    assert all(isinstance(result, Failed) for result in results)
    text = next(r.text for r in results if isinstance(r, Failed) and "MisconfigurationException" in r.text)
    assert re.search(
        r"\.py:\d+: .*key.*(changes|mixes) .*(on stage 1.* from .*on stage 0|on stage 0.* from .*on stage 1)", text
    )


class Averaging(MoCo):
    """An average that a hook keeps of a copy of the model, each process of what it holds."""

    average: nn.ModuleList

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.contrast(batch)

    def on_train_start(self) -> None:
        vars(self)["average"] = copy.deepcopy(self.query)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mean, parameter in zip(self.average.parameters(), self.query.parameters(), strict=True):
            mean.lerp_(parameter, 0.3)


class Averages(Callback):
    outcome: Outcome

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        means = pl_module.average.named_parameters()  # type: ignore[operator, union-attr]
        self.outcome.extra["means"] = {name: p.detach().clone() for name, p in means if not p.is_meta}


def test_a_hook_may_average_a_copy_of_the_model() -> None:
    options: dict[str, Any] = {"cls": Averaging, "callbacks": (Averages,)}
    (reference,) = run_ranks(fit, 1, "averaging", **options)
    found = run_ranks(fit, 3, "averaging", strategy={"stages": 3, "microbatches": 1}, devices=3, **options)
    assert_same(reference, found)
    means = {name: mean for outcome in found for name, mean in outcome.extra["means"].items()}
    assert means.keys() == reference.extra["means"].keys()
    for name, mean in means.items():
        torch.testing.assert_close(mean, reference.extra["means"][name], atol=1e-9, rtol=0)
