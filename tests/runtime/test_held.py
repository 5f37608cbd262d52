"""Bytes held for backward: each storage once, from when it is saved until nothing holds it."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_pp.runtime.held import HeldBytes

CPU = torch.device("cpu")
ROW = 5 * 3 * 8


def weight() -> Tensor:
    return torch.eye(3, dtype=torch.float64, requires_grad=True)


def rows() -> Tensor:
    return torch.ones(5, 3, dtype=torch.float64)


def test_each_storage_counts_once_and_goes_with_the_backward() -> None:
    w, x = weight(), rows()
    held = HeldBytes([w], CPU)
    loss = held.watched(lambda: (x @ w).tanh().view(15).exp().sum())
    # x for the weight's gradient, the tanh's result, the exp's; the weight does not count
    assert held.now == held.peak == 3 * ROW
    other = held.watched(lambda: (x @ w).tanh().sum())
    assert held.now == 4 * ROW  # x is held already
    loss.backward()
    assert held.now == 2 * ROW
    del other
    assert held.now == 0
    assert held.peak == 4 * ROW


def test_what_is_there_anyway_does_not_count() -> None:
    w, x = weight(), rows()
    held = HeldBytes([w, x], CPU)
    loss = held.watched(lambda: (x[1:] @ w).sum())
    assert held.peak == 0
    loss.backward()


def test_what_was_received_counts_while_it_is_kept() -> None:
    held = HeldBytes([], CPU)
    x = rows()
    held.watched(lambda: None)
    keep = held.keep(3, [x, x.view(15), torch.ones(2)])
    assert held.now == ROW + 2 * 4
    assert held.growth == {3: ROW + 2 * 4}
    del keep
    assert held.now == 0


def test_what_nobody_needs_any_more_is_let_go_before_the_backward() -> None:
    w, x = weight(), rows()
    held = HeldBytes([w, x], CPU)

    def step() -> Tensor:
        (x @ w).exp().sum()
        return (x @ w).tanh().sum()

    held.watched(step).backward()
    assert held.peak == ROW


def test_a_checkpoint_inside_keeps_its_inputs_alone() -> None:
    def block(x: Tensor) -> Tensor:
        return (x @ w).tanh().exp()

    w, x = weight(), rows()
    held = HeldBytes([w], CPU)
    loss = held.watched(lambda: checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False).sum())
    assert held.now == 2 * ROW  # x and the first block's result
    loss.backward()
    assert held.now == 0
    assert held.peak == 2 * ROW
    found, w = w.grad, weight()
    block(block(x)).sum().backward()
    assert torch.equal(found, w.grad)  # type: ignore[arg-type]


def test_hooks_inside_of_the_step_do_their_work() -> None:
    w, x = weight(), rows()
    held = HeldBytes([w], CPU)
    packed = []

    def step() -> Tensor:
        with saved_tensors_hooks(lambda tensor: packed.append(tensor) or 2 * tensor, lambda double: double / 2):
            inner = (x @ w).tanh()
        return inner.exp().sum()

    held.watched(step).backward()
    assert len(packed) == 2  # of a weight whose input needs no gradient nothing is saved
    assert held.peak == ROW


def test_hooks_around_the_step_go_before() -> None:
    w, x = weight(), rows()
    for surrounding in (save_on_cpu(), disable_saved_tensors_hooks("not here")):
        held = HeldBytes([w], CPU)
        assert not held.is_blind
        with surrounding:
            held.watched(lambda: (x @ w).tanh().sum()).backward()
        assert held.is_blind
        assert held.peak == 0
    held = HeldBytes([w], CPU)
    held.watched(lambda: (x @ w).sum())
    assert not held.is_blind


def test_a_write_into_what_is_saved_is_found_as_without() -> None:
    w, x = weight(), rows()
    held = HeldBytes([w], CPU)

    def step() -> Tensor:
        y = (x @ w).tanh()
        y.add_(1)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.watched(step).backward()


def test_gradients_of_gradients_are_those_without() -> None:
    def step() -> Tensor:
        y = ((x @ w).tanh() ** 3).sum()
        (slope,) = torch.autograd.grad(y, [w], create_graph=True)
        return (slope**2).sum() + y

    found = []
    for watched in (False, True):
        w, x = (0.5 * weight()).detach().requires_grad_(), rows()
        held = HeldBytes([w, x], CPU)
        (held.watched(step) if watched else step()).backward()
        found.append(w.grad)
        assert held.now == 0
    assert torch.equal(*found)  # type: ignore[arg-type]
    assert held.peak > 0


def test_what_cannot_be_watched_is_named() -> None:
    held = HeldBytes([], CPU)
    with pytest.raises(RuntimeError, match="Train without ActivationMemoryMonitor"):
        held.watched(lambda: torch.func.grad(lambda x: x.sum())(rows()))
    with pytest.raises(RuntimeError, match="the step's own"):
        held.watched(_fails)


def _fails() -> None:
    raise RuntimeError("the step's own")
