"""``python -m lightning_pp schedule``: its output word for word, its errors in one line."""

from __future__ import annotations

import os
import sys

import pytest

from lightning_pp.__main__ import main
from lightning_pp.schedule import one_f_one_b, to_csv, write_csv

SIZES = ["--stages", "2", "--microbatches", "3"]

EXPECTED = """\
tick     0  1  2  3  4  5  6  7
rank 0 | F0 F1 .  B0 F2 B1 .  B2
rank 1 | .  F0 B0 F1 B1 F2 B2 .

rank  warm-up  steady  cooldown  in flight  bubble
   0        1       4         1          2  0.2500
   1        0       6         0          1  0.2500

makespan 8
bubble   0.2500, closed form (P-1)/(M+P-1) = 1/4 = 0.2500
"""

TRACE = """
rank 1 holds the activations of
tick   0  .        0
tick   1  1F0      1  1F0
tick   2  1B0      1  1F0
tick   3  1F1      1  1F1
tick   4  1B1      1  1F1
tick   5  1F2      1  1F2
tick   6  1B2      1  1F2
tick   7  .        0
"""


def test_prints_grid_counts_and_bubble(capsys):
    assert main(["schedule", "--schedule", "1f1b", *SIZES]) == 0
    assert capsys.readouterr().out == EXPECTED


def test_a_long_grid_goes_on_below(capsys):
    main(["schedule", *SIZES])
    whole = capsys.readouterr().out.split("\n\n")
    main(["schedule", *SIZES, "--columns", "20"])
    first, second, *rest = capsys.readouterr().out.split("\n\n")
    assert rest == whole[1:]
    assert max(map(len, first.splitlines())) <= 20
    assert second.splitlines()[0] == "tick     4  5  6  7"
    for line, begin, end in zip(whole[0].splitlines(), first.splitlines(), second.splitlines(), strict=True):
        assert line[8:].split() == begin[8:].split() + end[8:].split()
    main(["schedule", *SIZES, "--columns", "1"])
    assert len(capsys.readouterr().out.split("\n\n")) == 8 + len(rest)


def test_a_grid_is_as_wide_as_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((20, 24)))
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    main(["schedule", *SIZES])
    assert max(map(len, capsys.readouterr().out.split("\n\n")[0].splitlines())) <= 20


def test_traces_a_rank(capsys):
    main(["schedule", *SIZES, "--trace", "1"])
    assert capsys.readouterr().out == EXPECTED + TRACE


def test_takes_costs(capsys):
    main(["schedule", "--stages", "4", "--microbatches", "8", "--forward", "1", "--backward", "2"])
    out = capsys.readouterr().out
    assert "\nmakespan 33\n" in out
    assert "= 3/11 = 0.2727" in out
    main(["schedule", "--stages", "4", "--microbatches", "64", "--backward", "2", "--transfer", "0.1"])
    assert "\nmakespan 211\n" in capsys.readouterr().out


def test_takes_a_file(capsys, tmp_path):
    write_csv(one_f_one_b(2, 3), tmp_path / "mine.csv")
    main(["schedule", "--schedule", str(tmp_path / "mine.csv"), *SIZES])
    assert capsys.readouterr().out == EXPECTED


COMPARISON = """\
schedule    makespan  bubble  in flight by rank
gpipe             33  0.2727  8 8 8 8
1f1b              33  0.2727  4 3 2 1
eager_1f1b        33  0.2727  7 5 3 1
"""


def test_compares_schedules(capsys, tmp_path):
    sizes = ["--stages", "4", "--microbatches", "8", "--backward", "2"]
    main(["schedule", "--compare", *sizes])
    assert capsys.readouterr().out == COMPARISON
    write_csv(one_f_one_b(4, 8), tmp_path / "mine.csv")
    main(["schedule", "--schedule", "gpipe", "--schedule", str(tmp_path / "mine.csv"), "--compare", *sizes])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines[1:]] == [["33", "0.2727"]] * 2
    assert len({line.rindex("0.2727") for line in lines[1:]}) == 1


