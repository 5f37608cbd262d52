"""Costs of a schedule from a file, one per stage, as a measurement or another program has written them.

JSON is an object, ``{"forward": [1, 2], "backward": [2, 4], "transfer": 0.1}``: a number for all stages, or a list with
one for each. CSV has a line with the names and then a line per stage; a column ``stage`` may number them.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .simulate import Costs

__all__: list[str] = []

_PER_STAGE = ("forward", "backward", "input", "weight")


def read_costs(path: str | os.PathLike[str], num_stages: int) -> Costs:
    """Reads costs from a JSON or a CSV file, told apart by the end of its name.

    Args:
        path: The file. ``forward`` and ``backward`` must be in it; ``input`` and ``weight`` are those of a forward
            where they are not, and ``transfer`` (JSON only) is 0.
        num_stages: How many stages it must have costs for.

    Raises:
        ValueError: If the file cannot be read or does not say that, naming it.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        found = _from_csv(text) if os.fspath(path).lower().endswith(".csv") else _from_json(text)
        return _costs(found, num_stages)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read costs from {os.fspath(path)!r}: {error}") from error


def _from_json(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError('write an object, {"forward": [1, 2], "backward": [2, 4]}')
    for name, value in found.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"{name} must be a number or a list with a number per stage, got {value!r}")
    return found


def _from_csv(text: str) -> dict[str, Any]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(map(str.strip, row))]
    if not rows or "transfer" in rows[0]:
        raise ValueError("write a line with names, 'stage,forward,backward', and then a line per stage")
    for row in rows[1:]:
        if len(row) != len(rows[0]):
            raise ValueError(f"each line has {len(rows[0])} cells, as the first has, but one is {','.join(row)!r}")
    columns = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=False))
    found: dict[str, Any] = {name: [float(cell) for cell in cells] for name, cells in columns.items()}
    stages = found.pop("stage", None)
    if stages is not None and stages != list(range(len(stages))):
        raise ValueError("the stages must be 0, 1, 2, ... in this order")
    return found


def _costs(found: Mapping[str, Any], num_stages: int) -> Costs:
    names = (*_PER_STAGE, "transfer")
    for name, value in found.items():
        if name not in names:
            raise ValueError(f"there is no cost {name!r}: use {', '.join(names)}")
        if name == "transfer" and isinstance(value, list):
            raise ValueError(f"transfer is one number, got {value}")
        if isinstance(value, Sequence) and len(value) != num_stages:
            raise ValueError(f"{name} has {len(value)} numbers for {num_stages} stages: one per stage")
    for name in ("forward", "backward"):
        if name not in found:
            raise ValueError(f"{name} is missing")
    return Costs(**{"input": found["forward"], "weight": found["forward"], **found})
