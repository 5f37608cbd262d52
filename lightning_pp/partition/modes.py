"""Modes that are quick to run under: what the dispatch modes of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _modules
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__: list[str] = []

_DEVICE = torch.ops.prim.device.default
#: where torch keeps hooks on all modules (older versions have no function that asks)
_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks on while operators run; nothing is ever compiled under it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to be wrapped against the compiler, which would double what the mode costs for each operator."""
        return False


@contextmanager
def lifted(mode: TorchDispatchMode) -> Iterator[bool]:
    """Take ``mode`` from the stack inside the block.

    Yields:
        Whether it could be taken: it stays where a mode of the user's lies on top of it.
    """
    if _python_dispatch._get_current_dispatch_mode() is not mode:
        yield False
        return
    with _python_dispatch._pop_mode_temporarily():
        yield True


def asks_for_device(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is no operator, but C++ code that wants the device of a fake tensor: half of all that is seen."""
    return func is _DEVICE and isinstance(args[0], FakeTensor)


def is_watched() -> bool:
    """Whether modes of the user's, or hooks on all modules, see what a layer does."""
    return (
        _python_dispatch._get_current_dispatch_mode() is not None
        or overrides._get_current_function_mode() is not None  # type: ignore[no-untyped-call]
        or any(vars(_modules).get(name) for name in _HOOKS)
    )
