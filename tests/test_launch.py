"""How users start it: a plain script, torchrun, by name, twice in one script."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import os, sys, torch
from lightning.pytorch import Trainer
import lightning_pp
from tests.models import MLP

torch.set_num_threads(1)

def train(strategy):
    torch.manual_seed(0)
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=2, strategy=strategy, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(MLP(), MLP.loader())
    return trainer

if __name__ == "__main__":
    first = train("pipeline" if sys.argv[1] == "name" else lightning_pp.PipelineStrategy(stages=2, microbatches=4))
    runs = [first] if sys.argv[1] != "twice" else [first, train(lightning_pp.PipelineStrategy(stages=2))]
    for trainer in runs:
        loss = trainer.callback_metrics["train_loss_epoch"].item()
        line = (f"rank {trainer.global_rank} of {trainer.world_size}, stage {trainer.strategy.stage_index} of"
                f" {trainer.strategy.num_stages}, replica {trainer.strategy.data_parallel_rank} of"
                f" {trainer.strategy.data_parallel_size}: loss {loss:.6f}\\n")
        os.write(1, line.encode())  # whole lines: the processes share one pipe
"""


def run(script: Path, *command: str) -> list[str]:
    script.write_text(textwrap.dedent(SCRIPT))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.parametrize("how", ["class", "name", "twice"])
def test_a_plain_script(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    lines = run(script, sys.executable, str(script), how)
    expected = [f"rank {rank} of 2, stage {rank} of 2, replica 0 of 1" for rank in (0, 1)]
    assert [line.split(":")[0] for line in lines] == sorted(expected * (2 if how == "twice" else 1))
    assert len({line.split("loss ")[1] for line in lines}) == 1, lines


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = run(
        script, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), "class",
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == [
        f"rank {rank} of 2, stage {rank} of 2, replica 0 of 1" for rank in (0, 1)
    ]
    assert len({line.split("loss ")[1] for line in lines}) == 1
