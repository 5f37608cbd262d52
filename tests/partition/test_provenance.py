"""Glue is followed through every operator."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_pp.partition import operators
from lightning_pp.partition.provenance import Provenance, user_line

A, B = (0, 0), (1, 0)


@pytest.fixture
def provenance():
    return Provenance()


@pytest.fixture
def a(provenance):
    tensor = torch.rand(3, 4)
    provenance.add_output(tensor, A)
    return tensor


@pytest.fixture
def b(provenance):
    tensor = torch.rand(3, 4)
    provenance.add_output(tensor, B)
    return tensor


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a + 1,
        lambda a: a.view(4, 3)[1:].T,
        lambda a: a.detach().clone(),
        lambda a: torch.cat([torch.ones(1, 4), a]),
        lambda a: torch.zeros(3, 4).add_(a),
        lambda a: torch.zeros(3, 4).index_put_((torch.tensor([0]),), a[:1]),
        lambda a: torch.add(a, 1, out=torch.empty(3, 4)),
        lambda a: a[torch.tensor([2, 0])],
        lambda a: F.one_hot((a > 0).long()),
        lambda a: torch.where(a > 0, 1.0, 2.0),
        lambda a: list(a.unbind())[1],
        lambda a: a.sort()[1],
    ],
)
def test_results_come_from_inputs(provenance, a, function):
    with provenance:
        assert provenance.of(function(a)) == {A}
    assert provenance.tail == {A}


def test_sources_are_joined(provenance, a, b):
    with provenance:
        assert provenance.of(torch.stack([a, b]).sum()) == {A, B}
        assert provenance.of(torch.ones(2)) == frozenset()


def test_a_view_written_into_changes_its_base(provenance, a, b):
    with provenance:
        a[0].copy_(b[0])
    assert provenance.of(a) == {A, B}
    assert provenance.written == {A}


@pytest.mark.parametrize(
    "function",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.rand_like,
        lambda a: torch.full_like(a, 2),
        lambda a: a.new_zeros(3),
        lambda a: a.new_ones(3),
        lambda a: a.new_full((3,), 1.0),
        lambda a: a.new_empty(2),
    ],
)
def test_shape_and_dtype_are_no_source(provenance, a, function):
    weight = torch.rand(2)
    provenance.add_parameter(weight, "weight", is_buffer=False)
    with provenance:
        assert provenance.of(function(a)) == frozenset()
        assert provenance.of(function(weight)) == frozenset()
    assert provenance.touched == {"weight"}


@pytest.mark.parametrize(
    "read",
    [
        lambda a: a[0, 0].item(),
        lambda a: bool(a.sum() > 0),
        lambda a: float(a.sum()),
        lambda a: int(a.sum()),
        lambda a: a[a > 0.5],
        lambda a: torch.ones(3, 4)[a > 0.5],
        lambda a: torch.masked_select(torch.ones(3, 4), a > 0.5),
        lambda a: a.nonzero(),
        lambda a: a.unique(),
        lambda a: torch.equal(a, a),
        lambda a: torch.allclose(a, a),
        lambda a: a.tolist(),
        lambda a: a.numpy(),
        lambda a: a.detach().cpu().numpy(),
        lambda a: f"{a[0, 0]:.3f}",
        lambda a: print(a, end=""),
    ],
)
def test_values_that_python_sees(provenance, a, read):
    with provenance, provenance.seeing_conversions():
        read(a)
    assert provenance.reads
    assert all(found.num_calls == 0 and found.sources == {A} for found in provenance.reads)
    assert provenance.tail == {A}


@pytest.mark.parametrize(
    "look",
    [
        lambda a: a[torch.arange(3), torch.tensor([0, 1, 2])],
        lambda a: a[torch.ones(3, dtype=torch.bool)],
        lambda a: a.masked_select(torch.ones(3, 4, dtype=torch.bool)),
        lambda a: a.shape,
        lambda a: len(a),
        lambda a: a.dtype,
        lambda a: a.is_floating_point(),
        lambda a: torch.ones(3).sum().item(),
        lambda a: torch.ones(3).tolist(),
    ],
)
def test_what_python_may_see(provenance, a, look):
    with provenance, provenance.seeing_conversions():
        look(a)
    assert provenance.reads == []


def test_conversions_are_torchs_own_again(provenance):
    with provenance.seeing_conversions():
        assert "numpy" in vars(torch.Tensor)
    assert not {"numpy", "tolist"} & set(vars(torch.Tensor))


def test_the_line_is_the_users():
    assert "test_provenance.py" in user_line()
    assert "assert" in user_line()


def test_written_tensors_get_their_values_back(provenance):
    before = torch.arange(4.0)
    with provenance:
        before[1:].mul_(3)
        before += 1
        fresh = torch.zeros(2)
        fresh += 1
    provenance.undo_writes()
    assert before.tolist() == [0, 1, 2, 3]
    assert fresh.tolist() == [1, 1]


def test_paused_sees_nothing(provenance, a):
    with provenance, provenance.paused():
        (a + 1).sum().item()
    assert provenance.reads == []
    assert provenance.tail == frozenset()


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda: torch.rand(2), True),
        (lambda: torch.ones(2).bernoulli(), True),
        (lambda: F.dropout(torch.ones(2), 0.5), True),
        (lambda: torch.randperm(3), True),
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout_p=0.5), True),
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout_p=0.0), False),
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3), False),
        (lambda: F.dropout(torch.ones(2), 0.5, training=False), False),
        (lambda: torch.rand(2, generator=torch.Generator()), False),
        (lambda: torch.ones(2).exp(), False),
    ],
)
def test_draws(function, draws):
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        seen = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen |= operators.draws_random(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        function()
    assert watch.seen is draws
