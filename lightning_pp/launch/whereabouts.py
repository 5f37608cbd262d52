"""Where a process is, as seen from another of its threads."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch

from lightning_pp.runtime.mesh import Mesh
from lightning_pp.schedule import Kind, Op

__all__: list[str] = []

_WAITS = {
    Kind.RECV_F: ("the activation", -1, "from"),
    Kind.RECV_B: ("the gradient", 1, "from"),
    Kind.SEND_F: ("the activation", 1, "to be taken by"),
    Kind.SEND_B: ("the gradient", -1, "to be taken by"),
}
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIGHTNING = str(Path(str(lightning.__file__)).parent) + os.sep
_TORCH = str(Path(str(torch.__file__)).parent) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is.

    Attributes:
        progress: Differs as soon as the process has got on.
        stage: Its stage.
        op: The op under way, as text.
        micro_batch: Of that op.
        waits_for: The message that the op waits for, or another rank; nothing where it works.
        at: File, line and function.
    """

    progress: Any
    stage: int
    op: str
    micro_batch: str
    waits_for: str
    at: str


def place_of(mesh: Mesh, op: Op | None, batches: Any) -> Place:
    """Where this process is.

    Args:
        mesh: Its position.
        op: The op under way; None outside of the schedule.
        batches: Numbers of the batches that have begun.
    """
    at, is_ours = _position(sys._current_frames().get(threading.main_thread().ident or 0))
    waits_for = ""
    if op is not None and op.kind in _WAITS and is_ours:
        what, step, how = _WAITS[op.kind]
        waits_for = f"{what} of micro-batch {op.mb} {how} rank {mesh.global_rank(mesh.position + step)}"
    elif is_ours:
        waits_for = "all ranks"
    shown = (str(op), str(op.mb)) if op is not None else ("", "")
    return Place((batches, str(op)), mesh.position, *shown, waits_for, at)


def _position(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line of the user's code that Lightning or we have called, or else the innermost of all.

    The second value says whether it is this package that waits there.
    """
    innermost = _shown(frame) if frame is not None else "an unknown place"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith((_OURS, _LIGHTNING)):
            return innermost, name.startswith(_OURS)
        if not _is_torch_or_standard(name):
            return _shown(frame), False
        frame = frame.f_back
    return innermost, False


def _is_torch_or_standard(name: str) -> bool:
    return name.startswith((_TORCH, "<")) or (name.startswith(_STANDARD) and "site-packages" not in name)


def _shown(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
