"""Puts a tensor with other memory in the place of a parameter or buffer, everywhere where it is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.weights.absent import AbsentTensor, attributes_of, kind_of

__all__: list[str] = []


def exchange(
    model: nn.Module, optimizers: Iterable[Optimizer], replacement: Callable[[str, Tensor], Tensor | None]
) -> None:
    """Give parameters and buffers other values, another device, or both.

    A tensor stays the object that it is, so that a list of parameters that the user keeps goes on to hold them. Where
    something holds a weak reference to it, torch cannot do that; then another object takes its place in the module and
    in the optimizers, and what gives up its memory does so whoever holds it.

    Args:
        model: Whose tensors.
        optimizers: Of the model.
        replacement: Gives the new tensor for a name and the present one, or None to leave it.
    """
    others: dict[int, Tensor] = {}
    with _without_weak_references(model):
        for name, tensor in list(named_tensors(model)):
            new = replacement(name, tensor)
            if new is not None:
                new = _dressed(new, tensor)
                try:
                    swap(tensor, new)
                except RuntimeError:
                    others[id(tensor)] = new
                    if new.is_meta:
                        tensor.data = tensor.data.new_empty(0)
    if others:
        _put(model, optimizers, others)


def _put(model: nn.Module, optimizers: Iterable[Optimizer], others: dict[int, Tensor]) -> None:
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if id(parameter) in others:
                setattr(module, key, others[id(parameter)])
        module._buffers.update({k: others[id(b)] for k, b in module._buffers.items() if id(b) in others})
    for optimizer in optimizers:
        _hand_over(optimizer, others)


def swap(tensor: Tensor, new: Tensor) -> None:
    """Let ``tensor`` become ``new``, and the other way round.

    Raises:
        RuntimeError: There is a weak reference to ``tensor``.
    """
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def named_tensors(model: nn.Module, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of ``model``; a shared one once, or under each of its names."""
    yield from model.named_parameters(remove_duplicate=not every_name)
    yield from model.named_buffers(remove_duplicate=not every_name)


@contextmanager
def _without_weak_references(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers look away: they refer to their weights in a second, weak way, as ``Module.to`` knows too."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


def _dressed(new: Tensor, old: Tensor) -> Tensor:
    """``new`` as the kind of tensor that ``old`` is, with its attributes and hooks."""
    new = new.detach()
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
            new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    else:
        new.requires_grad_(old.requires_grad)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)  # type: ignore[no-untyped-call]
    new.__dict__.update(attributes_of(old))
    if not isinstance(new, AbsentTensor) and type(new) is not kind_of(old):
        new.__class__ = kind_of(old)
    return new


def _hand_over(optimizer: Optimizer, others: dict[int, Tensor]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in others and parameter in optimizer.state:
                optimizer.state[others[id(parameter)]] = optimizer.state.pop(parameter)
        group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]
