"""Runs every fault and prints the table of docs/faults.md: ``python -m tests.faults.table``."""

import sys
import tempfile
from pathlib import Path

from tests.faults.cases import CASES, SIZE, names_in, run_case
from tests.faults.processes import run_job

HEAD = "| Fault | All ranks gone after | What is printed | Tracebacks | Left |\n|---|---|---|---|---|"


def row(name: str, folder: Path) -> str:
    """One fault's line of the table."""
    case = CASES[name]
    (saved := folder / "saved").mkdir()
    ended = run_job(folder, run_case, SIZE, name, str(saved), everywhere=case.everywhere, timeout=100)
    print(f"=== {name}: exit codes {ended.codes}\n{ended.output}", file=sys.stderr)
    assert all(ended.codes), ended
    line = next((line for line in ended.output.splitlines() if case.text in line), "?").strip()
    left = ", ".join(f"`{name}`" for name in names_in(saved))
    return f"| {name} | {ended.seconds:.1f} s | `{line[:110]}` | {ended.tracebacks} | {left} |"


def main() -> None:
    print(HEAD, flush=True)
    for name in CASES if len(sys.argv) == 1 else sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(row(name, Path(folder)), flush=True)
            except AssertionError as error:
                print(f"| {name} | FAILED {str(error)[:60]}", flush=True)


if __name__ == "__main__":
    main()
