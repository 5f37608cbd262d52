"""What is loaded, what of it is read, and what is said where file and model differ."""

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineStrategy
from tests.checkpoints import Counter, load, train, train_all
from tests.launch import run_ranks
from tests.training import QUIET

EDITS: dict[str, Callable[[MutableMapping[str, Any]], Any]] = {
    "alias": lambda state: state.pop("head.weight"),
    "missing": lambda state: (state.pop("blocks.0.qkv.weight"), state.pop("blocks.3.qkv.weight")),
    "unexpected": lambda state: state.update({"further.weight": torch.ones(1)}),
    "shape": lambda state: state.update({"blocks.3.qkv.weight": torch.ones(2, 2)}),
}


class Loads(Callback):
    """Loads in the middle of a run what does not quite fit the model."""

    def __init__(self, *sources: str) -> None:
        self.sources = sources
        self.messages: dict[tuple[str, str], str] = {}
        self.equal: dict[tuple[str, str], bool] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for source in self.sources:
            expected = load(self.sources[0])["state_dict"]
            for name, edit in EDITS.items():
                checkpoint = trainer.strategy.load_checkpoint(source)
                edit(checkpoint["state_dict"])
                with pytest.raises(RuntimeError) as caught:
                    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
                self.messages[source, name] = str(caught.value)
                if name != "shape":
                    with torch.no_grad():
                        for parameter in pl_module.parameters():
                            parameter.zero_()
                    trainer.strategy.load_model_state_dict(checkpoint, strict=False)
                    own = {key: value for key, value in pl_module.state_dict().items() if not value.is_meta}
                    self.equal[source, name] = all(
                        torch.equal(value, expected[key]) for key, value in own.items() if "qkv.weight" not in key
                    )


def load_edited(folder: str, stages: int) -> tuple[list[Any], list[Any]]:
    sources = [f"{folder}/file/mid.ckpt"]
    if stages:
        train(str(stages), f"{folder}/parts", save_distributed_checkpoint=True)
        sources.append(f"{folder}/parts/mid.ckpt")
    loads = Loads(*sources)
    train(str(stages) if stages else "plain", f"{folder}/file", callbacks=(loads,))
    return list(loads.messages.values()), list(loads.equal.values())


def test_what_does_not_fit_is_told_as_without_the_strategy(tmp_path: Path) -> None:
    """On all ranks, whichever of them holds it, for files and folders; a missing name of a tied weight, too."""
    ((messages, equal),) = run_ranks(load_edited, 1, str(tmp_path / "plain"), 0)
    assert all(equal)
    assert len(messages) == len(EDITS)
    assert all("Error(s) in loading state_dict for Scheduled" in message for message in messages)
    for found, is_equal in run_ranks(load_edited, 2, str(tmp_path / "piped"), 2):
        assert found == messages * 2
        assert is_equal == equal * 2


def resume_from_parts(folder: str) -> tuple[set[str], set[str], set[str]]:
    """Parameters whose values were read and that are here, and what else was read."""
    train("2", folder, save_distributed_checkpoint=True)
    read: list[str] = []
    original = FileSystemReader.read_data

    def read_data(reader: FileSystemReader, plan: Any, planner: Any) -> Any:
        read.extend(item.dest_index.fqn for item in plan.items)
        return original(reader, plan, planner)

    FileSystemReader.read_data = read_data  # type: ignore[method-assign]
    trainer = train("2", f"{folder}/again", f"{folder}/mid.ckpt")
    module = trainer.lightning_module
    read_weights = {name.removeprefix("model.") for name in read if name.startswith("model.")}
    read_states = {name for name in read if name.startswith("optimizer_0.state.")}
    own = {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.is_meta}
    owned_states = {f"optimizer_0.state.{name}.{part}" for name in own for part in ("step", "exp_avg", "exp_avg_sq")}
    assert read_states <= owned_states
    assert len(read_states) == 3 * (len(own) - ("head.weight" in own))
    return read_weights, own, set(read) - read_states - {f"model.{name}" for name in read_weights}


def test_a_rank_reads_of_a_folder_what_it_holds(tmp_path: Path) -> None:
    results = run_ranks(resume_from_parts, 2, str(tmp_path))
    for read, own, rest in results:
        assert read == own
        assert rest == {"optimizer_0.param_groups"}
    assert results[0][1] & results[1][1] == {"tok.weight", "head.weight"}


WIDTH = 1000


class Wide(LightningModule):
    """Four layers of 4 MB each."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        if not is_late:
            self.layers = self.build()

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = self.build()

    @staticmethod
    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def resident() -> dict[str, int]:
    """This process's memory in MB, by what is behind it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return {name: int(value) // 1024 for name, value in found.items()}


def resume_wide(path: str, is_late: bool) -> tuple[int, int]:
    """MB of own memory and of the file that came while the checkpoint was loaded, until all of it was."""
    loader = DataLoader(TensorDataset(torch.randn(2, WIDTH)), batch_size=2)

    def trainer(epochs: int) -> Trainer:
        strategy = PipelineStrategy(stages=2, microbatches=1)
        return Trainer(accelerator="cpu", devices=2, max_epochs=epochs, strategy=strategy, **QUIET)

    first = trainer(1)
    first.fit(Wide(is_late), loader)
    first.save_checkpoint(path)
    second = trainer(2)
    marks: list[dict[str, int]] = []
    load_file, load_optimizers = second.strategy.load_checkpoint, second.strategy.load_optimizer_state_dict

    def loads_file(*args: Any, **kwargs: Any) -> Any:
        marks.append(resident())
        return load_file(*args, **kwargs)

    def loads_optimizers(*args: Any) -> None:
        load_optimizers(*args)
        marks.append(resident())

    second.strategy.load_checkpoint = loads_file  # type: ignore[method-assign]
    second.strategy.load_optimizer_state_dict = loads_optimizers  # type: ignore[method-assign]
    second.fit(Wide(is_late), loader, ckpt_path=path)
    before, after = marks
    return after["RssAnon"] - before["RssAnon"], after["RssFile"] - before["RssFile"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_keeps_of_a_file_what_it_holds(tmp_path: Path, is_late: bool) -> None:
    """A file of 48 MB: half of the optimizer is read, and the weights of the layers that are there at that time."""
    size = 3 * 4 * WIDTH * WIDTH * 4 / 1e6
    for own, mapped in run_ranks(resume_wide, 2, str(tmp_path / "wide.ckpt"), is_late):
        assert own < (0.6 if is_late else 0.5) * size  # half of the weights are new, or given back
        assert mapped < (0.6 if is_late else 0.8) * size


def resume_differently(folder: str, path: str) -> str:
    rank = int(os.environ["LOCAL_RANK"])
    trainer = train("2", folder, path if rank == 0 else "what rank 1 takes for the last one")
    assert trainer.global_step == 6
    assert [callback.seen for callback in trainer.callbacks if isinstance(callback, Counter)] == [6]  # type: ignore
    with pytest.raises(MisconfigurationException) as caught:
        train("2", folder, path if rank == 0 else None)
    return str(caught.value)


def test_ranks_follow_rank_zero(tmp_path: Path) -> None:
    run_ranks(train_all, 1, [("plain", str(tmp_path), {})])
    for message in run_ranks(resume_differently, 2, str(tmp_path / "on"), str(tmp_path / "mid.ckpt")):
        assert "mid.ckpt, rank 1 from no checkpoint. Checkpoints must lie where all processes see them." in message


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    strategy = PipelineStrategy()
    with pytest.raises(ValueError, match="is no checkpoint: it is a folder without .metadata and meta.pt"):
        strategy.load_checkpoint(tmp_path)
