"""Each fault ends all ranks within seconds, with its cause printed once and the last checkpoint kept."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.faults.cases import CASES, job_of, names_in
from tests.faults.disk import NotAllowedError
from tests.faults.processes import Ended, run_jobs

#: how many jobs are under way at once
AT_ONCE = 3

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Ended, Path] | str]]:
    """How the cases have ended whose tests were asked for, and where they saved; or why they could not run."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in tests if hasattr(item, "callspec")]
    found: dict[str, tuple[Ended, Path] | str] = {}
    jobs, saved = {}, {}
    with ExitStack() as stack:
        for number, name in enumerate(names):
            folder = tmp_path_factory.mktemp(f"fault_{number}_")
            try:
                jobs[name], saved[name] = stack.enter_context(job_of(name, folder))
            except NotAllowedError as error:
                found[name] = str(error)
        yield found | {name: (ended, saved[name]) for name, ended in run_jobs(jobs, AT_ONCE).items()}


@pytest.mark.parametrize("name", CASES)
def test_a_fault(name: str, ended: dict[str, tuple[Ended, Path] | str]) -> None:
    case, found = CASES[name], ended[name]
    if isinstance(found, str):
        pytest.skip(found)
    end, saved = found
    print(f"{name}: {end.seconds:.1f} s, exit codes {end.codes}\n{end.output}")
    assert all(end.codes), "None was still there, 0 pretends that all was well"
    assert case.text in end.output
    assert case.advice in end.output
    assert end.tracebacks == case.tracebacks
    assert end.seconds < case.limit
    assert names_in(saved) == case.kept
    for kept in ("kept.ckpt", "on_exception.ckpt"):
        if kept in case.kept:
            path = saved / kept / "meta.pt" if case.distributed else saved / kept
            assert torch.load(path, weights_only=True)["global_step"] in (2, 4, 5)
