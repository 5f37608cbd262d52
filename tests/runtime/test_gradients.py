"""Gradients between Lightning's hooks, and the sums of tied ones over real processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pp.runtime.gradients import GradientHold
from tests.launch import run_ranks
from tests.runtime.ranks import connect, leave


def lone(*values: float) -> tuple[GradientHold, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.tensor([value, -value])) for value in values]
    return GradientHold(parameters, {}), parameters


def batch(
    hold: GradientHold, parameters: list[nn.Parameter], factor: float, start: bool, keep: bool = False
) -> list[Any]:
    """One batch as Lightning runs it: training_step, zero_grad at a window's start, backward."""
    hold.start(start, keep)
    for parameter in parameters:
        (factor * parameter).sum().backward()
    hold.finish(start)
    seen = [None if p.grad is None else p.grad.tolist() for p in parameters]
    if start:
        for parameter in parameters:
            parameter.grad = None
    hold.hand_over()
    return seen


def grads(parameters: list[nn.Parameter]) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_windows_accumulate() -> None:
    hold, parameters = lone(1.0, 3.0)
    assert batch(hold, parameters, 2, start=True) == [None, None]
    assert grads(parameters) == [[2, 2], [2, 2]]
    assert batch(hold, parameters, 3, start=False) == [[5, 5], [5, 5]]
    assert grads(parameters) == [[5, 5], [5, 5]]
    batch(hold, parameters, 7, start=True)
    assert grads(parameters) == [[7, 7], [7, 7]]


def test_old_gradients_are_there_for_zero_grad_when_asked_for() -> None:
    hold, parameters = lone(1.0)
    batch(hold, parameters, 2, start=True)
    assert batch(hold, parameters, 3, start=True, keep=True) == [[2, 2]]
    assert grads(parameters) == [[3, 3]]
    assert batch(hold, parameters, 4, start=True, keep=False) == [None]


def test_a_zero_grad_that_keeps_gradients_adds_up() -> None:
    hold, parameters = lone(1.0)
    batch(hold, parameters, 2, start=True)
    hold.start(True, True)
    (3 * parameters[0]).sum().backward()
    hold.finish(True)
    hold.hand_over()  # the user's zero_grad did nothing
    assert grads(parameters) == [[5, 5]]


def test_no_second_copy_is_made() -> None:
    hold, parameters = lone(1.0)
    hold.start(True, False)
    (3 * parameters[0]).sum().backward()
    made = parameters[0].grad
    hold.finish(True)
    hold.hand_over()
    assert parameters[0].grad is made
    hold.hand_over()
    assert grads(parameters) == [[3, 3]]


def tied(size: int, case: str) -> Any:
    """Every rank holds its own parameter, then one that all share, then one that the last two share."""
    rank = connect()
    pair = dist.new_group([size - 2, size - 1])
    parameters = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    groups = {1: dist.group.WORLD} | ({2: pair} if rank >= size - 2 else {})
    hold = GradientHold(parameters, groups)
    seen = []
    for number, start in enumerate([True, False, True]):
        hold.start(start, False)
        scale = (rank + 1) * 10**number
        used = {0, 1, 2}
        if (case == "one side" and rank == 0) or case == "no side":
            used = {0}
        elif case == "frozen later" and number == 1:
            parameters[1].requires_grad_(False)
        for index in used:
            if parameters[index].requires_grad:
                (scale * parameters[index]).sum().backward()
        hold.finish(start)
        if start:
            for parameter in parameters:
                parameter.grad = None
        hold.hand_over()
        parameters[1].requires_grad_(True)
        seen.append([None if p.grad is None else p.grad[0].item() for p in parameters])
    leave()
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_tied_gradients_are_summed_once(size: int) -> None:
    """Each rank's share is its number times 1, 10, 100; a window's second batch comes on top of the first."""
    total, last = sum(range(1, size + 1)), size - 1 + size
    for rank, seen in enumerate(run_ranks(tied, size, size, "all")):
        own = rank + 1
        here = last if rank >= size - 2 else own
        assert seen == [[own, total, here], [11 * own, 11 * total, 11 * here], [100 * own, 100 * total, 100 * here]]


def test_a_side_without_a_gradient_adds_nothing() -> None:
    total = 2 + 3
    for rank, seen in enumerate(run_ranks(tied, 3, 3, "one side")):
        own = rank + 1
        third = None if rank == 0 else 5
        assert seen[0] == [own, total, third]
        assert seen[1][1] == 11 * total
        assert seen[2][1] == 100 * total


def test_what_no_side_has_a_gradient_for_gets_none() -> None:
    """As without the pipeline: an optimizer must pass over it, weight decay included."""
    for rank, seen in enumerate(run_ranks(tied, 2, 2, "no side")):
        assert [step[1:] for step in seen] == [[None, None]] * 3
        assert seen[0][0] == rank + 1


def test_a_tied_gradient_survives_a_batch_in_which_it_is_frozen() -> None:
    for seen in run_ranks(tied, 2, 2, "frozen later"):
        assert [step[1] for step in seen] == [3, 3, 300]
