"""Cutting, weighing, recognising and joining, for every sort of batch."""

import math
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_pp.runtime.microbatch import batch_size, checksum, join, signature, split, weighted_mean

Pair = namedtuple("Pair", "x y")
CPU = torch.device("cpu")


@dataclass
class Record:
    x: Tensor
    y: Any = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Encoding(UserDict):
    """As the tokenizers' result: a mapping that is no dict."""


def x(rows: int = 7) -> Tensor:
    return torch.arange(rows * 2.0).reshape(rows, 2)


BATCHES: dict[str, Any] = {
    "tensor": x(),
    "tuple": (x(), torch.arange(7)),
    "list": [x(), torch.arange(7)],
    "dict": {"x": x(), "y": torch.arange(7)},
    "nested": {"a": [x(), {"b": (torch.arange(7), None)}], "c": "text"},
    "namedtuple": Pair(x(), torch.arange(7)),
    "dataclass": Record(x(), torch.arange(7), ["p", "q"]),
    "frozen dataclass": Frozen(x()),
    "mapping": Encoding({"x": x(), "y": torch.arange(7)}),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("number", "sizes"), [(1, [7]), (3, [3, 2, 2]), (7, [1] * 7), (64, [1] * 7)])
def test_containers_keep_their_type_and_all_samples(name: str, number: int, sizes: list[int]) -> None:
    batch = BATCHES[name]
    parts = split(batch, number)
    assert [batch_size(part) for part in parts] == sizes
    assert {type(part) for part in parts} == {type(batch)}
    assert_same(join(parts, sizes, [size / 7 for size in sizes]), batch)
    assert batch_size(batch) == 7


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, (dict, UserDict)):
        assert list(ours) == list(theirs)
        [assert_same(ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, (list, tuple)):
        [assert_same(one, other) for one, other in zip(ours, theirs, strict=True)]
    elif isinstance(theirs, (Record, Frozen)):
        assert_same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def test_what_is_not_one_row_per_sample_is_in_every_part() -> None:
    batch = {
        "x": x(5), "positions": torch.arange(3), "scale": torch.tensor(2.0), "names": list("abcde"), "none": None,
        "flag": True, "object": object(),
    }  # fmt: skip
    parts = split(batch, 2)
    assert [part["x"].shape[0] for part in parts] == [3, 2]
    for part in parts:
        for key in ("positions", "scale", "none", "flag", "object"):
            assert part[key] is batch[key]
        assert part["names"] == batch["names"]


@pytest.mark.parametrize("batch", [None, "text", {"a": 3}, torch.tensor(1.0), [], torch.zeros(0, 3)])
def test_a_batch_without_samples_is_one_part(batch: Any) -> None:
    assert split(batch, 4) == [batch] or split(batch, 4)[0] is batch


def test_the_size_that_most_tensors_have_counts() -> None:
    assert batch_size([torch.zeros(3), torch.zeros(8, 2), torch.zeros(8)]) == 8
    assert batch_size([torch.zeros(3), torch.zeros(8, 2)]) == 8  # on a tie, the first with two dims
    assert batch_size([torch.zeros(3), torch.zeros(8)]) == 3
    assert batch_size(["a", torch.tensor(1)]) is None


@given(st.integers(1, 40), st.integers(1, 40))
def test_sizes_differ_by_at_most_one(rows: int, number: int) -> None:
    sizes = [len(part) for part in split(torch.zeros(rows), number)]
    assert len(sizes) == min(rows, number)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


# --- signatures ---

DIFFERENT: list[tuple[Any, Any]] = [
    (x(3), x(4)),
    (x(3), x(3).double()),
    ({"a": x(3)}, {"b": x(3)}),
    (Encoding(a=x(3)), Encoding(b=x(3))),
    (Encoding(a=x(3)), {"a": x(3)}),
    ([x(3)], (x(3),)),
    ({"x": x(3), "flag": True}, {"x": x(3), "flag": False}),
    ({"x": x(3), "n": True}, {"x": x(3), "n": 1}),
    ({"x": x(3), "n": 1}, {"x": x(3), "n": 1.0}),
    ({"x": x(3), "task": "a"}, {"x": x(3), "task": "b"}),
    (Record(x(3)), Record(x(3), y=torch.zeros(3))),
    ({"x": x(2), "targets": [x(2), x(4)]}, {"x": x(2), "targets": [x(2), x(5)]}),
    ({"x": x(2), "targets": [{"b": x(2)}, {"b": x(4)}]}, {"x": x(2), "targets": [{"b": x(2)}, {"b": x(5)}]}),
]
ALIKE: list[tuple[Any, Any]] = [
    (x(3), x(3) + 1),
    ({"x": x(3), "names": ["a", "b", "c"]}, {"x": x(3), "names": ["d", "e", "f"]}),
    ({"x": x(3), "ids": (1, 2, 3)}, {"x": x(3), "ids": (4, 5, 6)}),
    (Record(x(3), tags=["a", "b", "c"]), Record(x(3), tags=["d", "e", "f"])),
    ({"x": x(3), "n": math.nan}, {"x": x(3), "n": math.nan}),
    ({"x": x(3), "object": object()}, {"x": x(3), "object": object()}),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_different_signatures(pair: tuple[Any, Any]) -> None:
    assert signature(pair[0]) != signature(pair[1])


@pytest.mark.parametrize("pair", ALIKE, ids=range(len(ALIKE)))
def test_equal_signatures(pair: tuple[Any, Any]) -> None:
    one, other = map(signature, pair)
    assert one == other
    assert hash(one) == hash(other)


# --- checksums ---


def test_checksum_sees_values_order_and_place() -> None:
    base = checksum((x(4), x(4) + 1), CPU)
    assert base.dtype is torch.float64
    assert base.shape == ()
    assert checksum((x(4).clone(), x(4) + 1), CPU) == base
    assert checksum((x(4)[[1, 0, 2, 3]], x(4) + 1), CPU) != base
    assert checksum((x(4) + 1, x(4)), CPU) != base
    assert checksum((x(4), x(4) + 1.001), CPU) != base


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([True, False]), torch.arange(3), torch.tensor(3), torch.ones(2, 2, dtype=torch.bfloat16)],
)
def test_checksum_of_any_dtype(tensor: Tensor) -> None:
    assert checksum(tensor, CPU) != 0


