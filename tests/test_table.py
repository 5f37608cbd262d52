"""A row of a table that fails, or whose process dies, fails alone: the rows before and after it keep their results."""

import os
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.models import MLP
from tests.training import Outcome, Table, assert_same


class RaisesOnOne(Callback):
    outcome: Outcome

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            raise ValueError("planted")


class Dies(Callback):
    outcome: Outcome

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            os._exit(3)


class Other(MLP):
    pass


ROWS = Table(
    {
        "first": {"name": "MLP"},
        "raises": {"name": "MLP", "callbacks": (RaisesOnOne,)},
        "between": {"name": "MLP", "seed": 7},
        "dies": {"name": "MLP", "callbacks": (Dies,)},
        "last": {"name": "MLP", "cls": Other},
    }
)


@pytest.mark.parametrize("key", ["first", "between", "last"])
def test_rows_beside_those_that_fail(key: str) -> None:
    assert_same(ROWS.plain(key), ROWS.piped(key, 2))


@pytest.mark.parametrize(("key", "text"), [("raises", "ValueError: planted"), ("dies", "died with exit code 3")])
def test_rows_that_fail(key: str, text: str) -> None:
    with pytest.raises(AssertionError, match=f"row '{key}' failed") as plain:
        ROWS.plain(key)
    with pytest.raises(AssertionError, match=f"row '{key}' failed") as piped:
        ROWS.piped(key, 2)
    assert text in str(plain.value)
    assert text in str(piped.value)
