"""Trees: tensors out, structure kept, everything back in its own type."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_pp.partition import tree
from lightning_pp.partition.trace import Argument

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Data:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


ONE, TWO = torch.ones(1), torch.full((2,), 2.0)
VALUES = [
    ONE,
    None,
    3,
    "text",
    [ONE, TWO],
    (ONE, None),
    (),
    {},
    {"a": ONE, "b": {"c": [TWO]}},
    Pair(ONE, Pair(TWO, 5)),
    OrderedDict(b=ONE, a=TWO),
    defaultdict(list, a=[ONE]),
    UserDict(a=ONE, b=[TWO]),
    Data(ONE, {"deep": Data(TWO)}),
    [Data(Pair(ONE, UserDict(a=Frozen(TWO))))],
    Frozen(ONE),
    Slotted([ONE]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_flatten_and_back(value):
    tensors, structure = tree.flatten(value)
    assert not tree.tensors_of(structure)
    rebuilt = tree.unflatten(tensors, structure)
    assert type(rebuilt) is type(value)
    assert str(rebuilt) == str(value)
    assert all(a is b for a, b in zip(tree.tensors_of(rebuilt), tree.tensors_of(value), strict=True))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_leaves_come_in_the_order_of_flatten(value):
    seen = []
    tree.map_leaves(seen.append, value)
    assert all(a is b for a, b in zip(tree.leaves(value), seen, strict=True))


def test_containers_are_new_and_the_old_ones_untouched():
    value = {"list": [ONE], "data": Data(ONE)}
    doubled = tree.map_leaves(lambda leaf: leaf * 2, {"list": [ONE], "data": Data(ONE, 0)})
    assert doubled["data"].x.item() == 2
    again = tree.map_leaves(lambda leaf: leaf, value)
    assert again is not value
    assert again["list"] is not value["list"]
    assert again["data"] is not value["data"]
    assert value["data"].x is ONE


def test_read_only_mapping_becomes_a_dict():
    value = MappingProxyType({"a": ONE})
    assert tree.tensors_of(value) == [ONE]
    assert tree.map_leaves(lambda leaf: leaf, value) == {"a": ONE}


def test_classes_markers_and_sizes_are_leaves():
    assert tree.leaves([Data, Argument(0, True), tree.Slot(1)]) == [Data, Argument(0, True), tree.Slot(1)]
    assert tree.is_leaf(3)
    assert not tree.is_leaf([3])
    assert not tree.is_leaf(Data(3))


def test_packed_sequences_keep_their_type():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    tensors, structure = tree.flatten(packed)
    assert len(tensors) == 2
    assert type(tree.unflatten(tensors, structure)) is type(packed)
