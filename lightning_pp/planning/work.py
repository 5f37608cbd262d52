"""What has to be done for one micro-batch, and what it takes, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pp.partition.calls import Trace
from lightning_pp.planning.timing import Passes

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer.

    Attributes:
        name: Its name.
        elements: Number of parameters; 0 for a buffer.
        weight: Bytes.
        gradient: Bytes of its gradient.
        state: Bytes of its optimizer state.
        places: The layer calls that need it, and the number of calls for the end of the step; empty: all stages.
    """

    name: str
    elements: int
    weight: int
    gradient: int
    state: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A step on one micro-batch, the largest one.

    Attributes:
        trace: Its layer calls.
        costs: By which the stages are balanced.
        forward: FLOPs of each call's forward.
        backward: FLOPs of each call's backward, and of a second forward where activations are recomputed.
        saved: By place, ``{storage: bytes}`` saved for backward: in the code before call p and in the call; the last
            place is the end of the step.
        recomputed: Bytes that each call saves for its backward only when that begins, and drops with its end.
        outputs: The storage of each layer output ``(call, leaf)``.
        returned: Those layer outputs for which a gradient comes back.
        passes: Seconds of each call, a second forward counted as backward; None where nothing was timed.
        held: Parameters and buffers.
        num_microbatches: Micro-batches that the batch gives.
        mean_size: Size of the mean micro-batch, as a part of the largest one's.
        batch_size: Samples in the batch.
        batch_bytes: Bytes of the whole batch.
    """

    trace: Trace
    costs: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    saved: Sequence[Mapping[int, int]]
    recomputed: Sequence[int]
    outputs: Mapping[tuple[int, int], int]
    returned: frozenset[tuple[int, int]]
    passes: Sequence[Passes] | None
    held: Sequence[Held]
    num_microbatches: int
    mean_size: float
    batch_size: int
    batch_bytes: int
