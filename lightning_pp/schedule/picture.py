"""What a picture of a step shows, as data: panels of rows of bars; how it is drawn, as SVG or PNG, is another matter.

A simulated step and a measured one become the same kind of panel, so that they stand one above the other on one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from .op import Kind
from .placement import placement_of
from .simulate import Span, Timeline

__all__: list[str] = []

CATEGORIES: Mapping[Kind, str] = MappingProxyType(
    {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward", Kind.W: "weights"}
    | dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), "wait")
)
"""Kind of op -> a key of ``COLOURS``."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#8fc6f0",
        "backward": "#f5b041",
        "weights": "#f0e442",
        "wait": "#e6e6e6",
        "reduce": "#d7a1c4",
        "optimizer": "#66c2a5",
        "other": "#bdbdbd",
    }
)
"""Category -> colour; dark text is readable on all of them, and they differ to the colour-blind too."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that takes time in a row."""

    start: float
    """In the unit of the picture."""
    end: float
    """In the unit of the picture."""
    category: str
    """A key of ``COLOURS``."""
    name: str
    """In full, as ``2F3``."""
    label: str = ""
    """What is written into the bar where there is room: the micro-batch."""
    chunk: int = 0
    """Which of the rank's stages it belongs to, 0 for its first."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One step: a row for each stage."""

    title: str
    """Stands above it."""
    rows: Mapping[str, Sequence[Bar]]
    """Name of the row -> its bars, in order of time."""


@dataclass(frozen=True)
class Picture:
    """Panels under one another, with one time axis."""

    panels: Sequence[Panel]
    """From the top."""
    unit: str = ""
    """Of the time axis; empty for multiples of whatever the costs are given in."""
    categories: tuple[str, ...] = field(init=False)
    """Those that occur, in the order of ``COLOURS``."""

    def __post_init__(self) -> None:
        found = {bar.category for bar in self.bars()}
        object.__setattr__(self, "categories", tuple(name for name in COLOURS if name in found))

    def bars(self) -> Iterator[Bar]:
        """All bars."""
        for panel in self.panels:
            for row in panel.rows.values():
                yield from row

    @property
    def span(self) -> tuple[float, float]:
        """The earliest start and the latest end."""
        return min(bar.start for bar in self.bars()), max(bar.end for bar in self.bars())


def panel_of(timeline: Timeline, title: str, scale: float = 1.0) -> Panel:
    """Makes a panel of a simulated step: a row per rank, in which idle time is a bar too.

    Args:
        timeline: The step.
        title: Stands above the panel.
        scale: Multiplies all times.
    """
    ranks = range(timeline.num_ranks)
    placement = placement_of({rank: [span.op for span in timeline.of_rank(rank)] for rank in ranks})
    chunks = {stage: placement[:stage].count(rank) for stage, rank in enumerate(placement)}
    word = "stage" if len(placement) == timeline.num_ranks else "rank"
    rows = {f"{word} {rank}": tuple(_bars(timeline.of_rank(rank), timeline.makespan, chunks, scale)) for rank in ranks}
    return Panel(title, rows)


def _bars(spans: Sequence[Span], makespan: float, chunks: Mapping[int, int], scale: float) -> Iterator[Bar]:
    now = 0.0
    for span in spans:
        if span.start > now:
            yield Bar(now * scale, span.start * scale, "wait", "idle")
        op, now = span.op, span.end
        category = CATEGORIES[op.kind]
        yield Bar(span.start * scale, span.end * scale, category, str(op), str(op.mb), chunks[op.stage])
    if makespan > now:
        yield Bar(now * scale, makespan * scale, "wait", "idle")
