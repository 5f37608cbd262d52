"""What the documentation points to is there: pages, headings, files and folders."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that mkdocs gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    """In backquotes: ``folder/file.py``, and ``folder/`` where it says what is where; from the root or the package."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    names = re.findall(r"`(?:python )?((?:[\w.]+/)+\w+\.(?:py|yaml|toml))[` ]", text)
    if page.name == "CONTRIBUTING.md":
        folders = re.findall(r"`((?:[\w.]+/)+)`", text)
        assert len(folders) > 10
        names += folders
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "lightning_pp" / name).exists(), name


def test_every_page_is_in_the_menu_and_in_the_index() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in menu
        assert page.name == "index.md" or f"]({page.name})" in index
