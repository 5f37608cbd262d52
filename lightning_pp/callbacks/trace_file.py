"""One step of all ranks, on one clock: as a trace for Perfetto and Chrome, and as the panels of a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning_pp.runtime.events import Event
from lightning_pp.schedule import Costs, Kind, Op, Timeline, message_of, simulate
from lightning_pp.schedule.picture import CATEGORIES, Bar, Panel, Picture, panel_of

__all__: list[str] = []

_MICRO, _MILLI = 1e6, 1e3
#: what the simulator is given for a computation that took no time at all
_SHORTEST = 1e-9


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank did in the step.

    Attributes:
        rank: Its global rank.
        stage: Its stage.
        replica: The pipeline that it belongs to.
        events: Seconds on the first rank's clock.
    """

    rank: int
    stage: int
    replica: int
    events: tuple[Event, ...]

    def computations(self) -> Iterator[tuple[Op, Event]]:
        """Its forward and backward passes."""
        for event in self.events:
            if isinstance(event.what, Op) and event.what.is_compute:
                yield event.what, event


def category(what: Op | str) -> str:
    """What kind of work it is."""
    if isinstance(what, Op):
        return CATEGORIES[what.kind]
    return what if what in ("reduce", "optimizer") else "other"


# -- the trace -------------------------------------------------------------------------------------------------------


def to_trace(rows: Sequence[Row], number: int) -> str:
    """Write JSON in Chrome's trace event format: a process per pipeline, a thread per stage, arrows for messages."""
    zero = min(row.events[0].start for row in rows)
    pipelines = 1 + max(row.replica for row in rows)
    events: list[dict[str, Any]] = []
    for replica in range(pipelines):
        events.append(_named("process_name", {"pid": replica + 1}, f"pipeline {replica}"))
    for row in rows:
        # no thread has a process's number: it would be taken for its main thread, and shown first
        place = {"pid": row.replica + 1, "tid": pipelines + 1 + row.rank}
        events.append(_named("thread_name", place, f"stage {row.stage} (rank {row.rank})"))
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": row.stage}})
        for event in row.events:
            events += _slices(event, place, zero, row.replica)
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"step": number}, "traceEvents": events})


def _named(what: str, place: dict[str, int], name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, **place, "args": {"name": name}}


def _slices(event: Event, place: dict[str, int], zero: float, replica: int) -> Iterator[dict[str, Any]]:
    what, start, stop = event.what, _micro(event.start - zero), _micro(event.stop - zero)
    slice_ = {"ph": "X", "name": str(what), "cat": category(what), "ts": start, "dur": round(stop - start, 3), **place}
    if not isinstance(what, Op):
        yield slice_
        return
    yield slice_ | {"args": {"stage": what.stage, "micro-batch": what.mb}}
    if what.is_compute:
        return
    forward = what.kind in (Kind.SEND_F, Kind.RECV_F)
    stage, mb = message_of(what)
    name = "activation" if forward else "gradient"
    arrow = {"name": name, "cat": "message", "id": f"{replica}.{name}.{stage}.{mb}", **place}
    if what.kind in (Kind.SEND_F, Kind.SEND_B):
        yield {"ph": "s", "ts": start, **arrow}
    else:  # it must end inside of the slice
        yield {"ph": "f", "bp": "e", "ts": max(start, round(stop - 0.001, 3)), **arrow}


def _micro(seconds: float) -> float:
    return round(seconds * _MICRO, 3)


# -- the picture -----------------------------------------------------------------------------------------------------


def to_picture(rows: Sequence[Row], number: int) -> Picture:
    """Show the step as it was, and below it what the schedule alone would make of each stage's mean times."""
    zero = min(event.start for row in rows for _, event in row.computations())
    seconds, bubble = _measured(rows)
    title = f"batch {number} as measured: {_duration(seconds, bubble)}"
    measured = Panel(title, {_name(row, rows): tuple(_bars(row, zero)) for row in rows})
    timeline = ideal(rows)
    title = f"ideal, from each stage's mean times: {_duration(timeline.makespan, timeline.bubble_fraction)}"
    return Picture([measured, panel_of(timeline, title, _MILLI)], "ms")


def ideal(rows: Sequence[Row]) -> Timeline:
    """Simulate the step with the mean forward and backward times of each stage, and messages that take none."""
    stages = 1 + max(row.stage for row in rows)
    schedule = {row.stage: [op for op, _ in row.computations()] for row in rows if row.replica == 0}
    forward, backward = ([_mean(rows, stage, kind) for stage in range(stages)] for kind in (Kind.F, Kind.B))
    return simulate(schedule, Costs(forward=forward, backward=backward))


def _mean(rows: Sequence[Row], stage: int, kind: Kind) -> float:
    found = [e.seconds for row in rows if row.stage == stage for op, e in row.computations() if op.kind is kind]
    return max(fmean(found), _SHORTEST) if found else _SHORTEST


def _measured(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds from the first to the last computation, and the bubble in it: means over the pipelines."""
    spans, bubbles = [], []
    for replica in {row.replica for row in rows}:
        events = [[event for _, event in row.computations()] for row in rows if row.replica == replica]
        spans.append(max(row[-1].stop for row in events) - min(row[0].start for row in events))
        bubbles += [1 - sum(event.seconds for event in row) / spans[-1] for row in events]
    return fmean(spans), fmean(bubbles)


def _duration(seconds: float, bubble: float) -> str:
    return f"{seconds * _MILLI:.4g} ms, bubble {bubble:.1%}"


def _name(row: Row, rows: Sequence[Row]) -> str:
    has_replicas = any(other.replica for other in rows)
    return f"stage {row.stage}, pipeline {row.replica}" if has_replicas else f"stage {row.stage}"


def _bars(row: Row, zero: float) -> Iterator[Bar]:
    for event in row.events:
        what = event.what
        label = str(what.mb) if isinstance(what, Op) and what.is_compute else ""
        start, stop = ((seconds - zero) * _MILLI for seconds in (event.start, event.stop))
        yield Bar(start, stop, category(what), str(what), label)
