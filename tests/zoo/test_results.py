"""The comparison that the zoo rests on notices everything that may differ."""

import re
from dataclasses import replace

import pytest
import torch

from tests.zoo.results import differs, unlike
from tests.zoo.running import Seen

PLAIN = Seen(
    losses=[3.0, 2.0],
    logged={"loss": 2.0},
    state={"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3), "c": torch.ones(0)},
)
PARTS = [
    replace(PLAIN, state={"a": PLAIN.state["a"], "c": PLAIN.state["c"]}),
    replace(PLAIN, state={"a": PLAIN.state["a"], "b": PLAIN.state["b"]}),
]


def test_equal_runs_are_equal() -> None:
    assert differs(PLAIN, PARTS, 1e-9) == ""
    assert differs(PLAIN, [replace(part, losses=[2.0]) for part in PARTS], 1e-9) == ""  # resumed
    assert unlike(PLAIN.state, PLAIN.state, 1e-9) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"losses": [3.0, 2.1]}, "the loss is 2.1 on rank 1 instead of 2.0"),
        ({"losses": [3.0, float("nan")]}, "the loss is nan on rank 1"),
        ({"losses": []}, "0 losses on rank 1 instead of 2"),
        ({"logged": {}}, r"logged \[\] on rank 1 instead of \['loss'\]"),
        ({"logged": {"loss": 2.1}}, "the loss is 2.1"),
        ({"state": {"a": torch.tensor([1.0, 2.1]), "b": torch.tensor(3)}}, "copies of a differ"),
        ({"state": {"b": torch.tensor(4)}}, r"b differs by 1.0e\+00"),
        ({"state": {"b": torch.tensor(float("nan"))}}, "b differs by nan"),
        ({"state": {}}, r"only one has \['b'\]"),
    ],
)
def test_a_difference_is_told(change: dict[str, object], text: str) -> None:
    found = differs(PLAIN, [PARTS[0], replace(PARTS[1], **change)], 1e-9)
    assert re.match(text, found), found


def test_a_failure_of_the_plain_run_is_told() -> None:
    assert differs(replace(PLAIN, error="it failed"), PARTS, 1e-9) == "it failed"
