"""docs/schedules.md and docs/why_1f1b.md show what the package prints: their commands and code are run, their tables
computed again. Also runs all docstring examples of the layer.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import lightning_pp.schedule
from lightning_pp.__main__ import main
from lightning_pp.schedule import (
    SCHEDULES,
    Costs,
    Op,
    eager_1f1b,
    from_csv,
    gpipe,
    in_flight,
    lower,
    one_f_one_b,
    phases,
    simulate,
    ticks,
)

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "schedules.md").read_text(encoding="utf-8")
WHY = (DOCS / "why_1f1b.md").read_text(encoding="utf-8")
CONSOLE = r"```console\n\$ python -m lightning_pp ([^\n]+)\n(.*?)```"
BLOCKS = re.findall(CONSOLE, TEXT, re.DOTALL)
WHY_BLOCKS = re.findall(CONSOLE, WHY, re.DOTALL)
WHY_CODE = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", WHY, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), BLOCKS + WHY_BLOCKS)
def test_console_block(capsys, monkeypatch, tmp_path, command, output):
    """Also the pictures that it writes: the pages show those in docs/images."""
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command))
    assert output == capsys.readouterr().out
    for written in tmp_path.glob("images/*"):
        assert written.read_bytes() == (DOCS / "images" / written.name).read_bytes()
    assert ("--svg" in command) == any(tmp_path.glob("images/*"))


def test_every_schedule_has_a_section_and_a_picture():
    shown = [command for command, _ in BLOCKS]
    for name in SCHEDULES:
        assert f"\n## `{name}`\n" in TEXT
        assert any(f"--schedule {name} " in command for command in shown)


def test_the_lowered_program_in_the_text():
    program, csv_text = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    )
    assert csv_text in TEXT
    assert program in TEXT
    assert list(lower(from_csv(csv_text)).programs[0]) == [Op.parse(word) for word in program.split()]


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(lightning_pp.schedule.__path__)])
def test_docstring_examples(name):
    module = importlib.import_module(f"lightning_pp.schedule.{name}")
    assert doctest.testmod(module).failed == 0
    assert module.__all__ == []


def test_python_block(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(block, {})
    plain, ahead = map(float, capsys.readouterr().out.split())
    assert 201 < ahead < plain


@pytest.mark.parametrize(("code", "output"), WHY_CODE)
def test_code_and_what_it_prints(capsys, code, output):
    exec(code, {})
    assert output == capsys.readouterr().out


def test_every_box_is_printed_by_the_package():
    boxes = re.findall(r"^```(\w+)\n", WHY, re.MULTILINE)
    assert boxes.count("console") == len(WHY_BLOCKS) > 0
    assert boxes.count("python") == boxes.count("text") == len(WHY_CODE) > 0
    assert len(boxes) == len(WHY_BLOCKS) + 2 * len(WHY_CODE)


def test_what_the_page_says_of_1f1b():
    for ranks in (2, 3, 4, 7):
        for mbs in range(1, 20):
            held = in_flight(one_f_one_b(ranks, mbs))
            assert held == {rank: min(mbs, ranks - rank) for rank in range(ranks)}
            assert set(in_flight(gpipe(ranks, mbs)).values()) == {mbs}
            for schedule in (gpipe(ranks, mbs), one_f_one_b(ranks, mbs)):
                for backward in (1, 2):
                    step = simulate(schedule, Costs(forward=1, backward=backward))
                    assert step.makespan == (mbs + ranks - 1) * (1 + backward)
                    assert step.bubble_fraction == pytest.approx((ranks - 1) / (mbs + ranks - 1))
            if mbs >= ranks:
                for rank, parts in phases(one_f_one_b(ranks, mbs)).items():
                    assert parts.warm_up == parts.cooldown == ranks - rank - 1
                    assert parts.steady == 2 * (mbs - ranks + rank + 1)
    slow = Costs(forward=[1, 1, 1.5, 1], backward=[2, 2, 3, 2])
    for schedule in (gpipe(4, 1000), one_f_one_b(4, 1000)):
        bubbles = simulate(schedule, slow).bubble_fractions
        assert bubbles.pop(2) < 0.01
        assert all(1 / 3 < bubble < 1 / 3 + 0.01 for bubble in bubbles.values())


def test_the_drawing_has_the_right_order_and_the_wrong_ticks():
    drawing = re.search(r'DRAWING = """\ntick[^\n]*\n(.*?)"""', WHY, re.DOTALL)[1]
    rows = [line.split("|")[1].split() for line in drawing.splitlines()]
    assert max(map(len, rows)) == 15
    csv_text = "\n".join(
        ",".join("" if cell == "." else f"{rank}{cell}" for cell in row) for rank, row in enumerate(rows)
    )
    assert from_csv(csv_text) == one_f_one_b(4, 6)
    assert len(ticks(from_csv(csv_text))[0]) == 18


def _longer(schedule, transfer, **costs):
    free = simulate(schedule).makespan
    return f"{simulate(schedule, Costs(forward=1, backward=2, transfer=transfer, **costs)).makespan / free - 1:+.1%}"


def test_the_tables_of_transfers():
    rows = {
        "1F1B, waited for": (one_f_one_b(4, 64), False),
        "1F1B": (one_f_one_b(4, 64), True),
        "1F1B, one more in flight on ranks 0 to 2": (one_f_one_b(4, 64, [1, 1, 1, 0]), True),
        "eager 1F1B": (eager_1f1b(4, 64), True),
    }
    for label, (schedule, overlap) in rows.items():
        parts = [_longer(schedule, time, overlap=overlap) for time in (0.05, 0.1, 0.2, 0.4)]
        assert f"| {label} | " + " | ".join(parts).replace("%", " %") + " |\n" in TEXT
    for ranks in (4, 8):
        slow = ranks // 2 - 1
        links = {edge: 0.02 for low in range(ranks - 1) for edge in ((low, low + 1), (low + 1, low))}
        links |= {(slow, slow + 1): 0.4, (slow + 1, slow): 0.4}
        ahead = one_f_one_b(ranks, 64, [int(rank <= slow) for rank in range(ranks)])
        parts = [_longer(schedule, links) for schedule in (one_f_one_b(ranks, 64), ahead, eager_1f1b(ranks, 64))]
        assert f"| {ranks} | " + " | ".join(parts).replace("%", " %") + " |\n" in TEXT


def test_the_measured_step():
    """Its picture cannot be made again, but it must have every op, and the numbers that the text gives."""
    picture = (DOCS / "images" / "measured_1f1b.svg").read_text(encoding="utf-8")
    ops = re.findall(r"<title>(\dF\d|\dB\d):", picture)
    assert sorted(ops) == sorted(2 * [str(op) for ops in one_f_one_b(4, 6).values() for op in ops])
    measured, ideal = re.findall(r"(\d+) ms, bubble ([\d.]+)%<", picture)
    assert f"took {measured[0]} ms and has a bubble of {measured[1]} %" in WHY
    assert f"ideal one takes {ideal[0]} ms, with {ideal[1]} %" in WHY
    assert simulate(one_f_one_b(4, 6), Costs(forward=40, backward=80)).makespan == 1080
