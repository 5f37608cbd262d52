"""Draws a picture as PNG, by matplotlib, which nothing else needs: the extra ``pictures``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from lightning_pp.schedule.picture import COLOURS, Panel, Picture

__all__: list[str] = []

MISSING = "PNG pictures need matplotlib: pip install 'lightning-pp[pictures]' (or matplotlib), or write an SVG"

_DPI = 100
_ROW, _EDGES, _LEGEND, _LEFT = 0.26, 0.62, 0.45, 0.9
_NARROWEST, _WIDEST, _LETTER = 10.0, 28.0, 0.072


def is_available() -> bool:
    """Whether matplotlib is installed."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # it is blocked, or half-way through its import
        return False


def write_png(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write a picture to a file, in the order and the colours of the SVG.

    Raises:
        ImportError: If matplotlib is not installed; says how to get it.
    """
    if not is_available():
        raise ImportError(MISSING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(panel.rows) * _ROW + _EDGES for panel in picture.panels]
    figure = Figure(figsize=(_width(picture), sum(heights) + _LEGEND), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, axis in zip(picture.panels, axes, strict=True):
        _draw(panel, axis, figure.get_figwidth() - _LEFT, picture.span)
    axes[-1].set_xlim(*picture.span)
    axes[-1].set_xlabel(picture.unit)
    patches = [Patch(facecolor=COLOURS[name], label=name) for name in picture.categories]
    figure.legend(handles=patches, loc="outside upper left", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _width(picture: Picture) -> float:
    """Inches, so that the numbers fit into nearly all bars."""
    begin, end = picture.span
    needed = sorted(
        (len(bar.label) * _LETTER + 0.04) * (end - begin) / max(bar.end - bar.start, 1e-12)
        for bar in picture.bars()
        if bar.label
    )
    wanted = needed[(len(needed) - 1) * 9 // 10] if needed else 0.0
    return min(max(wanted + _LEFT, _NARROWEST), _WIDEST)


def _draw(panel: Panel, axis: Any, inches: float, span: tuple[float, float]) -> None:
    axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axis.set_yticks(range(len(panel.rows)), list(panel.rows), fontsize=9)
    axis.set_ylim(len(panel.rows) - 0.5, -0.5)
    axis.tick_params(left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    for row, bars in enumerate(panel.rows.values()):
        spans = [(bar.start, bar.end - bar.start) for bar in bars]
        shades = [(COLOURS[bar.category], 0.6**bar.chunk) for bar in bars]
        axis.broken_barh(spans, (row - 0.44, 0.88), facecolors=shades, edgecolor="white", linewidth=0.4)
        for bar in bars:
            room = (bar.end - bar.start) / (span[1] - span[0]) * inches
            size = next((size for size in (8, 6) if room >= len(bar.label) * size * _LETTER / 8), None)
            if bar.label and size is not None:
                axis.text((bar.start + bar.end) / 2, row, bar.label, ha="center", va="center", fontsize=size)
