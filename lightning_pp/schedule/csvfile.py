"""Schedules as CSV text, so that they can be written by hand or by another program.

The format is the one ``torch.distributed.pipelining`` calls ``compute_only`` (`schedules.py`, ``_load_csv``
and ``_dump_csv``): one row per rank, one op per cell, ``0F0,0F1,0B0,0B1``. Files go both ways.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence

from .op import COMPUTE_KINDS, Op, Schedule

__all__: list[str] = []


def to_csv(schedule: Mapping[int, Sequence[Op]]) -> str:
    r"""Writes a schedule as CSV text, one row per rank.

    >>> to_csv({0: [Op.parse("0F0"), Op.parse("0B0")]})
    '0F0,0B0\n'
    """
    return "".join(",".join(map(str, schedule[rank])) + "\n" for rank in sorted(schedule))


def from_csv(text: str) -> Schedule:
    """Reads CSV text. Blank cells (idle ticks, as torch writes them) and blank rows at the end are skipped.

    The text is only read, not checked: see ``check``.

    Raises:
        ValueError: If a cell is not a computation, naming row, cell and text.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"this is not CSV text: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return {rank: _row(rank, cells) for rank, cells in enumerate(rows)}


def _row(rank: int, cells: Sequence[str]) -> list[Op]:
    ops: list[Op] = []
    for column, cell in enumerate(cells):
        if not cell.strip():
            continue
        try:
            op = Op.parse(cell)
        except ValueError as error:
            raise ValueError(f"row {rank + 1} (rank {rank}), cell {column + 1}: {error}") from error
        if op.kind not in COMPUTE_KINDS:
            raise ValueError(
                f"row {rank + 1} (rank {rank}), cell {column + 1}: {op} is a message; a file holds "
                "computations only (F, B, I, W), and messages are added when it is lowered: remove it"
            )
        ops.append(op)
    return ops


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """Reads a schedule from a CSV file.

    Raises:
        ValueError: If the file cannot be read or is not such a file, naming it.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return from_csv(file.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a schedule from {os.fspath(path)!r}: {error}") from error


def write_csv(schedule: Mapping[int, Sequence[Op]], path: str | os.PathLike[str]) -> None:
    """Writes a schedule to a CSV file that ``read_csv`` and torch read."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(to_csv(schedule))
