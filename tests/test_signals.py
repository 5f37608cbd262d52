"""A signal that reaches one process stops all of them after the same batch, where they can save together."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.commands import finish, program, started

PACED = {"trainer": {"devices": 2, "max_epochs": 40}, "strategy": {"stages": 2, "microbatches": 3}, "pause": 0.1}


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_for_one_rank_stops_all_after_the_same_batch(rank: int, tmp_path: Path) -> None:
    with started(program({**PACED, "rescue": str(tmp_path)})) as running:
        line = running[0].wait_for(f" rank {rank}\n")
        os.kill(int(line.split()[3]), signal.SIGTERM)
        start = time.monotonic()
        ((code, output),) = finish(running, timeout=60)
        assert time.monotonic() - start < 30
    assert code == 0, output  # as without the strategy: a stop that was asked for is no failure
    last = [max(int(line.split()[1]) for line in output.splitlines() if line.endswith(f" rank {r}")) for r in (0, 1)]
    assert last[0] == last[1] < 60, output
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == last[0]