def test_checksum_passes_over_what_it_cannot_sum() -> None:
    odd = [torch.zeros(0, 3), torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse(), "text", None]
    assert checksum(odd, CPU) == 0
    assert checksum([torch.tensor([1.0, math.nan])], CPU) == checksum([torch.tensor([1.0, math.nan])], CPU) == 1


def test_checksum_sees_into_objects_and_arrays() -> None:
    for make in (lambda a: {"graphs": _Opaque(3, a)}, lambda a: [np.full((2, 3), a)], lambda a: np.arange(70_001) * a):
        assert checksum(make(1.0), CPU) == checksum(make(1.0), CPU) != 0
        assert checksum(make(1.0), CPU) != checksum(make(2.0), CPU)
    assert checksum([np.array(["text"]), np.zeros((0, 2))], CPU) == 0


def test_checksum_sees_plain_numbers_beside_tensors_of_any_size() -> None:
    for tensor in (torch.zeros(2), torch.full((4, 100), 50_000)):
        found = [float(checksum((tensor, number), CPU)) for number in (True, False, 2, 3, 2.5, math.nan)]
        found.append(float(checksum((tensor, [2, 3]), CPU)))
        size = max(1.0, *map(abs, found))
        assert all(abs(a - b) > 1e-4 * size for i, a in enumerate(found) for b in found[:i]), found
    assert checksum((torch.ones(2), "a path"), CPU) == checksum((torch.ones(2), "another"), CPU)


