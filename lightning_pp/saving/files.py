"""Reads and writes local checkpoint files: a file appears whole or not at all, and is read only as far as it is used.

Lightning's own default writes to the system's folder for temporary files and moves the result, which copies it onto the
previous file where that folder is another file system, and holds the serialised checkpoint in memory on top.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.saving.gather import copied

__all__: list[str] = []

#: the file of a checkpoint folder that holds everything but weights and optimizers, as Lightning names it
METADATA = "meta.pt"
#: what load_checkpoint leaves in the file until it is used
_LEFT_IN_FILE = frozenset({"state_dict", "optimizer_states"})


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's default, but for local files: see the text of this module."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = beside(target, "partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            remove(partial)  # where a disk is full, half a checkpoint would keep it full
            if (found := reason(error)) is error:
                raise
            raise found from None
        replace(partial, target)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        source = local_path(path)
        if source is None or not source.is_file():
            options = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_checkpoint(path, map_location, **options)
        if weights_only is None:
            weights_only = compat.loads_weights_only_by_default()
        is_archive = _is_archive(source)
        try:
            checkpoint = torch.load(source, map_location="cpu", mmap=is_archive, weights_only=weights_only)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            if is_archive and isinstance(error, pickle.UnpicklingError):
                raise  # torch says what it does not want to load, and how to load it all the same
            raise RuntimeError(_unreadable(source, error)) from error
        # the few tensors of callbacks and the like may live longer than the file
        return {key: value if key in _LEFT_IN_FILE else copied(value) for key, value in checkpoint.items()}


def _unreadable(path: Path, error: Exception) -> str:
    return (
        f"{path} ({path.stat().st_size:,} bytes) cannot be read as a checkpoint ({type(error).__name__}). It is another"
        " kind of file, or was cut short: copy it again, or give another checkpoint."
    )


def local_path(path: str | Path) -> Path | None:
    """Where ``path`` lies on this machine; None if it does not."""
    filesystem, inner = url_to_fs(str(path))
    return Path(inner) if isinstance(filesystem, LocalFileSystem) else None


def _is_archive(path: Path) -> bool:
    """Whether torch wrote the file as it does since version 1.6: it can be mapped then."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def is_folder(path: str | Path) -> bool:
    """Whether ``path`` is a checkpoint folder of ``torch.distributed.checkpoint`` as Lightning lays it out."""
    folder = local_path(path)
    return folder is not None and (folder / METADATA).is_file() and (folder / ".metadata").is_file()


def check_replaceable(target: Path) -> None:
    """Complain about a folder that is no checkpoint: a checkpoint must not take its place."""
    if target.is_dir() and not is_folder(target):
        raise IsADirectoryError(f"The checkpoint path is a folder that holds something else: {target}")


def beside(target: Path, what: str) -> Path:
    """A hidden name next to ``target``, on the same file system."""
    return target.with_name(f".{target.name}.{what}")


def replace(partial: Path, target: Path) -> None:
    """Put what has been written completely in the place of what was there, which is lost only afterwards."""
    old = None
    if target.is_dir() or (partial.is_dir() and target.exists()):
        # no system call exchanges a folder and something else
        old = beside(target, "old")
        remove(old)
        target.rename(old)
    os.replace(partial, target)
    _sync_folder(target.parent)
    if old is not None:
        remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _sync_folder(folder: Path) -> None:
    """Make the new name last (not every system can open a folder)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def reason(error: BaseException) -> BaseException:
    """The system's own error, where torch's writer has hidden it behind one about its position in the file."""
    found: BaseException | None = error
    while isinstance(found, RuntimeError):
        found = found.__cause__ or found.__context__
    return found if isinstance(found, OSError) else error


def sync_file(path: Path) -> None:
    """Make a file's content last."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
