"""The schedules and the command line need the standard library only.

Importing ``lightning_pp.schedule`` runs ``lightning_pp/__init__.py``, which needs Lightning; so the check
runs in a process where an empty package of that name stands in for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, types
parent = types.ModuleType("lightning_pp")
parent.__path__ = [{folder!r}]
sys.modules["lightning_pp"] = parent
before = set(sys.modules)
{imports}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(loaded - set(sys.stdlib_module_names)))
"""


def foreign(imports: str) -> list[str]:
    """Runs imports in a fresh process; returns the packages they load beside the standard library."""
    program = PROGRAM.format(folder=str(ROOT / "lightning_pp"), imports=imports)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.split()


def test_loads_nothing_but_the_standard_library():
    assert foreign("import lightning_pp.schedule, lightning_pp.__main__") == ["lightning_pp"]


def test_the_check_can_fail():
    assert "pytest" in foreign("import lightning_pp.schedule, pytest")
