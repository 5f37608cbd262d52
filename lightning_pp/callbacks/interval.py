"""How often a callback measures."""

from __future__ import annotations

from lightning.pytorch import Trainer

__all__: list[str] = []


def check_interval(every_n_steps: int | None) -> None:
    """Check the argument of a callback.

    Raises:
        ValueError: It is below 1.
        TypeError: It is neither None nor an int.
    """
    if every_n_steps is None:
        return
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int):
        raise TypeError(f"every_n_steps={every_n_steps!r}: allowed is None or an int of at least 1.")
    if every_n_steps < 1:
        raise ValueError(f"every_n_steps={every_n_steps}: allowed is None or an int of at least 1.")


def interval(trainer: Trainer, every_n_steps: int | None) -> int:
    """The callback's own interval, or else the Trainer's; 0 for never."""
    own: int = trainer.log_every_n_steps if every_n_steps is None else every_n_steps  # type: ignore[attr-defined]
    return own
