"""Ops: one text form, read back exactly, and nothing but ValueError for anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pp.schedule import Kind, Op, mark

OPS = st.builds(Op, st.integers(0, 999), st.sampled_from(Kind), st.integers(0, 999))


def test_prints_stage_kind_microbatch():
    assert str(Op(2, Kind.F, 3)) == "2F3"
    assert f"{Op(2, Kind.SEND_F, 3)}" == "2SEND_F3"
    assert Op.parse(" 2F3 ") == Op(2, Kind.F, 3)


@given(OPS)
def test_text_round_trip(op):
    assert Op.parse(str(op)) == op


@given(st.text(max_size=12) | st.text("0123456789FBIWSENDRCV_- ", max_size=12))
def test_parse_raises_nothing_but_value_error(text):
    try:
        op = Op.parse(text)
    except ValueError:
        return
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F3", "2F", "2X3", "-1F3", "2F3B4", "2f3", "2F³", "None"])
def test_parse_names_what_it_was_given(text):
    with pytest.raises(ValueError, match="is not an op: write the stage, the kind") as error:
        Op.parse(text)
    assert repr(text) in str(error.value)


def test_ops_are_values():
    assert sorted({Op(1, Kind.F, 0), Op(0, Kind.F, 1), Op(0, Kind.F, 1)}) == [
        Op(0, Kind.F, 1),
        Op(1, Kind.F, 0),
    ]
    with pytest.raises(AttributeError):
        Op(0, Kind.F, 0).mb = 1


def test_mark_shows_the_neighbourhood():
    program = [Op(0, Kind.F, mb) for mb in range(20)]
    text = mark(program, 10, "waits for 1B0")
    assert text == ("... 0F2 0F3 0F4 0F5 0F6 0F7 0F8 0F9 [0F10 <-- here, waits for 1B0] 0F11 0F12 0F13 0F14 ...")
    assert mark(program[:2], 0) == "[0F0 <-- here] 0F1"