# --- joining ---

WEIGHTS = [0.5, 0.25, 0.25]


def test_rows_are_joined_and_numbers_averaged() -> None:
    outputs = [
        {"rows": x(2), "names": ["a", "b"], "loss": torch.tensor(1.0), "score": 2.0, "n": 1, "kind": "p", "none": None},
        {"rows": x(1), "names": ["c"], "loss": torch.tensor(3.0), "score": 4.0, "n": 2, "kind": "q", "none": None},
        {"rows": x(1), "names": ["d"], "loss": torch.tensor(5.0), "score": 8.0, "n": 3, "kind": "r", "none": None},
    ]
    joined = join(outputs, [2, 1, 1], WEIGHTS)
    assert torch.equal(joined.pop("rows"), torch.cat([x(2), x(1), x(1)]))
    assert joined.pop("loss") == torch.tensor(2.5)
    assert joined == {"names": ["a", "b", "c", "d"], "score": 4.0, "n": 3, "kind": "r", "none": None}


def test_lists_of_one_item_per_sample() -> None:
    boxes = [[{"boxes": x(3)}, {"boxes": x(1)}], [{"boxes": x(5)}]]
    joined = join(boxes, [2, 1], [2 / 3, 1 / 3])
    assert [item["boxes"].shape[0] for item in joined] == [3, 1, 5]
    assert join([["a", "b"], ["c", "d"]], [2, 2], [0.5, 0.5]) == ["a", "b", "c", "d"]
    assert join([Record(x(2), tags=["a", "b"]), Record(x(1), tags=["c"])], [2, 1], [0.5, 0.5]).tags == ["a", "b", "c"]


def test_results_that_stand_side_by_side_are_not_samples() -> None:
    parts = [[x(2), x(2) + 1], [x(2), x(2) + 1]]
    joined = join(parts, [2, 2], [0.5, 0.5])
    assert [tuple(item.shape) for item in joined] == [(4, 2), (4, 2)]
    assert join([(0.5, 1.5), (1.5, 2.5)], [2, 2], [0.5, 0.5]) == (1.0, 2.0)


def test_what_has_no_common_structure_is_the_last() -> None:
    assert join([{"a": 1.0}, {"b": 2.0}], [1, 1], [0.5, 0.5]) == {"b": 2.0}
    assert join([[1, 2, 3], [4]], [2, 2], [0.5, 0.5]) == [4]
    assert join([None, 2.0], [1, 1], [0.5, 0.5]) == 2.0
    assert join(["only"], [3], [1.0]) == "only"


def test_weighted_mean_keeps_dtype_and_shape() -> None:
    assert weighted_mean([torch.tensor(1.0), torch.tensor(5.0)], [0.75, 0.25]) == torch.tensor(2.0)
    one_element = weighted_mean([torch.tensor([1.0]), torch.tensor([5.0])], [0.75, 0.25])
    assert torch.equal(one_element, torch.tensor([2.0]))
    half = weighted_mean([torch.tensor(1, dtype=torch.bfloat16)] * 3, [1 / 3] * 3)
    assert half == 1
    assert half.dtype is torch.bfloat16


class _Opaque:
    """A batch class that nobody has registered anywhere."""

    def __init__(self, size: int, value: float = 0.0) -> None:
        self.inner = _Slotted(torch.full((size, 2), value))
        self.me = self


class _Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_objects_are_told_apart_by_the_shapes_that_they_hold() -> None:
    from lightning_pp.runtime.microbatch import signature

    assert signature(_Opaque(2)) == signature(_Opaque(2))
    assert signature(_Opaque(2)) != signature(_Opaque(3))
    assert signature({"graphs": _Opaque(2)}) != signature({"graphs": _Opaque(3)})
    assert signature(np.zeros(3)) == signature(np.ones(3)) != signature(np.zeros(2))
    assert signature(np.zeros(3)) != signature(np.zeros(3, dtype=int))
