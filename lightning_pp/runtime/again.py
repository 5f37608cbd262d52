"""A layer that runs a second time, to compute its activations again, leaves everything as one run would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pp.partition.untouched import state_of

__all__: list[str] = []


def recomputed(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Run the call of a layer so that its activations are dropped, and computed again in the backward pass.

    The second run finds caches and lists among its arguments as they were, and what it adds to them is gone afterwards;
    buffers of the layer (running statistics) have moved once.
    """
    layer = getattr(compute, "__self__", None)  # the switched layer, whose own call this is
    buffers = list(layer.buffers()) if isinstance(layer, nn.Module) else []
    return partial(
        checkpoint, _as_before(compute), use_reentrant=False, context_fn=lambda: (nullcontext(), _unmoved(buffers))
    )


def _as_before(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Put the Python state of the arguments back before every run but the first; not what is written into tensors."""
    first: list[Callable[[], None]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        put_back = state_of((args, kwargs))
        if not first:
            first.append(put_back)
            return compute(*args, **kwargs)
        first[0]()
        try:
            return compute(*args, **kwargs)
        finally:
            put_back()

    return run


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
