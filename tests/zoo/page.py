"""Writes the table of docs/zoo.md from the results: ``python -m tests.zoo.page``."""

import re
import tempfile
from pathlib import Path

from tests.zoo import libraries
from tests.zoo.entries import BATCH, Entry
from tests.zoo.results import Zoo

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
BEGIN, END = "<!-- table: python -m tests.zoo.page -->\n", "<!-- end of table -->\n"
HEAD = "| model | how | 2 stages | 4 stages | checkpoint | layer calls | stage 1 of 2 begins at | |\n"


def render(zoo: Zoo) -> str:
    """The table, and with which versions it was made."""
    lines = [f"With {libraries.versions()}:\n\n", HEAD, "|---|---|---|---|---|---|---|---|\n"]
    for name, row in zoo.rows.items():
        calls, bounds = zoo.of(name, 2)[0].calls, zoo.of(name, 2)[0].bounds
        refused = row.refused is not None
        checkpoint = "" if refused else zoo.checkpoint_verdict(name)
        verdicts = [zoo.verdict(name, 2), zoo.verdict(name, 4), checkpoint]
        begins = f"`{calls[bounds[1]]}`" if calls else ""
        cells = [f"{row.library}: {row.title}", row.use, *verdicts, str(len(calls) or ""), begins, note(row)]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def note(row: Entry) -> str:
    """The last column."""
    parts = [f"{row.precision}, within {row.tolerance:.0e}" if row.tolerance > 1e-9 else ""]
    parts += ["" if row.microbatches == BATCH else f"microbatches={row.microbatches}", row.note]
    return "; ".join(filter(None, parts))


def table(page: str) -> str:
    """The table in the text of a page."""
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)]


def stable(text: str) -> list[list[str]]:
    """Of a table, what does not depend on versions: the rows, and what comes of comparing them."""
    return [re.split(r" \| ", line)[:5] for line in text.splitlines() if line.startswith("|")]


def main() -> None:
    """Run the zoo and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        new = render(Zoo(Path(folder)))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + new + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
