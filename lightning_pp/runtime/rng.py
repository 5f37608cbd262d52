"""Random streams that do not depend on how a model is cut.

Glue draws from one stream per micro-batch, the same on all stages. A layer that draws gets a stream of its own for each
call, seeded with one number that every stage takes from the glue's stream at that call, whether it runs the layer or
not. So masks are independent, noise drawn in ``training_step`` agrees between stages, and a gradient checkpoint, which
restores the glue's stream before it calls the layer again, draws the same masks again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import torch

__all__: list[str] = []


def stream_seed(*numbers: int) -> int:
    """A 63-bit seed from any integers (base seed, step, micro-batch, replica)."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


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


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
