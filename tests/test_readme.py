"""What the README and the guide show is what there is."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from lightning_pp import PipelineStrategy
from lightning_pp.schedule import build, grid

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_picture_is_the_one_that_is_printed() -> None:
    assert grid(build("1f1b", 4, 6)).strip() in README


@pytest.mark.parametrize("extra", ["examples", "test,zoo"])
def test_each_command_is_one_line_with_its_own_set_up(extra: str) -> None:
    command = {"examples": "python examples/train_gpt.py", "test,zoo": "python -m pytest"}[extra]
    assert f'python -m pip install -e ".[{extra}]" && {command}\n' in README
    assert command in README
    assert (ROOT / "examples" / "train_gpt.py").is_file()


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_python_blocks_parse(text: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_the_table_of_arguments_is_complete(text: str) -> None:
    parameters = inspect.signature(PipelineStrategy).parameters
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    assert list(rows) == list(parameters)
    for name, parameter in parameters.items():
        if name == "timeout":
            assert rows[name] == "30 minutes"
            assert parameter.default.total_seconds() == 30 * 60
        else:
            shown = parameter.default if not isinstance(parameter.default, str) else f'"{parameter.default}"'
            assert rows[name] == f"`{shown}`"
