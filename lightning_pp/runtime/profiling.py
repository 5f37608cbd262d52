"""Ops by name in torch's profiler: a range ``op 2F3`` around each, and nothing where no profiler runs.

Alone, ``2F3`` would not do: the profiler's tables take names for mangled ones of C++ and undo that, and ``2F3`` is how
C++ writes ``F3``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch._C._autograd import _profiler_enabled  # torch has no public way to ask
from torch.autograd.profiler import record_function

from lightning_pp.runtime.job import Job
from lightning_pp.runtime.program import Task
from lightning_pp.schedule import Kind

__all__: list[str] = []

Handler = Callable[[Job, Task], None]


def is_profiling() -> bool:
    """Whether a profiler of torch runs now."""
    return bool(_profiler_enabled())


def named_ranges(handlers: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
    """Let each handler run in a range that is called after its op."""
    return {kind: partial(_in_range, handler) for kind, handler in handlers.items()}


def _in_range(handler: Handler, job: Job, task: Task) -> None:
    with record_function(f"op {task.op}"):
        handler(job, task)
