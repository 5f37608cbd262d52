"""The page of known faults is complete, and the tests that it names are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "known_faults.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- \*\*U(\d+)\*\* \(([^)]+)\)\. (.*(?:\n  .*)*)", PAGE, re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: characters that a reason has at least where no test is named
SHORTEST = 150


@cache
def _names_in(path: str) -> set[str]:
    """The names of the tests of a file, without running it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_all_are_there_in_order() -> None:
    assert [int(number) for number, _, _ in ENTRIES] == list(range(1, 102))


@pytest.mark.parametrize(("number", "source", "text"), ENTRIES, ids=[f"U{number}" for number, _, _ in ENTRIES])
def test_an_entry_names_tests_or_a_reason(number: str, source: str, text: str) -> None:
    named = NAMED.findall(text)
    assert text.count("tests/") == len(named), "each of them as `tests/file.py::test`"
    for path, name in named:
        assert name in _names_in(path), f"{path} has no {name}"
    assert named or len(text) >= SHORTEST


def test_there_is_hardly_an_entry_without_a_test() -> None:
    assert sum(not NAMED.search(text) for _, _, text in ENTRIES) <= 2
