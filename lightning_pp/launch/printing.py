"""What a process prints when an exception ends it: the first failure whole, and of those that follow from it a line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

__all__: list[str] = []

#: what a rank says that was told of another one's failure
STOPPED_BY = "The pipeline was stopped by "

#: the attribute of an exception that says what to print for it
_BRIEF = "_lightning_pp_brief"
#: the attribute of an exception hook that marks it as ours
_OURS = "_lightning_pp_hook"


def shorten(error: BaseException, rank: int, first: str | None, is_lost_peer: bool) -> None:
    """Let ``error`` be printed in short, if it only follows from the failure of another rank.

    Args:
        error: What ends this process.
        rank: This process's.
        first: The other rank's failure, where it is known.
        is_lost_peer: Whether ``error`` says only that another process is gone.
    """
    told = str(error).partition(STOPPED_BY)[2]
    if is_lost_peer and (first or told):
        first = first or told
    if first is not None:
        start = STOPPED_BY if is_lost_peer else "It failed here in the same way as on "
        _attach(error, f"[rank {rank}] {start}{first.splitlines()[0]}")
    elif is_lost_peer:
        _attach(error, f"[rank {rank}] {error}\nNo rank has said why: a process was killed, or a connection broke.")


def install() -> None:
    """Let exceptions be printed in the way that :func:`shorten` has said, and all others as before."""
    before = sys.excepthook
    if hasattr(before, _OURS):
        return

    def hook(cls: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        brief = _brief(error)
        if brief is None:
            before(cls, error, traceback)
        else:
            os.write(2, f"{brief}\n".encode())  # in one piece: all processes write to the same place

    setattr(hook, _OURS, True)
    sys.excepthook = hook


def _attach(error: BaseException, text: str) -> None:
    setattr(error, _BRIEF, text)


def _brief(error: BaseException) -> str | None:
    return getattr(error, _BRIEF, None)
