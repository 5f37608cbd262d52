"""A process that dies, fails or stays away while a checkpoint is saved: the previous one stays, and nobody waits."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_pp import PipelineStrategy
from lightning_pp.saving.courier import Courier
from tests.checkpoints import Late, Scheduled, assert_alike, load
from tests.launch import Failed, run_ranks, try_ranks
from tests.training import QUIET

#: no rank may be there longer than this after another has failed, seconds
pytestmark = pytest.mark.alone
LIMIT = 20.0


def run(callback: Any, *further: Any, stages: int = 2, **strategy: Any) -> Trainer:
    torch.manual_seed(5)
    options: dict[str, Any] = {}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=2, **strategy)
    callbacks = [callback, *further]
    options |= {**QUIET, "precision": "64-true", "enable_checkpointing": bool(further)}
    trainer = Trainer(accelerator="cpu", devices=max(1, stages), max_epochs=2, callbacks=callbacks, **options)
    trainer.fit(Scheduled(), Scheduled.batches(10))
    return trainer


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SaveTwice(Callback):
    """Saves after steps 1 and 2, one over the other; something happens on one rank between them."""

    def __init__(self, path: str, happening: str, rank: int) -> None:
        self.path = path
        self.happening = happening
        self.rank = rank

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            getattr(self, self.happening)()
        if trainer.global_step <= 2:
            trainer.save_checkpoint(self.path)

    def dies_while_writing(self) -> None:
        whole = torch.save

        def half(content: Any, file: Any) -> None:
            whole(content, file)
            file.truncate(file.tell() // 2)
            file.flush()
            die()

        torch.save = half  # type: ignore[assignment]

    def dies_while_sending(self) -> None:
        send, sent = Courier._send, []

        def once(courier: Courier, *args: Any) -> None:
            sent.append(0)
            if len(sent) > 8:
                die()
            send(courier, *args)

        Courier._send = once  # type: ignore[method-assign]

    def dies_in_its_part(self) -> None:
        FileSystemWriter.write_data = die  # type: ignore[assignment, method-assign]

    def cannot_write(self) -> None:
        def fail(*args: Any) -> None:
            raise OSError("No space left on device")

        FileSystemWriter.write_data = torch.save = fail  # type: ignore[assignment, method-assign]


def save_twice(path: str, happening: str, rank: int, folder: bool) -> None:
    run(SaveTwice(path, happening, rank), save_distributed_checkpoint=folder)


@pytest.mark.parametrize(
    ("happening", "rank", "folder", "message"),
    [
        ("dies_while_writing", 0, False, "Rank 0 has ended while rank 1 waited for it"),
        ("dies_while_sending", 1, False, "Rank 1 has ended while rank 0 waited for it"),
        ("dies_in_its_part", 1, True, "Rank 1 has ended while rank 0 waited for it"),
        ("cannot_write", 0, False, "Rank 0 could not write the checkpoint: OSError: No space left on device"),
        ("cannot_write", 1, True, "OSError: rank 1: OSError: No space left on device"),
    ],
)
def test_the_previous_checkpoint_stays(tmp_path: Path, happening: str, rank: int, folder: bool, message: str) -> None:
    path = tmp_path / "model.ckpt"
    start = time.monotonic()
    results = try_ranks(save_twice, 2, str(path), happening, rank, folder)
    assert time.monotonic() - start < LIMIT
    assert all(isinstance(result, Failed) for result in results), results
    assert message in "\n".join(result.text for result in results)
    if happening.startswith("dies"):
        assert "exit code -9" in results[rank].text
    assert load(path / "meta.pt" if folder else path)["global_step"] == 1
    if folder:
        assert "model.head.weight" in FileSystemReader(path).read_metadata().state_dict_metadata
    assert all(other.name.startswith(".") for other in tmp_path.iterdir() if other != path)


class SaveOnRankZero(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 1:
            trainer.save_checkpoint("never.ckpt")


def save_on_rank_zero(when: str) -> None:
    if when == "during":
        run(SaveOnRankZero(), timeout=timedelta(seconds=3))
        return
    trainer = run(Callback())
    if trainer.is_global_zero:
        trainer.save_checkpoint("never.ckpt")


@pytest.mark.parametrize("when", ["during", "after"])
def test_saving_on_rank_zero_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The one who waits says for whom, and what to do."""
    monkeypatch.chdir(tmp_path)
    results = try_ranks(save_on_rank_zero, 2, when)
    assert "call trainer.save_checkpoint on every rank, not on rank 0 alone" in results[0].text
    if when == "during":
        assert "Rank 0 waited 0:00:03 for rank 1." in results[0].text
        assert isinstance(results[1], Failed)
    assert not list(tmp_path.iterdir())


