"""A forecast as tables and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from typing import Any

from lightning_pp.planning.forecast import Forecast, StageForecast

__all__: list[str] = []

#: stages that a table shows at each end; JSON has all
_SHOWN = 8
_STAGE_HEAD = (
    "stage", "layers", "params", "FLOPs", "receives", "weights", "grads", "optim.", "activations", "total", "idle",
)  # fmt: skip
_TIMED_HEAD = tuple("F+B" if name == "FLOPs" else name for name in _STAGE_HEAD)
_HEAD = ("P", "M", "schedule", "bubble", "speed-up", "step", "memory", "fits")


def text(title: str, forecasts: Sequence[Forecast], chosen: Forecast | None, memory: float | None) -> str:
    """What was asked about, side by side, and the stages of one.

    Args:
        title: The model and its batch, in a line.
        forecasts: All.
        chosen: The one to show in full; None where there are several and no reason to take one.
        memory: Bytes of a device, where they are known.
    """
    head = _HEAD if memory is not None else _HEAD[:-1]
    rows = [_row(one, memory)[: len(head)] for one in forecasts]
    parts = [title, _table(head, rows)]
    if chosen is not None:
        if len(forecasts) > 1:
            parts.append(f"P={len(chosen.stages)}, M={chosen.microbatches}, {chosen.schedule}:")
        is_timed = chosen.stages[0].forward_seconds is not None
        parts.append(_table(_TIMED_HEAD if is_timed else _STAGE_HEAD, _stage_rows(chosen.stages)))
        parts += _notes(chosen.stages, is_timed)
    return "\n".join(parts)


def as_json(facts: dict[str, Any], forecasts: Sequence[Forecast], chosen: Forecast | None) -> str:
    """The same and more, for programs; sizes are bytes."""
    content = {**facts, "forecasts": [_as_dict(one) for one in forecasts]}
    if chosen is not None:
        content["chosen"] = forecasts.index(chosen)
    return json.dumps(content, indent=2)


def size(number: float) -> str:
    """Bytes for people.

    >>> size(512), size(3_289_088), size(8e10)
    ('512B', '3.29MB', '80.0GB')
    """
    return f"{int(number)}B" if number < 1000 else f"{short(number)}B"


def short(number: float) -> str:
    """A number in three digits.

    >>> short(822272), short(1.6e18), short(999.6e6)
    ('822k', '1.60E', '1.00G')
    """
    units = ("", "k", "M", "G", "T", "P", "E", "Z")
    unit = 0
    while number >= 999.5 and unit < len(units) - 1:
        number, unit = number / 1000, unit + 1
    if unit == 0:
        return f"{number:.0f}"
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}{units[unit]}"


def _row(one: Forecast, memory: float | None) -> tuple[str, ...]:
    seconds = "-" if one.seconds is None else f"{one.seconds:.3g} s"
    fits = "" if memory is None else "yes" if one.peak <= memory else "no"
    return (
        str(len(one.stages)), str(one.microbatches), one.schedule, f"{one.bubble:.1%}", f"{one.speedup:.2f}",
        seconds, size(one.peak), fits,
    )  # fmt: skip


def _stage_rows(stages: Sequence[StageForecast]) -> list[tuple[str, ...]]:
    rows = [_stage_row(number, stage) for number, stage in enumerate(stages)]
    if len(rows) > 2 * _SHOWN + 1:
        rows[_SHOWN:-_SHOWN] = [("...",) + ("",) * (len(_STAGE_HEAD) - 1)]
    return rows


def _stage_row(number: int, stage: StageForecast) -> tuple[str, ...]:
    layers = stage.first if stage.calls == 1 else f"{stage.first} ... {stage.last}"
    return (
        str(number), layers, short(stage.parameters), _work(stage), size(stage.receives),
        size(stage.weights), size(stage.gradients), size(stage.optimizer),
        f"{stage.in_flight} x {size(stage.saved + stage.messages)}", size(stage.total), f"{stage.bubble:.1%}",
    )  # fmt: skip


def _work(stage: StageForecast) -> str:
    if stage.forward_seconds is None or stage.backward_seconds is None:
        return short(stage.flops)
    return f"{stage.forward_seconds * 1e3:.3g}+{stage.backward_seconds * 1e3:.3g}"


def _notes(stages: Sequence[StageForecast], is_timed: bool) -> list[str]:
    """What the columns mean."""
    work = "F+B" if is_timed else "FLOPs"
    notes = [f"{work} and receives are of one micro-batch; activations: micro-batches in flight x bytes of one."]
    if is_timed:
        notes.append("F+B: milliseconds of its forward and of its backward.")
    most = max(stage.recomputed for stage in stages)
    if most:
        notes.append(f"The total has up to {size(most)} for the layer that is recomputed at the time.")
    return notes


def _as_dict(one: Forecast) -> dict[str, Any]:
    content = dataclasses.asdict(one)
    for stage, held in zip(content["stages"], one.stages, strict=True):
        stage |= {"activations": held.activations, "total": held.total}
    return content | {"peak": one.peak}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; drawn by ``rich`` where that is installed."""
    left = {"layers", "schedule", "fits"}
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if name in left else cell.rjust(width)
                for name, cell, width in zip(head, row, widths, strict=True)
            ).rstrip()
            for row in (head, *rows)
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "layers", overflow="fold")
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=max(100, shutil.get_terminal_size((100, 24)).columns), markup=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())
