"""docs/schedules.md shows what the package prints: its console blocks are run, and all docstring examples."""

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
from lightning_pp.schedule import SCHEDULES, Op, from_csv, lower

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ python -m lightning_pp ([^\n]+)\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), BLOCKS)
def test_console_block(capsys, command, output):
    main(shlex.split(command))
    assert output == capsys.readouterr().out


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
