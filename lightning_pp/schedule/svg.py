"""Draws a picture as SVG text: rows are stages, colours say what is done, numbers are micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from .picture import COLOURS, Band, Bar, Panel, Picture, bands

__all__: list[str] = []

_MARGIN, _TITLE, _ROW, _GAP, _AXIS = 12, 22, 22, 3, 34
_FONT, _SMALL = 11, 8
_WIDTH = 860
"""Of the time axis: on a page of text it stays nearly as large as it is."""
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

    It is as wide as a page. A step that is longer than the micro-batch numbers bear goes on below, in bands; a number
    for which its bar is too narrow all the same is left out, and every bar says its name and times where the pointer
    rests on it.

    >>> from lightning_pp.schedule import one_f_one_b, simulate
    >>> from lightning_pp.schedule.picture import panel_of
    >>> to_svg(Picture([panel_of(simulate(one_f_one_b(2, 3)), "1f1b")])).splitlines()[0][:40]
    '<svg xmlns="http://www.w3.org/2000/svg" '
    """
    top = _MARGIN + _TITLE
    lines: list[str] = []
    for band in bands(picture, _WIDTH, _room):
        frame = _Frame(band)
        lines += [] if lines else _legend(picture, frame)
        for panel in band.panels:
            lines += _panel(panel, frame, top)
            top += _height(panel)
        lines += _axis(picture, frame, top)
        top += _AXIS
    width, height = math.ceil(frame.right + _MARGIN * 2), top
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

    def __init__(self, band: Band) -> None:
        names = [name for panel in band.panels for name in panel.rows]
        self.left = _MARGIN + math.ceil(max(map(len, names)) * _FONT * _LETTER) + 6
        self.begin, self.end = band.begin, band.end
        self.per_unit = _WIDTH / (self.end - self.begin)
        self.right = self.at(self.end)

    def at(self, time: float) -> float:
        return self.left + (time - self.begin) * self.per_unit


def _room(label: str, font: int = _FONT) -> float:
    return len(label) * font * _LETTER + 3


def _height(panel: Panel) -> int:
    return (_TITLE if panel.title else 0) + len(panel.rows) * (_ROW + _GAP) + _GAP


def _legend(picture: Picture, frame: _Frame) -> Iterator[str]:
    x: float = frame.left
    for name in picture.categories:
        yield f'<rect class="{name}" x="{x:.0f}" y="{_MARGIN}" width="12" height="12"/>'
        yield f'<text x="{x + 16:.0f}" y="{_MARGIN + 10}">{name}</text>'
        x += 16 + len(name) * _FONT * _LETTER + 18


def _panel(panel: Panel, frame: _Frame, top: int) -> Iterator[str]:
    y = top
    if panel.title:
        yield f'<text class="title" x="{frame.left}" y="{top + 15}">{escape(panel.title)}</text>'
        y += _TITLE
    for name, bars in panel.rows.items():
        yield f'<text class="row" x="{frame.left - 5}" y="{y + 15}">{escape(name)}</text>'
        for bar in bars:
            yield from _bar(bar, frame, y)
        y += _ROW + _GAP


def _bar(bar: Bar, frame: _Frame, y: int) -> Iterator[str]:
    start, end = max(bar.start, frame.begin), min(bar.end, frame.end)
    x, width = frame.at(start), (end - start) * frame.per_unit
    if bar.category == "wait" and width < _INVISIBLE:
        return
    shade = f' fill-opacity="{0.6**bar.chunk:.2f}"' if bar.chunk else ""
    times = f"{bar.end - bar.start:.4g} from {bar.start:.4g}"
    yield (
        f'<rect class="{bar.category}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}"{shade}>'
        f"<title>{escape(bar.name)}: {times}</title></rect>"
    )
    has_label = bar.label and 2 * (end - start) > (bar.end - bar.start) * (1 - 1e-9)  # the larger part of a divided bar
    for style, font in (("mb", _FONT), ("small", _SMALL)):
        if has_label and width >= _room(bar.label, font) - 3:
            yield f'<text class="{style}" x="{x + width / 2:.2f}" y="{y + 15}">{escape(bar.label)}</text>'
            return


def _axis(picture: Picture, frame: _Frame, bottom: int) -> Iterator[str]:
    step = _step((frame.end - frame.begin) / (frame.right - frame.left) * 70)
    yield f'<line x1="{frame.left}" y1="{bottom}" x2="{frame.right:.2f}" y2="{bottom}"/>'
    for number in range(math.ceil(frame.begin / step - 1e-9), math.floor(frame.end / step + 1e-9) + 1):
        x = frame.at(number * step)
        unit = f" {picture.unit}" if picture.unit else ""
        yield f'<line x1="{x:.2f}" y1="{bottom}" x2="{x:.2f}" y2="{bottom + 4}"/>'
        yield f'<text class="axis" x="{x:.2f}" y="{bottom + 17}">{number * step:g}{unit}</text>'


def _step(at_least: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 ... and of their fractions."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))
