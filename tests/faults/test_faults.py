"""Each fault ends all ranks within seconds, with its cause printed once and the last checkpoint kept."""

from pathlib import Path

import pytest
import torch

from tests.faults.cases import CASES, SIZE, names_in, run_case
from tests.faults.processes import run_job


@pytest.mark.parametrize("name", CASES)
def test_a_fault(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (saved := tmp_path / "saved").mkdir()
    ended = run_job(tmp_path, run_case, SIZE, name, str(saved), everywhere=case.everywhere)
    print(f"{name}: {ended.seconds:.1f} s, exit codes {ended.codes}\n{ended.output}")
    assert all(ended.codes), "None was still there, 0 pretends that all was well"
    assert case.text in ended.output
    assert ended.tracebacks == case.tracebacks
    assert ended.seconds < case.limit
    assert names_in(saved) == case.kept
    for kept in ("kept.ckpt", "on_exception.ckpt"):
        if kept in case.kept:
            assert torch.load(saved / kept, weights_only=True)["global_step"] in (2, 4, 5)
