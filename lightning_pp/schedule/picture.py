"""What a picture of a step shows, as data: panels of rows of bars; how it is drawn, as SVG or PNG, is another matter.

A simulated step and a measured one become the same kind of panel, so that they stand one above the other on one scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Band:
    """A part of the time axis: a long step goes on below, as text does, rather than become too wide to be read."""

    begin: float
    """Where it begins."""
    end: float
    """Where it ends."""
    panels: Sequence[Panel]
    """The picture's, with those bars that reach into the band, whole; the first band has all titles."""


_MOST_BANDS = 12


def bands(picture: Picture, width: float, room: Callable[[str], float]) -> list[Band]:
    """Cuts a picture into as many bands as its labels need to fit into nearly all bars.

    Labels for which even the largest number of bands would be too few do not count, and neither does a tenth of the
    others: the shortest bars may be shorter than they should be.

    Args:
        picture: The picture.
        width: Of a band.
        room: What a label takes, in the unit of the width.
    """
    begin, end = picture.span
    needed = [room(bar.label) * (end - begin) / max(bar.end - bar.start, 1e-12) for bar in picture.bars() if bar.label]
    needed = sorted(size for size in needed if size <= _MOST_BANDS * width)
    wanted = needed[(len(needed) - 1) * 9 // 10] if needed else 0.0
    number = max(1, math.ceil(wanted / width - 1e-9))
    edges = [begin + (end - begin) * at / number for at in range(number + 1)]
    return [_band(picture, edges[at], edges[at + 1], at == 0) for at in range(number)]


def _band(picture: Picture, begin: float, end: float, is_first: bool) -> Band:
    has_titles = is_first or len(picture.panels) > 1
    panels = []
    for panel in picture.panels:
        rows = {name: [b for b in bars if b.start < end and b.end > begin] for name, bars in panel.rows.items()}
        panels.append(Panel(panel.title if has_titles else "", rows))
    return Band(begin, end, panels)


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
