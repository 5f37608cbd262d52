"""Random streams that do not depend on how a model is cut.

Glue draws from one stream per micro-batch, the same on all stages. A layer that draws gets a stream of its own for each
call, seeded with one number that every stage takes from the glue's stream at that call, whether it runs the layer or
not. So masks are independent, noise drawn in ``training_step`` agrees between stages, and a gradient checkpoint, which
restores the glue's stream before it calls the layer again, draws the same masks again.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

#: where numbers come from: the state of a device's default generator, or a seed; None for the stream as it is
Draw = Tensor | int | None


def stream_seed(*numbers: int) -> int:
    """A 63-bit seed from any integers (base seed, step, micro-batch, replica)."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def run_seed() -> int:
    """The seed that the user has given, or that this process started with."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))


def start_stream(seed: int, python_too: bool) -> None:
    """Begin the stream of one micro-batch's glue."""
    torch.manual_seed(seed)
    if python_too:
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)


def layer_seed() -> int:
    """Take the seed of the next layer call from the glue's stream (on the host, whatever the device)."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def seeded(seed: int, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``compute`` on a stream of its own and go back to the current one."""
    state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if _uses_cuda() else None
    torch.manual_seed(seed)
    try:
        return compute(*args, **kwargs)
    finally:
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)


@contextmanager
def drawing_from(draw: Draw, device: torch.device) -> Iterator[None]:
    """Let ``device``'s default generator draw from ``draw`` inside the block, and go on as before afterwards."""
    if draw is None:
        yield
        return
    before = default_state(device)
    if isinstance(draw, int):
        generator = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
        generator.manual_seed(draw)
    else:
        set_default_state(draw, device)
    try:
        yield
    finally:
        set_default_state(before, device)


def default_state(device: torch.device) -> Tensor:
    """The state of ``device``'s default generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_default_state(state: Tensor, device: torch.device) -> None:
    """Set the state of ``device``'s default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
