"""Runs every fault and prints the table of docs/faults.md: ``python -m tests.faults.table``."""

import sys
import tempfile
from pathlib import Path

from tests.faults.cases import CASES, job_of, names_in
from tests.faults.disk import NotAllowedError
from tests.faults.processes import run_jobs

HEAD = "| Fault | All ranks gone after | What is printed | Tracebacks | Left |\n|---|---|---|---|---|"
#: how much of a line is shown, unless what matters comes later
_WIDTH = 110


def row(name: str, folder: Path) -> str:
    """One fault's line of the table."""
    case = CASES[name]
    with job_of(name, folder) as (job, saved):
        ended = run_jobs({name: job})[name]
        left = ", ".join(f"`{name}`" for name in names_in(saved))
    print(f"=== {name}: exit codes {ended.codes}\n{ended.output}", file=sys.stderr)
    assert all(ended.codes), ended
    line = next((line for line in ended.output.splitlines() if case.text in line), "?").strip()
    shown = line[: max(_WIDTH, line.find(case.text) + len(case.text))]
    return f"| {name} | {ended.seconds:.1f} s | `{shown}` | {ended.tracebacks} | {left} |"


def main() -> None:
    print(HEAD, flush=True)
    for name in CASES if len(sys.argv) == 1 else sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(row(name, Path(folder)), flush=True)
            except (AssertionError, NotAllowedError) as error:
                print(f"| {name} | FAILED {str(error)[:60]}", flush=True)


if __name__ == "__main__":
    main()
