"""What a step keeps in its module is there, on every rank, for the hooks at the end of the epoch."""

from typing import Any

import pytest
import torch

from lightning_pp.steps.kept import KeptValues
from tests.models import MLP
from tests.training import assert_same, piped, plain


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_hooks_at_the_end_of_an_epoch_see_what_steps_kept(stages: int) -> None:
    """Batches of 8, 8 and 5 in micro-batches of unequal size: a list holds one item per batch, as without them."""
    reference = plain("Keeper", validate=True)
    assert_same(reference, piped("Keeper", stages, 3, validate=True))
    assert reference.final["batches"] == 3
    assert reference.final["val_number"] == 21


def after(append: Any, sizes: list[int | None], weights: list[float]) -> Any:
    """The attribute ``items`` of a module after a step in which ``append(items, mb)`` ran once per micro-batch."""
    module = MLP()
    module.items = [torch.tensor(0.5)]  # type: ignore[assignment]
    kept = KeptValues(module, is_last=True)
    with kept.recording(sizes, weights):
        for mb in range(len(sizes)):
            kept.mb = mb
            append(module, mb)
    assert type(module.items) is list
    return module.items


def test_what_is_joined_and_what_is_not() -> None:
    sizes: list[int | None] = [2, 1]
    weights = [2 / 3, 1 / 3]
    loss = torch.tensor([3.0, 6.0])

    def items(append: Any) -> list[Any]:
        return after(lambda module, mb: append(module.items, mb), sizes, weights)[1:]

    assert items(lambda kept, mb: kept.append(loss[mb])) == [4.0]
    assert items(lambda kept, mb: kept.append(float(loss[mb]))) == [pytest.approx(4.0)]
    rows = items(lambda kept, mb: kept.append(torch.full((sizes[mb], 2), float(mb))))
    assert [row.shape for row in rows] == [(3, 2)]
    assert items(lambda kept, mb: kept.append(torch.tensor(mb))) == [0, 1], "a count per micro-batch adds up as it is"
    assert items(lambda kept, mb: kept.append("name")) == ["name", "name"]
    assert items(lambda kept, mb: kept.extend([1.0, 2.0])) == [1.0, 2.0, 1.0, 2.0]
    assert items(lambda kept, mb: kept.append(loss[mb]) if mb else None) == [6.0]
    assert items(lambda kept, mb: (kept.append(loss[mb]), kept.append(-loss[mb]))) == [4.0, -4.0]
    assert after(lambda module, mb: setattr(module, "items", [mb]), sizes, weights) == [1]
