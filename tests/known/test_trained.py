"""Modules that other pipelines are known to train wrongly end where the plain run ends."""

from typing import Any

import pytest

from lightning_pp.schedule import SCHEDULES
from tests.known import models
from tests.models import MLP
from tests.training import Table, assert_same

#: the first test of a table runs all of its rows
pytestmark = pytest.mark.timeout(300)

ROWS: dict[str, dict[str, Any]] = {
    name: {"name": name, "cls": getattr(models, name)}
    for name in (
        "Squeezed", "Adapters", "Strided", "AnswersInADict", "Reused", "Recomputed", "RecomputedReentrant",
        "CompiledBlocks",
    )
}  # fmt: skip
ROWS["Squeezed"]["microbatches"] = 64  # of one sample each
ROWS |= {f"Reused, {name}": {**ROWS["Reused"], "strategy": {"schedule": name}} for name in SCHEDULES if name != "1f1b"}


def unequal() -> Any:
    """Validation batches of 3 samples, the last of one: fewer than micro-batches, and not training's."""
    from torch.utils.data import DataLoader

    from tests.models import regression_data

    return DataLoader(regression_data(10), batch_size=3)


ROWS["evaluation in other sizes"] = {"name": "MLP", "cls": MLP, "microbatches": 4, "validation": unequal}
ROWS["evaluation in bf16"] = {**ROWS["evaluation in other sizes"], "trainer": {"precision": "bf16-mixed"}}
for _number in (1, 2, 4, 8):
    ROWS[f"gradients, {_number}"] = {
        "name": "MLP", "cls": models.Descending, "microbatches": _number,
        "trainer": {"accumulate_grad_batches": 3, "max_epochs": 1, "gradient_clip_val": 0.05},
    }  # fmt: skip
TABLE = Table(ROWS)


@pytest.mark.parametrize("name", [name for name in ROWS if "bf16" not in name])
def test_ends_as_without_the_pipeline(name: str) -> None:
    """Weights after clipped and accumulated steps of plain SGD show a gradient that is scaled, summed or faded."""
    assert_same(TABLE.plain(name), TABLE.piped(name, 3))


def test_evaluation_in_low_precision_is_the_same_number_on_every_rank() -> None:
    reference = TABLE.plain("evaluation in bf16").final
    first, *rest = (outcome.final for outcome in TABLE.piped("evaluation in bf16", 3))
    assert first == pytest.approx(reference, abs=2e-2)
    assert all(other == first for other in rest)
