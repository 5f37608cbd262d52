"""SLURM, faked by the variables that ``srun`` sets: two tasks, each on a node of its own."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import assert_same, finish, plain, program, results, run, started
from tests.program import train

EPOCHS = 5
OPTIONS: dict[str, Any] = {
    "trainer": {"devices": 1, "num_nodes": 2, "max_epochs": EPOCHS},
    "strategy": {"stages": 2, "microbatches": 3},
}


def free_job() -> int:
    """A job number: Lightning takes 15000 and its last four digits for the port."""
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 15000 + job % 10000)):
                return 10000 + job
    raise AssertionError("no free port")


def tasks(options: dict[str, Any], job: int, **variables: str) -> list[tuple[list[str], dict[str, str]]]:
    """What ``srun`` starts."""
    common = {
        "SLURM_JOB_ID": job, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 1,
        "SLURM_NNODES": 2, "SLURM_NODELIST": "localhost,elsewhere", "SLURM_LOCALID": 0,
    } | variables  # fmt: skip
    return [program(options, **common, SLURM_PROCID=rank, SLURM_NODEID=rank) for rank in (0, 1)]


def test_a_job_that_is_requeued_goes_on_where_it_was(tmp_path: Path) -> None:
    """SLURM's warning reaches one task in the middle of training; the job is run again and ends as if nothing was."""
    scontrol, calls = tmp_path / "scontrol", tmp_path / "calls"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    options = {**OPTIONS, "trainer": {**OPTIONS["trainer"], "default_root_dir": str(tmp_path)}}
    job = free_job()
    with started(*tasks({**options, "pause": 0.2}, job, PATH=path)) as running:
        running[1].wait_for("rank 1")
        running[1].process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not calls.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for one in running:  # what SLURM does next
            one.process.send_signal(signal.SIGTERM)
        stopped = finish(running, timeout=30)
    assert [code for code, _ in stopped] == [0, 0], stopped
    assert calls.read_text() == f"requeue {job}\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_file()
    found = results(run(*tasks(options, job)))
    assert [(one["rank"], one["world_size"], one["node"], one["stage"]) for one in found] == [
        (0, 2, 0, 0),
        (1, 2, 1, 1),
    ]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    whole = plain(trainer={"max_epochs": EPOCHS, "max_steps": saved["global_step"]})
    assert 1 < saved["global_step"] < 3 * EPOCHS
    assert {name: tensor.sum().item() for name, tensor in saved["state_dict"].items()} == pytest.approx(
        whole["parameters"], rel=0, abs=1e-9
    )
    assert_same(found, plain(trainer={"max_epochs": EPOCHS}, checkpoint=str(tmp_path / "hpc_ckpt_1.ckpt")))


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SLURM_NTASKS_PER_NODE", "`devices=1` in Lightning, but the number of tasks per node configured in SLURM"),
        ("SLURM_NNODES", "`num_nodes=2` in Lightning, but the number of nodes configured in SLURM"),
    ],
)
def test_what_does_not_fit_the_job_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    """Lightning's own words, before anybody waits for a task that does not exist."""
    for name, value in tasks(OPTIONS, 1)[1][1].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(variable, "3")
    with pytest.raises(ValueError, match=text):
        train(OPTIONS)
