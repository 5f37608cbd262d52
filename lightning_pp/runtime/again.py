"""A layer that runs a second time, to compute its activations again, leaves everything as one run would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pp.partition.untouched import State, reachable

__all__: list[str] = []


def recomputed(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Run the call of a layer so that its activations are dropped, and computed again in the backward pass.

    The second run finds caches and lists among its arguments as they were, and what it adds to them is gone afterwards;
    buffers of the layer (running statistics) have moved once.
    """
    layer = getattr(compute, "__self__", None)  # the switched layer, whose own call this is
    buffers = list(layer.buffers()) if isinstance(layer, nn.Module) else []

    def call(*args: Any, **kwargs: Any) -> Any:
        runs = _AsBefore(compute)
        before = _beside(args, kwargs)
        contexts = nullcontext(), _unmoved(buffers)
        result = checkpoint(runs, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)
        runs.kept = _saved(before | _beside(args, kwargs))
        return result

    return call


class _AsBefore:
    """Puts the Python state of the arguments back before every run but the first; not what is written into tensors.

    Attributes:
        kept: Lives as long as what the checkpoint keeps for the second run.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._first: Callable[[], None] | None = None
        self.kept: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        put_back = State((args, kwargs))
        if self._first is None:
            self._first = put_back
            return self._compute(*args, **kwargs)
        self._first()
        try:
            return self._compute(*args, **kwargs)
        finally:
            put_back()


def _beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
    """The tensors that a checkpoint keeps without saving them for backward: all but the arguments by position."""
    return {
        id(value): value
        for _, value in reachable((args, kwargs))
        if isinstance(value, Tensor) and not any(value is argument for argument in args)
    }


def _saved(tensors: dict[int, Tensor]) -> object:
    """What saves ``tensors`` for a backward that is never run, so that whoever counts what is saved sees them.

    Without their graphs, which may hold what this returns.
    """
    if not tensors or not torch.is_grad_enabled():
        return None
    parts = [tensor.detach() for tensor in tensors.values()]
    return _Saving.apply(torch.empty(0, requires_grad=True), *parts)  # type: ignore[no-untyped-call]


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on it")


@contextmanager
def _unmoved(buffers: list[Tensor]) -> Iterator[None]:
    """Give buffers their values back."""
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
