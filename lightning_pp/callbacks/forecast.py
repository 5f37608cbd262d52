"""What a stage will hold for its backward passes, from what one micro-batch of a known size has held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pp.schedule import Kind, Op

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Growth:
    """What the forward of one micro-batch adds to what its stage holds.

    Attributes:
        per_microbatch: Bytes, whatever its size.
        per_sample: Bytes for each of its samples.
    """

    per_microbatch: float
    per_sample: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, int]]) -> Growth | None:
        """The growth that gives the ``(samples, bytes)`` that were measured; None where there is none.

        Where all micro-batches have one size, all of their bytes are taken to be those of samples.

        Example:
            >>> Growth.of([(3, 34), (2, 24), (3, 34)])
            Growth(per_microbatch=4.0, per_sample=10.0)
            >>> Growth.of([(3, 34), (3, 30)])
        """
        known = dict(measured)
        if not known or any(known[size] != held for size, held in measured):
            return None
        if len(known) == 1:
            size, held = measured[0]
            return cls(0.0, held / size) if size else None
        (small, less), (large, more) = min(known.items()), max(known.items())
        per_sample = (more - less) / (large - small)
        growth = cls(less - per_sample * small, per_sample)
        return growth if all(round(growth.bytes_of(size)) == held for size, held in measured) else None

    def bytes_of(self, num_samples: int) -> float:
        """Bytes of a micro-batch."""
        return self.per_microbatch + self.per_sample * num_samples


def sizes_of(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples of each micro-batch of a batch.

    Example:
        >>> sizes_of(8, 3), sizes_of(2, 4)
        ([3, 3, 2], [1, 1])
    """
    number = max(1, min(num_microbatches, num_samples))
    return [num_samples // number + (mb < num_samples % number) for mb in range(number)]


def peak_of(ops: Sequence[Op], sizes: Sequence[int], growth: Growth) -> int:
    """Most bytes that a rank holds at once.

    Args:
        ops: What it runs, in order.
        sizes: Samples of each micro-batch.
        growth: What one micro-batch adds.

    Example:
        >>> from lightning_pp.schedule import gpipe, one_f_one_b
        >>> [peak_of(build(2, 3)[0], [2, 2, 1], Growth(0.0, 10.0)) for build in (gpipe, one_f_one_b)]
        [50, 40]
    """
    held = peak = 0.0
    for op in ops:
        if op.kind is Kind.F:
            held += growth.bytes_of(sizes[op.mb])
        elif op.kind in (Kind.B, Kind.W):
            held -= growth.bytes_of(sizes[op.mb])
        peak = max(peak, held)
    return round(peak)
