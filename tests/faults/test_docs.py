"""The table in docs/faults.md says what the cases say: each has its row, and no row is left of one that has gone."""

from pathlib import Path

from tests.faults.cases import CASES
from tests.faults.table import HEAD

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def rows() -> dict[str, list[str]]:
    """The other cells of each row, by the first."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(HEAD) + len(HEAD) :].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: others for name, *others in cells}


def test_every_case_has_its_row() -> None:
    assert list(rows()) == list(CASES)


def test_rows_say_what_is_checked() -> None:
    for name, (seconds, printed, tracebacks, left) in rows().items():
        case = CASES[name]
        assert case.text in printed, name
        assert tracebacks == str(case.tracebacks), name
        assert tuple(left.replace("`", "").split(", ")) == case.kept, name
        assert float(seconds.removesuffix(" s")) < case.limit, name