def test_takes_costs_per_stage(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [2, 3], "backward": [2, 1]}')
    main(["schedule", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--costs", str(path)])
    assert "\nrank 1 | .  .  F0------ F1------ B0 B1 .  .  .\n" in capsys.readouterr().out


def test_draws(capsys, tmp_path):
    main(["schedule", *SIZES, "--svg", str(tmp_path / "a.svg")])
    assert capsys.readouterr().out == EXPECTED
    text = (tmp_path / "a.svg").read_text()
    assert ">1f1b: makespan 8, bubble 0.2500</text>" in text
    assert text.count('class="forward"') == 6 + 1
    main(["schedule", *SIZES, "--compare", "--svg", str(tmp_path / "a.svg")])
    assert (tmp_path / "a.svg").read_text().count('class="forward"') == 3 * 6 + 1


def test_draws_png(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit):
            main(["schedule", *SIZES, "--png", str(tmp_path / "a.png")])
    assert "pip install 'lightning-pp[pictures]'" in capsys.readouterr().err
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'pictures'")
    main(["schedule", *SIZES, "--png", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_splits_the_backward(capsys, tmp_path):
    (tmp_path / "split.csv").write_text("0F0,0I0,0W0\n")
    sizes = ["--stages", "1", "--microbatches", "1", "--input", "2", "--weight", "3"]
    main(["schedule", "--schedule", str(tmp_path / "split.csv"), *sizes])
    assert "rank 0 | F0 I0--- W0------\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: command"),
        (["plot"], "invalid choice: 'plot'"),
        (["schedule", "--stages", "2"], "the following arguments are required: --microbatches"),
        (["schedule", "--stages", "x", "--microbatches", "2"], "argument --stages: invalid int value: 'x'"),
        (
            ["schedule", "--stages", "0", "--microbatches", "2"],
            "num_ranks must be a whole number of at least 1, got 0",
        ),
        (
            ["schedule", "--schedule", "2f2b", *SIZES],
            "called '2f2b': use gpipe, 1f1b, eager_1f1b or a CSV file",
        ),
        (["schedule", *SIZES, "--trace", "2"], "there is no rank 2: the schedule has ranks 0 to 1"),
        (
            ["schedule", *SIZES, "--backward", "0"],
            "backward of stage 1 must be a finite number above 0, got 0.0",
        ),
        (["schedule", *SIZES, "--schedule", "gpipe", "--schedule", "1f1b"], "2 schedules: add --compare"),
        (["schedule", *SIZES, "--compare", "--trace", "0"], "--trace is about one schedule: leave out --compare"),
        (["schedule", *SIZES, "--costs", "a.json", "--transfer", "1"], "give costs by --costs or by --transfer"),
        (["schedule", *SIZES, "--costs", "none.json"], "cannot read costs from 'none.json'"),
        (["schedule", *SIZES, "--svg", "/nowhere/a.svg"], "cannot write a picture"),
        (["schedule", *SIZES, "--columns", "0"], "--columns 0: a whole number of at least 1"),
        (["schedule", *SIZES, "--transfer", "-1"], "must be a finite number of at least 0, got -1.0"),
    ],
)
def test_errors_are_one_line(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("python -m lightning_pp")
    assert message in err


def test_a_bad_file_is_one_line_too(capsys, tmp_path):
    schedule = one_f_one_b(2, 3)
    schedule[1].reverse()
    (tmp_path / "bad.csv").write_text(to_csv(schedule))
    with pytest.raises(SystemExit):
        main(["schedule", "--schedule", str(tmp_path / "bad.csv"), *SIZES])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "bad.csv': deadlock: 1B2 on rank 1 waits for 1F2" in err


def test_help_names_the_schedules(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["schedule", "--help"])
    assert exit_info.value.code == 0
    assert "gpipe, 1f1b, eager_1f1b" in capsys.readouterr().out
