"""CSV: a round trip, torch's own reader, and errors that name the cell."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.schedule import SCHEDULES, build, check, from_csv, gpipe, read_csv, to_csv, write_csv


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip(name, tmp_path):
    schedule = build(name, 3, 5)
    assert from_csv(to_csv(schedule)) == schedule
    write_csv(schedule, tmp_path / "schedule.csv")
    assert read_csv(tmp_path / "schedule.csv") == schedule


def test_text():
    assert to_csv(gpipe(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def test_split_backward_round_trip(zb_h1, v_schedule):
    for schedule in (zb_h1, v_schedule):
        assert from_csv(to_csv(schedule)) == schedule


def test_torch_reads_and_writes_the_same(zb_h1):
    """The rows as torch's _load_csv reads them, and as its _dump_csv writes them back, with idle ticks."""
    action = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    rows = [[action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(to_csv(zb_h1)))]
    assert [[str(a) for a in row] for row in rows] == [[str(op) for op in ops] for ops in zb_h1.values()]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([None, *row, None] for row in rows)
    assert ",0F0,0F1" in text.getvalue()
    assert from_csv(text.getvalue()) == zb_h1


def test_blank_cells_and_rows_at_the_end():
    assert from_csv(" 0F0 ,,0B0,\r\n\r\n,,\r\n") == from_csv("0F0,0B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,xx", r"row 2 \(rank 1\), cell 2: 'xx' is not an op"),
        ("0F0,0SEND_F0", r"row 1 \(rank 0\), cell 2: 0SEND_F0 is a message; a file holds computations only"),
        ("0F0,0UNSHARD", "'0UNSHARD' is not an op"),
    ],
)
def test_names_the_cell(text, message):
    with pytest.raises(ValueError, match=message):
        from_csv(text)


def test_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read a schedule from '.*none\.csv'"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"cannot read a schedule from '.*binary\.csv'"):
        read_csv(tmp_path / "binary.csv")


CELL = st.sampled_from(
    ["0F0", "0B0", "0F1", "0B1", "1F0", "1B0", "1I0", "1W0", "", " ", "0SEND_F0", '"', "\n", "\x00", "é"]
)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40) | st.lists(CELL, max_size=14).map(",".join))
def test_raises_nothing_but_value_error(text):
    try:
        schedule = from_csv(text)
        check(schedule)
    except ValueError:
        return
    assert from_csv(to_csv(schedule)) == schedule
