"""Imports go one way: a module uses its own row of the package and the rows below it, never one above.

The table is the one in CONTRIBUTING.md. The imports are read from the source, those inside functions and
under ``TYPE_CHECKING`` included, so nothing is hidden by importing late.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_pp"
ROOT = Path(__file__).parents[1] / PACKAGE
FOLDERS = {"schedule": 0, "partition": 1, "runtime": 2, "callbacks": 4, "planning": 4}
STRATEGY, FACE = 3, 5


def row(module: str) -> int:
    """The row of a module, named by its dotted path inside the package ("" is the package itself)."""
    top = module.split(".")[0]
    return FACE if top in ("", "__init__", "__main__") else FOLDERS.get(top, STRATEGY)


def imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a source file imports; ``package`` is where it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # "from lightning_pp import x" names a module or an export, so the name matters there.
            yield from ((node.lineno, f"{base}.{alias.name}" if base == PACKAGE else base) for alias in node.names)


def problem(source: str, target: str, siblings: set[str]) -> str | None:
    """What is wrong with module ``source`` (inside the package) importing ``target``, if anything."""
    top, _, inner = target.partition(".")
    if top != PACKAGE:
        if row(source) == 0 and top not in sys.stdlib_module_names:
            return f"{target} is not in the standard library"
        return None
    name = inner if inner.split(".")[0] in siblings else ""
    if row(name) > row(source):
        return f"row {row(source)} imports {target} of row {row(name)}"
    return None


def violations(root: Path) -> list[str]:
    """Every import in the tree that goes the wrong way, as ``file:line: reason``."""
    siblings = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        for line, target in imports(ast.parse(path.read_text(encoding="utf-8")), [PACKAGE, *parts[:-1]]):
            reason = problem(".".join(parts), target, siblings)
            if reason:
                found.append(f"{path.relative_to(root)}:{line}: {reason}")
    return found


def test_imports_go_one_way() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("schedule.op", 0),
        ("partition", 1),
        ("runtime.engine", 2),
        ("strategy", 3),
        ("precision", 3),
        ("callbacks.bubble", 4),
        ("planning.command", 4),
        ("", 5),
        ("__init__", 5),
        ("__main__", 5),
    ],
)
def test_row(module: str, expected: int) -> None:
    assert row(module) == expected


# --- The test can fail: every kind of wrong import is found in a made-up tree. ---


def plant(root: Path, files: dict[str, str]) -> None:
    """A complete small package, with the given files replaced."""
    empty = ["__init__", "__main__", "strategy", "precision"]
    empty += [f"{folder}/{name}" for folder in FOLDERS for name in ("__init__", "a", "b")]
    for name in empty:
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.pop(f"{name}.py", ""))
    assert not files, f"not in the made-up tree: {sorted(files)}"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("schedule/a.py", "import torch"),
        ("schedule/a.py", "from torch.utils import data"),
        ("schedule/a.py", "from lightning_pp.partition import a"),
        ("schedule/a.py", "from ..partition import a"),
        ("schedule/__init__.py", "from ..runtime.a import x"),
        ("partition/a.py", "import lightning_pp.runtime.b"),
        ("partition/a.py", "from lightning_pp import runtime"),
        ("partition/a.py", "from .. import strategy"),
        ("runtime/a.py", "from lightning_pp.strategy import PipelineStrategy"),
        ("runtime/a.py", "from lightning_pp import PipelineStrategy"),
        ("runtime/a.py", "import lightning_pp"),
        ("runtime/a.py", "def late():\n    from lightning_pp import precision"),
        ("runtime/a.py", "from lightning_pp.callbacks import a"),
        ("strategy.py", "from .callbacks import a"),
        ("strategy.py", "from lightning_pp import __main__"),
        ("callbacks/a.py", "from lightning_pp import PipelineStrategy"),
        ("callbacks/a.py", "import typing\nif typing.TYPE_CHECKING:\n    from lightning_pp import x"),
    ],
)
def test_wrong_import_is_found(tmp_path: Path, file: str, line: str) -> None:
    plant(tmp_path, {file: line})
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:{line.count(chr(10)) + 1}: ")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("schedule/a.py", "import csv, collections.abc"),
        ("schedule/a.py", "from .b import x"),
        ("schedule/a.py", "from lightning_pp.schedule.b import x"),
        ("schedule/a.py", "from lightning_pp import schedule"),
        ("partition/a.py", "import torch\nfrom ..schedule import b"),
        ("runtime/a.py", "from lightning_pp.partition.a import x\nfrom ..schedule.a import y"),
        ("precision.py", "from lightning_pp.strategy import x\nfrom .runtime import a"),
        ("callbacks/a.py", "from ..strategy import PipelineStrategy"),
        ("__main__.py", "from lightning_pp import PipelineStrategy\nimport lightning_pp.callbacks.a"),
        ("__init__.py", "from .callbacks.a import x\nfrom .strategy import y"),
    ],
)
def test_right_import_passes(tmp_path: Path, file: str, line: str) -> None:
    plant(tmp_path, {file: line})
    assert violations(tmp_path) == []


# --- The schedule layer runs where there is no torch. ---

# Loaded under a name of its own: importing lightning_pp.schedule would run lightning_pp first.
LOAD_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("alone", sys.argv[1], submodule_search_locations=[sys.argv[2]])
sys.modules["alone"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
heavy = sorted({"torch", "lightning", "numpy"} & sys.modules.keys())
sys.exit(f"loaded {', '.join(heavy)}" if heavy else 0)
"""


def load_alone(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOAD_ALONE, str(folder / "__init__.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_schedule_layer_loads_no_torch() -> None:
    result = load_alone(ROOT / "schedule")
    assert result.returncode == 0, result.stderr


def test_loading_torch_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from . import a")
    (tmp_path / "a.py").write_text("import torch")
    result = load_alone(tmp_path)
    assert result.returncode == 1
    assert "loaded" in result.stderr
    assert "torch" in result.stderr
