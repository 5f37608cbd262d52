"""Costs from files: both formats, and errors that name the file and what is wrong in it."""

from __future__ import annotations

import pytest

from lightning_pp.schedule import Costs
from lightning_pp.schedule.costsfile import read_costs


def test_json(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 2], "backward": 3, "weight": 1.5, "transfer": 0.25}')
    assert read_costs(path, 2) == Costs(forward=[1, 2], backward=3, input=[1, 2], weight=1.5, transfer=0.25)


def test_csv(tmp_path):
    path = tmp_path / "costs.csv"
    path.write_text("stage, backward, forward\n0, 2, 1\n1, 2.5, 1.5\n\n")
    forward, backward = [1.0, 1.5], [2.0, 2.5]
    assert read_costs(path, 2) == Costs(forward=forward, backward=backward, input=forward, weight=forward)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1]", "write an object"),
        ("a.json", "{", "Expecting property name"),
        ("a.json", '{"forward": 1}', "backward is missing"),
        ("a.json", '{"forward": "1", "backward": 1}', "forward must be a number or a list with a number per stage"),
        ("a.json", '{"forward": true, "backward": 1}', "forward must be a number or a list with a number per stage"),
        ("a.json", '{"forward": [1], "backward": 1}', "forward has 1 numbers for 2 stages"),
        ("a.json", '{"forward": 1, "backward": 1, "sideways": 1}', "there is no cost 'sideways': use forward,"),
        ("a.json", '{"forward": 1, "backward": 1, "transfer": [1, 1]}', "transfer is one number"),
        ("a.csv", "", "write a line with names"),
        ("a.csv", "forward,backward\n1,1\n", "forward has 1 numbers for 2 stages"),
        ("a.csv", "forward,backward\n1,1\n1\n", "each line has 2 cells, as the first has, but one is '1'"),
        ("a.csv", "forward,backward\n1,1\n1,x\n", "could not convert string to float: 'x'"),
        ("a.csv", "stage,forward,backward\n1,1,1\n0,1,1\n", "the stages must be 0, 1, 2, ..."),
        ("a.csv", "forward,backward\n", "forward is missing"),
    ],
)
def test_errors(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="cannot read costs from ") as caught:
        read_costs(tmp_path / name, 2)
    assert name in str(caught.value)
    assert message in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_costs(tmp_path / "none.json", 2)
