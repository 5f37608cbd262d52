"""Files and folders take the place of earlier ones whole, and users' own plugins are used."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_pp import PipelineStrategy
from lightning_pp.saving.files import SafeCheckpointIO, beside, is_folder, replace
from tests.launch import run_ranks
from tests.models import MLP
from tests.training import QUIET


def make_folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "meta.pt").write_text(content)
    (path / ".metadata").write_text(content)
    return path


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "link to a folder"])
@pytest.mark.parametrize("after", ["file", "folder"])
def test_anything_takes_the_place_of_anything(tmp_path: Path, before: str, after: str) -> None:
    target = tmp_path / "model.ckpt"
    if before == "file":
        target.write_text("old")
    elif before == "folder":
        make_folder(target, "old")
    elif before == "link to a folder":
        target.symlink_to(make_folder(tmp_path / "elsewhere", "kept"))
    if after == "file":
        SafeCheckpointIO().save_checkpoint({"new": 1}, target)
        assert torch.load(target) == {"new": 1}
    else:
        replace(make_folder(beside(target, "partial"), "new"), target)
        assert (target / "meta.pt").read_text() == "new"
        assert is_folder(target)
    assert not target.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} <= {"model.ckpt", "elsewhere"}
    if before == "link to a folder":
        assert (tmp_path / "elsewhere" / "meta.pt").read_text() == "kept"


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(IsADirectoryError, match="holds something else"):
        SafeCheckpointIO().save_checkpoint({}, tmp_path)
    assert (tmp_path / "precious").read_text() == "data"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one that succeeds leaves nothing of the failed one."""
    io, path = SafeCheckpointIO(), tmp_path / "new folder" / "model.ckpt"
    io.save_checkpoint({"step": 1}, path)
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: written.append(os.fstat(descriptor).st_size) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            io.save_checkpoint({"step": 2}, path)
    assert written[0] > 0, "the file lies complete beside its place before it takes it"
    assert io.load_checkpoint(path)["step"] == 1
    io.save_checkpoint({"step": 3}, path)
    assert io.load_checkpoint(path)["step"] == 3
    assert [other.name for other in path.parent.iterdir()] == ["model.ckpt"]


@pytest.mark.parametrize("where", ["memory://model.ckpt", "file"])
@pytest.mark.parametrize("old_format", [False, True])
def test_every_file_loads(tmp_path: Path, where: str, old_format: bool) -> None:
    """Those on other file systems and those of old versions of torch as Lightning loads them."""
    content = {"state_dict": {"weight": torch.arange(3.0)}, "callbacks": {"a": {"b": torch.ones(2)}}}
    path: Any = tmp_path / "model.ckpt" if where == "file" else where
    if old_format:
        path = tmp_path / "old.ckpt"
        torch.save(content, path, _use_new_zipfile_serialization=False)
    else:
        SafeCheckpointIO().save_checkpoint(content, path)
    loaded = SafeCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["state_dict"]["weight"], torch.arange(3.0))
    assert torch.equal(loaded["callbacks"]["a"]["b"], torch.ones(2))
    with pytest.raises(FileNotFoundError):
        SafeCheckpointIO().load_checkpoint(f"{path}.not")


def test_weights_only_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    SafeCheckpointIO().save_checkpoint({"state_dict": {}, "loader": MLP}, path)
    assert SafeCheckpointIO().load_checkpoint(path, weights_only=False)["loader"] is MLP
    with pytest.raises(Exception, match="weights_only"):
        SafeCheckpointIO().load_checkpoint(path, weights_only=True)


def test_storage_options_are_refused_as_by_default(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        SafeCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt", storage_options={"a": 1})


class Own(TorchCheckpointIO):
    """A user's."""


def trainer(plugin: Any, **arguments: Any) -> Trainer:
    plugins = [plugin] if plugin is not None else []
    return Trainer(accelerator="cpu", devices=1, plugins=plugins, strategy=PipelineStrategy(**arguments), **QUIET)


def test_a_plugin_of_the_users_own_is_used() -> None:
    own, wrapped, open_wrap = Own(), AsyncCheckpointIO(Own()), AsyncCheckpointIO()
    assert trainer(own).strategy.checkpoint_io is own
    assert trainer(wrapped).strategy.checkpoint_io is wrapped
    assert type(wrapped.checkpoint_io) is Own
    assert trainer(open_wrap).strategy.checkpoint_io is open_wrap
    assert type(open_wrap.checkpoint_io) is SafeCheckpointIO
    assert type(trainer(None).strategy.checkpoint_io) is SafeCheckpointIO


def fit_with_plugin() -> str:
    with pytest.raises(MisconfigurationException) as caught:
        trainer(AsyncCheckpointIO(), save_distributed_checkpoint=True).fit(MLP(), MLP.loader())
    return str(caught.value)


def test_a_plugin_that_would_not_be_used_is_refused() -> None:
    assert "would not use the given AsyncCheckpointIO" in run_ranks(fit_with_plugin, 1)[0]
