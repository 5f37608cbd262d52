"""A failure on one rank ends all of them within seconds, with the user's own traceback and where it happened."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.launch import Failed, free_port, run_ranks, try_ranks
from tests.training import Outcome, fit

pytestmark = pytest.mark.alone
LIMIT = 10.0
ROOT = Path(__file__).parents[1]

SCRIPT = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from lightning.pytorch import LightningModule, Trainer
from lightning_pp import PipelineStrategy

torch.set_num_threads(1)
RANK = int(os.environ.get("LOCAL_RANK", "0"))
WHERE, WHO = sys.argv[1], int(sys.argv[2])

class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if WHERE == "dataset" and RANK == WHO and index == 17:
            raise ValueError("planted in the dataset")
        return torch.randn(8), torch.randn(3)

class Layer(nn.Linear):
    fails = False
    calls = 0
    def forward(self, x):
        if torch.is_grad_enabled() and type(x) is torch.Tensor:
            Layer.calls += 1
        if WHERE == "layer" and self.fails and Layer.calls > 20:
            raise ValueError("planted in a layer")
        y = super().forward(x)
        if WHERE == "backward" and self.fails and Layer.calls == 24:  # the last micro-batch of the sixth batch
            y.register_hook(planted)
        return y

def planted(grad):
    raise ValueError("planted in a backward")

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(8, 8) for _ in range(3))
        self.blocks[WHO].fails = True
        self.head = nn.Linear(8, 3)
    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            x = block(x)
        if WHERE == "loss" and batch_idx == 2:
            raise ValueError("planted in the loss")
        return F.mse_loss(self.head(x), y)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if WHERE == "hook" and RANK == WHO and batch_idx == 2:
            raise ValueError("planted in a hook")
        if WHERE == "killed" and RANK == WHO and batch_idx == 2:
            os.kill(os.getpid(), 9)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    Trainer(accelerator="cpu", devices=3, max_epochs=50, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, strategy=PipelineStrategy(
                stages=3, microbatches=4, split=["blocks.1", "blocks.2"])
            ).fit(Model(), DataLoader(Data(), batch_size=8))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failure") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(script: Path, *arguments: str) -> tuple[int, str, float]:
    """Exit code, output, and seconds from the failure until all processes were gone."""
    output: list[str] = []
    failed_at = None
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "MASTER_PORT": str(free_port())},
    ) as process:
        timer = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:  # ends when the last process has closed its end
            output.append(line)
            if failed_at is None and ("Traceback" in line or "terminated" in line):
                failed_at = time.monotonic()
        timer.cancel()
    return process.returncode, "".join(output), time.monotonic() - (failed_at or 0)


@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_layer_that_raises(script: Path, rank: str) -> None:
    code, output, seconds = run(script, "layer", rank)
    assert code != 0
    assert seconds < LIMIT
    assert "ValueError: planted in a layer" in output, output
    assert 'raise ValueError("planted in a layer")' in output, "the user's own line"
    assert f"Rank {rank} (stage {rank}) failed in {rank}F" in output
    assert f"in layer 'blocks.{rank}', micro-batch" in output
    assert "<-- here" in output
    assert f"The pipeline was stopped by rank {rank}:" in output or rank == "0", output


@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_last_backward_that_raises(script: Path, rank: str) -> None:
    """What the last stage shares is already being received then, by threads that nobody waits for."""
    code, output, seconds = run(script, "backward", rank)
    assert code != 0
    assert seconds < LIMIT
    assert "ValueError: planted in a backward" in output, output
    assert f"Rank {rank} (stage {rank}) failed in {rank}B3" in output, output


def test_a_loss_that_raises(script: Path) -> None:
    code, output, seconds = run(script, "loss", "0")
    assert code != 0
    assert seconds < LIMIT
    assert "ValueError: planted in the loss" in output
    assert "Rank 2 (stage 2) failed in 2F0" in output


@pytest.mark.parametrize("where", ["dataset", "hook"])
@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_failure_outside_of_the_step(script: Path, where: str, rank: str) -> None:
    code, output, seconds = run(script, where, rank)
    assert code != 0
    assert seconds < LIMIT
    assert f"ValueError: planted in {'a hook' if where == 'hook' else 'the dataset'}" in output


def test_a_killed_rank(script: Path) -> None:
    code, output, _ = run(script, "killed", "1")
    assert code != 0
    assert "lost its peer" in output or "terminated" in output


WITH_A_WORKER = """
import multiprocessing, time

from lightning_pp.launch.watcher import end_process

if __name__ == "__main__":
    worker = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    print(worker.pid, flush=True)
    end_process("It ends now.\\n")
"""


def test_a_process_that_is_ended_takes_its_workers_with_it(tmp_path: Path) -> None:
    """Workers of a fork server, the default from Python 3.14 on, outlived a process that did not end by itself."""
    path = tmp_path / "worker.py"
    path.write_text(WITH_A_WORKER)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, "It ends now.\n")
    deadline = time.monotonic() + 10
    while is_running(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(ended.stdout))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failure_that_the_script_catches_still_ends_the_others() -> None:
    """The rank that failed lives on here, so that its connections do not close by themselves."""
    start = time.monotonic()
    results = try_ranks(failing_and_waiting, 3, timeout=40)
    assert time.monotonic() - start < 30
    assert all(isinstance(result, Failed) or "planted" in result for result in results)
    assert sum("planted" in str(getattr(result, "text", result)) for result in results) == 3, results


def failing_and_waiting() -> str:
    import os

    import torch

    from tests.training import fit

    class PlantedError(Exception):
        pass

    from tests.models import MLP

    def loss(self: Any, batch: Any) -> Any:
        x, y = batch
        out = self.net(x)
        if os.environ["LOCAL_RANK"] == "2" and self.trainer.fit_loop.total_batch_idx == 2:
            raise PlantedError("planted")
        return torch.nn.functional.mse_loss(out, y)

    MLP.loss = loss  # type: ignore[method-assign]
    try:
        fit("MLP", {"stages": 3, "microbatches": 2}, devices=3)
    except Exception as error:
        text, cause = str(error), error.__cause__
        while cause is not None:
            text, cause = f"{text} {cause!r}", cause.__cause__
        time.sleep(5 if os.environ["LOCAL_RANK"] == "2" else 0)
        return text
    raise AssertionError("nothing failed")


class FailsOnce(Callback):
    """Fails on one rank in the middle of training."""

    outcome: Outcome

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("planted on one rank")


def fails_and_goes_on() -> tuple[str, int]:
    """A script that catches a failed run and goes on to the next one; returns what the first one said."""
    options: dict[str, Any] = {"strategy": {"stages": 2, "microbatches": 2}, "devices": 2}
    try:
        fit("MLP", callbacks=(FailsOnce,), **options)
    except (ValueError, RuntimeError) as error:
        text = str(error)
    return text, fit("MLP", **options).global_step


def test_a_script_goes_on_after_a_failed_run() -> None:
    """The processes were disconnected, and found the addresses of their first meeting: they waited for ever."""
    for text, steps in run_ranks(fails_and_goes_on, 2):
        assert "planted on one rank" in text
        assert steps == 6
