"""The global random states of torch, Python and numpy as one value that can be compared, kept and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

__all__: list[str] = []

#: torch's host generator, the current CUDA device's (None before CUDA is used), Python's, numpy's
RandomState = tuple[Tensor, Tensor | None, Any, Any]


def capture() -> RandomState:
    """The states as they are now."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.get_rng_state() if is_used else None
    return torch.get_rng_state(), device, *capture_python()


def capture_python() -> tuple[Any, Any]:
    """Python's and numpy's states, comparable with ``==``."""
    state: Any = numpy.random.get_state()
    name, keys, *rest = state
    return random.getstate(), (name, keys.tobytes(), *rest)


def restore(state: RandomState, host_only: bool = False) -> None:
    """Go back to ``state``; ``host_only`` leaves the device's generator alone."""
    torch.set_rng_state(state[0])
    if state[1] is not None and not host_only:
        torch.cuda.set_rng_state(state[1])
    random.setstate(state[2])
    name, keys, *rest = state[3]
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextmanager
def preserved(active: bool = True) -> Iterator[None]:
    """Restore the states after the block, if ``active``."""
    if not active:
        yield
        return
    state = capture()
    try:
        yield
    finally:
        restore(state)
