"""Reads checkpoint folders of ``torch.distributed.checkpoint``: every rank reads what it holds, and no more."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.saving.files import METADATA
from lightning_pp.saving.folder_writer import MODEL_KEY, optimizer_key
from lightning_pp.saving.gather import optimizer_parameters

__all__: list[str] = []

#: where in the nested state dict a value stands
_Path = tuple[str, ...]


class _LoadPlanner(DefaultLoadPlanner):
    """Reads objects as carefully as the user has asked for."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights_only = bool(weights_only)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


#: how torch says that a file is missing, or not what it should be
_BROKEN = (
    OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError,
    pickle.UnpicklingError,
)  # fmt: skip


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which checkpoint it is that cannot be read."""
    try:
        yield
    except _BROKEN as error:
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise  # torch says what it does not want to load, and how to load it all the same
        raise RuntimeError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}). A file in this folder is"
            " missing, was cut short or is another one's: copy the whole folder again, or give another checkpoint."
        ) from error


class Folder:
    """A folder to read from; every rank reads by itself.

    Args:
        path: The folder.
        weights_only: Whether objects may only be of harmless types.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self._reader = FileSystemReader(path)
        with _naming(path):
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._weights_only = weights_only
        self._path = path
        mappings = self._metadata.planner_data or {}
        self._names = {
            tuple(map(str, mappings.get(name, (name,)))): name for name in self._metadata.state_dict_metadata
        }

    def checkpoint(self) -> dict[str, Any]:
        """What ``Trainer`` expects of a checkpoint; weights and optimizers stay in the folder until they are wanted."""
        weights_only = self._weights_only
        if weights_only is None:
            weights_only = compat.loads_weights_only_by_default()
        with _naming(self._path):
            checkpoint: dict[str, Any] = torch.load(
                self._path / METADATA, map_location="cpu", weights_only=weights_only
            )
        tops = {path[0] for path in self._names}
        # ModelParallelStrategy has another name for the model
        model = "state_dict" if MODEL_KEY not in tops and "state_dict" in tops else MODEL_KEY
        checkpoint["state_dict"] = FolderState(self, (model,))
        numbers = sorted(int(top.removeprefix("optimizer_")) for top in tops if top.startswith("optimizer_"))
        if numbers:
            checkpoint["optimizer_states"] = [FolderOptimizer(self, optimizer_key(number)) for number in numbers]
        return checkpoint

    def paths(self, *start: str) -> list[_Path]:
        """The places below ``start`` at which values stand, itself included."""
        return [path for path in self._names if path[: len(start)] == start]

    def blank(self, path: _Path) -> Any:
        """A tensor on the meta device like that at ``path``; None where an object stands."""
        described = self._metadata.state_dict_metadata[self._names[path]]
        if not isinstance(described, TensorStorageMetadata):
            return None
        return torch.empty(described.size, dtype=described.properties.dtype, device="meta")

    def read(self, targets: dict[_Path, Any]) -> dict[_Path, Any]:
        """Read values.

        Args:
            targets: Tensors to read into, and None where new ones are to be made.
        """
        flat: dict[str, Any] = {}
        for path, target in targets.items():
            blank = self.blank(path)
            if target is None and blank is not None:
                target = torch.empty(blank.shape, dtype=blank.dtype)
            flat[self._names[path]] = target
        if flat:
            planner = _LoadPlanner(self._weights_only)
            planner.set_up_planner(flat, self._metadata, is_coordinator=True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            with _naming(self._path):
                self._reader.read_data(planner.finish_plan(plan), planner).wait()
            flat = planner.state_dict
        return {path: flat[self._names[path]] for path in targets}


class FolderState(MutableMapping[str, Any]):
    """The model's state in a folder: a mapping that reads a value when it is asked for."""

    def __init__(self, folder: Folder, start: _Path) -> None:
        self._folder = folder
        self._paths: dict[str, _Path] = {".".join(path[len(start) :]): path for path in folder.paths(*start)}
        self._set: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._set:
            return self._set[name]
        path = self._paths[name]
        return self._folder.read({path: None})[path]

    def __setitem__(self, name: str, value: Any) -> None:
        self._set[name] = value
        self._paths.setdefault(name, ())

    def __delitem__(self, name: str) -> None:
        del self._paths[name]
        self._set.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def for_model(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with values for what is here, and tensors on the meta device for what is not.

        Args:
            own: The cut model's state dict. Tensors that fit are read into directly.
        """
        targets: dict[_Path, Any] = {}
        state: dict[str, Any] = {}
        for name, path in self._paths.items():
            here = own.get(name)
            if name in self._set:
                state[name] = self._set[name]
            elif isinstance(here, Tensor) and here.is_meta:
                state[name] = self._folder.blank(path)
            else:
                blank = self._folder.blank(path)
                fits = isinstance(here, Tensor) and blank is not None and here.shape == blank.shape
                targets[path] = here if fits else None
                state[name] = None
        read = self._folder.read(targets)
        return {name: read.get(self._paths[name], value) for name, value in state.items()}


class FolderOptimizer:
    """One optimizer's state in a folder."""

    def __init__(self, folder: Folder, key: str) -> None:
        self._folder = folder
        self._key = key

    def for_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """A state dict with the states of the parameters that are here."""
        groups_path = (self._key, "param_groups")
        groups = self._folder.read({groups_path: None})[groups_path]
        names = [name for group in groups for name in group["params"]]
        absent = {name for name, p in zip(names, optimizer_parameters(optimizer), strict=False) if p.is_meta}
        paths = [path for path in self._folder.paths(self._key, "state") if path[2] not in absent]
        state: dict[str, Any] = {}
        for path, value in self._folder.read(dict.fromkeys(paths)).items():
            if len(path) == 3:
                state[path[2]] = value
            else:
                state.setdefault(path[2], {})[path[3]] = value
        return {"state": state, "param_groups": groups}
