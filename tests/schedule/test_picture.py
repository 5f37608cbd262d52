"""Pictures: every computation is in them, at its place; a known one word for word; numbers where there is room."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_pp.callbacks.png import write_png
from lightning_pp.schedule import Costs, gpipe, one_f_one_b, simulate
from lightning_pp.schedule.picture import Panel, Picture, bands, panel_of
from lightning_pp.schedule.svg import to_svg

GOLDEN = Path(__file__).with_name("1f1b.svg")
SVG = "{http://www.w3.org/2000/svg}"


def bars(text: str, category: str) -> list[ElementTree.Element]:
    """The bars of a category; those of the legend say nothing."""
    return [bar for bar in ElementTree.fromstring(text).iter(f"{SVG}rect") if bar.get("class") == category and len(bar)]


def names(text: str, category: str) -> list[str]:
    return [(bar[0].text or "").partition(":")[0] for bar in bars(text, category)]


def test_a_known_picture():
    picture = Picture([panel_of(simulate(one_f_one_b(2, 3), Costs(1, 2)), "1f1b")])
    assert to_svg(picture) == GOLDEN.read_text(encoding="utf-8")


def test_every_computation_is_drawn_at_its_place():
    timeline = simulate(one_f_one_b(3, 4), Costs([1, 2, 1], [2, 3, 2]))
    text = to_svg(Picture([panel_of(timeline, "a <b>", scale=10)], "ms"))
    for kind, category in (("F", "forward"), ("B", "backward")):
        spans = [span for span in timeline.spans if span.op.kind.value == kind]
        assert names(text, category) == [str(span.op) for span in spans]
        found = [(float(bar.get("x", "")), float(bar.get("width", ""))) for bar in bars(text, category)]
        begin, end = min(span.start for span in spans), max(span.end for span in spans)
        left = min(x for x, _ in found)
        per_unit = (max(map(sum, found)) - left) / (end - begin)
        for (x, width), span in zip(found, spans, strict=True):
            assert x == pytest.approx(left + (span.start - begin) * per_unit, abs=0.02)
            assert width == pytest.approx((span.end - span.start) * per_unit, abs=0.02)
    idle = sum(float(bar.get("width", "")) for bar in bars(text, "wait"))
    assert idle / per_unit == pytest.approx(sum(timeline.idle.values()), abs=0.05)
    assert "a &lt;b&gt;" in text
    assert " ms</text>" in text


def test_all_numbers_fit_for_8_ranks_and_32_micro_batches():
    panels = [panel_of(simulate(make(8, 32), Costs(1, 2)), make.__name__) for make in (one_f_one_b, gpipe)]
    text = to_svg(Picture(panels))
    numbers = re.findall(r'<text class="mb"[^>]*>(\d+)</text>', text)
    assert len(numbers) == 2 * 8 * 32 * 2 + _halved(panels, 3)
    assert 'class="small"' not in text.partition("</style>")[2]
    assert float(ElementTree.fromstring(text).get("width", "")) <= 950  # nearly as wide as a page shows it


def _halved(panels: list[Panel], number: int) -> int:
    """Bars that the edges of so many bands divide in the middle: both halves say their number."""
    end = Picture(panels).span[1]
    edges = [end * at / number for at in range(1, number)]
    bars = [bar for panel in panels for row in panel.rows.values() for bar in row if bar.label]
    return sum(bar.start + bar.end == pytest.approx(2 * edge) for bar in bars for edge in edges)


def test_a_long_step_goes_on_below_and_loses_nothing():
    timeline = simulate(one_f_one_b(3, 60), Costs([1, 2, 1], [2, 3, 2]))
    picture = Picture([panel_of(timeline, "long")])
    found = bands(picture, 860, lambda label: 20.0)
    assert len(found) > 2
    assert (found[0].begin, found[-1].end) == picture.span
    assert [band.end for band in found[:-1]] == [band.begin for band in found[1:]]
    assert [band.panels[0].title for band in found] == ["long"] + [""] * (len(found) - 1)
    text = to_svg(picture)
    per_unit = 0.0
    for kind, category in (("F", "forward"), ("B", "backward")):
        expected = {str(span.op): span.end - span.start for span in timeline.spans if span.op.kind.value == kind}
        drawn = dict.fromkeys(expected, 0.0)
        for name, bar in zip(names(text, category), bars(text, category), strict=True):
            drawn[name] += float(bar.get("width", ""))
        per_unit = per_unit or drawn["0F0"]
        assert drawn == pytest.approx({name: per_unit * time for name, time in expected.items()}, abs=0.05)
    one, other = panel_of(timeline, "one"), panel_of(timeline, "other")
    titles = [[panel.title for panel in band.panels] for band in bands(Picture([one, other]), 860, lambda label: 20.0)]
    assert titles == [["one", "other"]] * len(found)


def test_more_bands_than_there_may_be_are_not_tried():
    picture = Picture([panel_of(simulate(one_f_one_b(2, 2000)), "very long")])
    assert len(bands(picture, 860, lambda label: 20.0)) == 1


def test_a_number_without_room_is_left_out():
    timeline = simulate(gpipe(1, 12), Costs(forward=0.001, backward=100.0))
    text = to_svg(Picture([panel_of(timeline, "long and short")]))
    assert len(names(text, "forward")) == len(names(text, "backward")) == 12
    assert len(re.findall(r'<text class="(?:mb|small)"', text)) == 12


def test_stages_of_one_rank_have_shades(v_schedule):
    text = to_svg(Picture([panel_of(simulate(v_schedule), "v")]))
    found = {
        name: bar.get("fill-opacity") for name, bar in zip(names(text, "forward"), bars(text, "forward"), strict=True)
    }
    assert found["0F0"] is found["1F0"] is None
    assert found["3F0"] == found["2F0"] == "0.60"
    assert ">rank 1</text>" in text
    assert names(text, "weights") == ["3W1", "1W1"]


def test_png(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'pictures'")
    write_png(Picture([panel_of(simulate(one_f_one_b(4, 6)), "1f1b")]), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-pp\[pictures\]'"):
        write_png(Picture([panel_of(simulate(one_f_one_b(4, 6)), "1f1b")]), tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
