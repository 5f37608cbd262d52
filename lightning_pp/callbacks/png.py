"""Draws a picture as PNG, by matplotlib, which nothing else needs: the extra ``pictures``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from lightning_pp.schedule.picture import COLOURS, Band, Panel, Picture, bands

__all__: list[str] = []

MISSING = "PNG pictures need matplotlib: pip install 'lightning-pp[pictures]' (or matplotlib), or write an SVG"

_DPI = 100
_ROW, _EDGES, _LEGEND, _LEFT = 0.26, 0.62, 0.45, 0.9
_WIDTH, _LETTER = 10.0, 0.072


def is_available() -> bool:
    """Whether matplotlib is installed."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # it is blocked, or half-way through its import
        return False


def write_png(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write a picture to a file, in the order, the bands and the colours of the SVG.

    Raises:
        ImportError: If matplotlib is not installed; says how to get it.
    """
    if not is_available():
        raise ImportError(MISSING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    parts = [(band, panel) for band in bands(picture, _WIDTH - _LEFT, _room) for panel in band.panels]
    heights = [len(panel.rows) * _ROW + _EDGES for _, panel in parts]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _LEGEND), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (band, panel), axis in zip(parts, axes, strict=True):
        _draw(panel, axis, band)
        axis.tick_params(labelbottom=panel is band.panels[-1])
    axes[-1].set_xlabel(picture.unit)
    patches = [Patch(facecolor=COLOURS[name], label=name) for name in picture.categories]
    figure.legend(handles=patches, loc="outside upper left", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _room(label: str) -> float:
    """Inches."""
    return len(label) * _LETTER + 0.04


def _draw(panel: Panel, axis: Any, band: Band) -> None:
    axis.set_xlim(band.begin, band.end)
    axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axis.set_yticks(range(len(panel.rows)), list(panel.rows), fontsize=9)
    axis.set_ylim(len(panel.rows) - 0.5, -0.5)
    axis.tick_params(left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    for row, bars in enumerate(panel.rows.values()):
        spans = [(max(bar.start, band.begin), min(bar.end, band.end)) for bar in bars]
        shades = [(COLOURS[bar.category], 0.6**bar.chunk) for bar in bars]
        lengths = [(start, end - start) for start, end in spans]
        axis.broken_barh(lengths, (row - 0.44, 0.88), facecolors=shades, edgecolor="white", linewidth=0.4)
        for bar, (start, end) in zip(bars, spans, strict=True):
            room = (end - start) / (band.end - band.begin) * (_WIDTH - _LEFT)
            is_larger = 2 * (end - start) > (bar.end - bar.start) * (1 - 1e-9)  # part of a divided bar
            size = next((size for size in (8, 6) if room >= len(bar.label) * size * _LETTER / 8), None)
            if bar.label and is_larger and size is not None:
                axis.text((start + end) / 2, row, bar.label, ha="center", va="center", fontsize=size)
