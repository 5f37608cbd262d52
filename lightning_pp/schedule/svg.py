"""Draws a picture as SVG text: rows are stages, colours say what is done, numbers are micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from .picture import COLOURS, Bar, Panel, Picture

__all__: list[str] = []

_MARGIN, _TITLE, _ROW, _GAP, _AXIS = 12, 22, 22, 3, 34
_FONT, _SMALL = 11, 8
_NARROWEST, _WIDEST = 860, 2600
_LETTER = 0.62
"""The width of a letter, and more than that of a digit, in font sizes."""
_INVISIBLE = 0.25
"""Waits of less than this many pixels are left out."""

_STYLE = (
    f"text{{font-family:Helvetica,Arial,sans-serif;font-size:{_FONT}px;fill:#222}}"
    f".mb{{text-anchor:middle}}.small{{text-anchor:middle;font-size:{_SMALL}px}}"
    ".row{text-anchor:end}.axis{text-anchor:middle;fill:#666}.title{font-weight:bold}"
    "line{stroke:#999}rect{shape-rendering:crispEdges}"
    ".forward,.backward,.weights{stroke:#fff;stroke-width:.6}"
)


def to_svg(picture: Picture) -> str:
    """Draws a picture.

    It is as wide as the micro-batch numbers need to be readable, within bounds; a number for which its bar is too
    narrow all the same is left out, and every bar says its name and times where the pointer rests on it.

    >>> from lightning_pp.schedule import one_f_one_b, simulate
    >>> from lightning_pp.schedule.picture import panel_of
    >>> to_svg(Picture([panel_of(simulate(one_f_one_b(2, 3)), "1f1b")])).splitlines()[0][:40]
    '<svg xmlns="http://www.w3.org/2000/svg" '
    """
    frame = _Frame(picture)
    lines = [*_legend(picture, frame)]
    top = _MARGIN + _TITLE
    for panel in picture.panels:
        lines += _panel(panel, frame, top)
        top += _height(panel)
    lines += _axis(picture, frame, _MARGIN + _TITLE, top)
    width, height = math.ceil(frame.right + _MARGIN * 2), top + _AXIS
    colours = "".join(f".{name}{{fill:{COLOURS[name]}}}" for name in picture.categories)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            f"<style>{_STYLE}{colours}</style>",
            f'<rect width="{width}" height="{height}" style="fill:#fff"/>',
            *lines,
            "</svg>\n",
        ]
    )


class _Frame:
    """Where a time is, in pixels."""

    def __init__(self, picture: Picture) -> None:
        names = [name for panel in picture.panels for name in panel.rows]
        self.left = _MARGIN + math.ceil(max(map(len, names)) * _FONT * _LETTER) + 6
        self.begin, self.end = picture.span
        self.per_unit = _width(picture) / (self.end - self.begin)
        self.right = self.at(self.end)

    def at(self, time: float) -> float:
        return self.left + (time - self.begin) * self.per_unit


def _width(picture: Picture) -> float:
    """So wide that the numbers fit into nearly all bars; the shortest may be shorter than they should be."""
    begin, end = picture.span
    needed = sorted(_room(bar.label) * (end - begin) / max(bar.end - bar.start, 1e-12) for bar in _labelled(picture))
    wanted = needed[(len(needed) - 1) * 9 // 10] if needed else 0
    return min(max(wanted, _NARROWEST), _WIDEST)


def _labelled(picture: Picture) -> list[Bar]:
    return [bar for bar in picture.bars() if bar.label]


def _room(label: str, font: int = _FONT) -> float:
    return len(label) * font * _LETTER + 3


def _height(panel: Panel) -> int:
    return _TITLE + len(panel.rows) * (_ROW + _GAP) + _GAP


def _legend(picture: Picture, frame: _Frame) -> Iterator[str]:
    x: float = frame.left
    for name in picture.categories:
        yield f'<rect class="{name}" x="{x:.0f}" y="{_MARGIN}" width="12" height="12"/>'
        yield f'<text x="{x + 16:.0f}" y="{_MARGIN + 10}">{name}</text>'
        x += 16 + len(name) * _FONT * _LETTER + 18


def _panel(panel: Panel, frame: _Frame, top: int) -> Iterator[str]:
    yield f'<text class="title" x="{frame.left}" y="{top + 15}">{escape(panel.title)}</text>'
    y = top + _TITLE
    for name, bars in panel.rows.items():
        yield f'<text class="row" x="{frame.left - 5}" y="{y + 15}">{escape(name)}</text>'
        for bar in bars:
            yield from _bar(bar, frame, y)
        y += _ROW + _GAP


def _bar(bar: Bar, frame: _Frame, y: int) -> Iterator[str]:
    x, width = frame.at(bar.start), (bar.end - bar.start) * frame.per_unit
    if bar.category == "wait" and width < _INVISIBLE:
        return
    shade = f' fill-opacity="{0.6**bar.chunk:.2f}"' if bar.chunk else ""
    times = f"{bar.end - bar.start:.4g} from {bar.start:.4g}"
    yield (
        f'<rect class="{bar.category}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}"{shade}>'
        f"<title>{escape(bar.name)}: {times}</title></rect>"
    )
    for style, font in (("mb", _FONT), ("small", _SMALL)):
        if bar.label and width >= _room(bar.label, font) - 3:
            yield f'<text class="{style}" x="{x + width / 2:.2f}" y="{y + 15}">{escape(bar.label)}</text>'
            return


def _axis(picture: Picture, frame: _Frame, top: int, bottom: int) -> Iterator[str]:
    step = _step((frame.end - frame.begin) / (frame.right - frame.left) * 70)
    yield f'<line x1="{frame.left}" y1="{bottom}" x2="{frame.right:.2f}" y2="{bottom}"/>'
    for number in range(math.ceil(frame.begin / step), math.floor(frame.end / step + 1e-9) + 1):
        x = frame.at(number * step)
        unit = f" {picture.unit}" if picture.unit else ""
        yield f'<line x1="{x:.2f}" y1="{bottom}" x2="{x:.2f}" y2="{bottom + 4}"/>'
        yield f'<text class="axis" x="{x:.2f}" y="{bottom + 17}">{number * step:g}{unit}</text>'


def _step(at_least: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 ... and of their fractions."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))