class Raise(Callback):
    """Fails after step 2 on some ranks, or on one rank a step later than on the other."""

    def __init__(self, steps: dict[int, int]) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.steps.get(trainer.global_rank) == trainer.global_step:
            raise ValueError("planted")


def fail(folder: str, steps: dict[int, int], stages: int) -> None:
    run(Raise(steps), OnExceptionCheckpoint(folder), stages=stages)


def test_an_exception_on_all_ranks_leaves_a_checkpoint(tmp_path: Path) -> None:
    results = try_ranks(fail, 2, str(tmp_path / "ours"), {0: 2, 1: 2}, 2)
    results += try_ranks(fail, 1, str(tmp_path / "theirs"), {0: 2}, 0)
    assert all("ValueError: planted" in result.text for result in results)
    ours, theirs = (load(tmp_path / name / "on_exception.ckpt") for name in ("ours", "theirs"))
    assert ours["global_step"] == 2
    assert list(ours) == list(theirs)
    assert list(ours["optimizer_states"][0]["state"]) == list(theirs["optimizer_states"][0]["state"])
    for name in ("state_dict", "optimizer_states", "loops", "lr_schedulers"):
        assert_alike(ours[name], theirs[name])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_keeps_nobody(tmp_path: Path, rank: int) -> None:
    """What cannot be saved is not waited for, and the failure that is told is the first one."""
    start = time.monotonic()
    results = try_ranks(fail, 2, str(tmp_path), {rank: 2}, 2)
    assert time.monotonic() - start < LIMIT
    assert "ValueError: planted" in results[rank].text
    assert "PipelineError" not in results[rank].text
    assert f"The pipeline was stopped by rank {rank}: ValueError: planted" in results[1 - rank].text or rank == 0
    assert not list(tmp_path.iterdir())


def fail_early(folder: str) -> None:
    strategy = PipelineStrategy(stages=2, split=["not there"])
    keeper = OnExceptionCheckpoint(folder)
    Trainer(
        accelerator="cpu", devices=2, max_epochs=1, callbacks=[keeper], strategy=strategy,
        **{**QUIET, "enable_checkpointing": True},
    ).fit(Late(), Scheduled.batches(10))  # fmt: skip


def test_a_model_that_is_not_there_yet_is_not_saved(tmp_path: Path) -> None:
    """Its parameters are without memory when its cut fails."""
    for result in try_ranks(fail_early, 2, str(tmp_path)):
        assert "MisconfigurationException" in result.text.splitlines()[-1]
        assert "not there" in result.text
    assert not list(tmp_path.iterdir())


def save_after_failure() -> None:
    callback = Raise({0: 2, 1: 2})
    torch.manual_seed(5)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, callbacks=[callback], **QUIET,
        strategy=PipelineStrategy(stages=2),
    )  # fmt: skip
    with pytest.raises(ValueError, match="planted"):
        trainer.fit(Scheduled().float(), Scheduled.batches(10))
    with pytest.raises(RuntimeError, match="use OnExceptionCheckpoint"):
        trainer.save_checkpoint("never.ckpt")


def test_saving_after_a_failure_says_how(tmp_path: Path) -> None:
    run_ranks(save_after_failure, 2)
