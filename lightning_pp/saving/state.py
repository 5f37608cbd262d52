"""The part of the strategy that saves and loads: one ordinary file or a folder, complete or not at all.

Lightning loads weights before ``setup``, when it is not known yet what a process will hold. What is left in a file or
folder until then is loaded as soon as the model has been cut.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.arguments import Arguments
from lightning_pp.launch.processes import PipelineProcesses
from lightning_pp.pipeline import Pipeline
from lightning_pp.runtime.comm import job_store
from lightning_pp.saving.courier import Courier
from lightning_pp.saving.files import SafeCheckpointIO, is_folder, local_path
from lightning_pp.saving.folder_reader import Folder, FolderOptimizer, FolderState
from lightning_pp.saving.folder_writer import MODEL_KEY, optimizer_items, optimizer_key, save, together
from lightning_pp.saving.gather import (
    Sources,
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    own_optimizer_state,
    own_state,
)
from lightning_pp.saving.interrupted import Meeting
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []

_T = TypeVar("_T")
_Location = str | Path


class CheckpointedProcesses(PipelineProcesses):
    """Processes that save and load what they hold.

    Args:
        arguments: Of the strategy.
        save_distributed_checkpoint: Whether a checkpoint is a folder to which each process writes its own part.
    """

    _pipeline: Pipeline | None

    def __init__(self, arguments: Arguments, save_distributed_checkpoint: bool) -> None:
        super().__init__(arguments)
        if not isinstance(save_distributed_checkpoint, bool):
            raise TypeError(f"save_distributed_checkpoint={save_distributed_checkpoint!r}: allowed are True and False.")
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._courier: Courier | None = None
        self._meeting: Meeting | None = None
        self._line: Courier | None = None
        self._is_incomplete = False
        self._has_agreed_on_path = False
        self._is_cut = False
        self._waiting_state: tuple[Mapping[str, Any], bool] | None = None

    @abstractmethod
    def _module(self) -> LightningModule: ...

    @abstractmethod
    def _explaining(self) -> AbstractContextManager[None]: ...

    # -- around a run -----------------------------------------------------------------------------------------------

    def _prepare_checkpoints(self) -> None:
        """Connect, and compare what this run resumes from; to be called by all ranks at the start of ``setup``."""
        if self.save_distributed_checkpoint and type(self.checkpoint_io) is not SafeCheckpointIO:
            raise MisconfigurationException(
                "save_distributed_checkpoint=True writes folders of torch.distributed.checkpoint, and would not use the"
                f" given {type(self.checkpoint_io).__name__}. Leave the plugin out, or use"
                " save_distributed_checkpoint=False."
            )
        if not self._has_agreed_on_path:
            self._agree_on_path(None)
        self._has_agreed_on_path = False
        # every rank counts for itself, and all come to the same number
        run = job_store().add(f"lightning_pp/runs/{self.global_rank}", 1)
        if self._courier is None:
            name = f"courier/{run}"
            self._courier = Courier(name, self.global_rank, self.world_size, self.arguments.timeout)
        self._meeting = Meeting(job_store(), f"meeting/{run}", self.global_rank, self.world_size)

    def _load_waiting_state(self) -> None:
        """Load the weights that could not be loaded before the model was cut."""
        self._is_cut = True
        if self._waiting_state is not None:
            state, strict = self._waiting_state
            self._waiting_state = None
            module = self._module()
            _load_state(module, self._read(state, module.state_dict), strict)

    @override
    def teardown(self) -> None:
        self._is_cut = self._has_agreed_on_path = False
        self._waiting_state = self._meeting = self._line = None
        self._is_incomplete = False
        if self._has_failed:
            self._courier = None
        super().teardown()
        if not self._has_failed and type(self.checkpoint_io) is not SafeCheckpointIO:
            self.barrier()  # a plugin may have written until now, and other ranks may look for the file next

    # -- saving -----------------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = SafeCheckpointIO()
        else:
            compat.give_base_io(self._checkpoint_io, SafeCheckpointIO())
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0; on other ranks what they hold, the rest on the meta device."""
        self._meet()
        module = self._module()
        if self._line is not None and not compat.is_interrupted(module):
            assert self._pipeline is not None
            self._pipeline.metrics.share_persistent_states()
        state_dict = module.state_dict()
        return state_dict if self.save_distributed_checkpoint else self.whole_state_dict(state_dict)

    def whole_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the module, or of a copy of it, with what all ranks hold; whole on rank 0."""
        whole: dict[str, Any] = copy(state_dict)  # type: ignore[arg-type]
        if self._line is not None and not self._is_incomplete:
            with self._talking():
                whole = gather_state_dict(whole, self._sources(), self._line)
        return whole

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer on rank 0; on other ranks what they hold."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self._line is not None and not self.save_distributed_checkpoint:
            with self._talking():
                return gather_optimizer_state(optimizer, self._sources(), self._line)
        return optimizer.state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _Location, storage_options: Any | None = None
    ) -> None:
        line = self._line
        if self._is_incomplete:
            return
        if line is None:  # nothing has been cut: rank 0 has the whole model
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._talking():
            if self.save_distributed_checkpoint:
                self._save_folder(checkpoint, filepath, storage_options, line)
            else:
                write = super().save_checkpoint
                together(line, lambda: write(checkpoint, filepath, storage_options))

    def _save_folder(self, content: dict[str, Any], filepath: _Location, options: Any, line: Courier) -> None:
        if options is not None:
            raise TypeError("save_distributed_checkpoint=True uses no CheckpointIO, and so no storage_options.")
        path = local_path(line.share(os.fspath(filepath)))
        if path is None:
            raise ValueError(
                f"{filepath}: save_distributed_checkpoint=True needs a file system that all ranks have mounted."
            )
        sources, rank = self._sources(), self.global_rank
        state_dict = content.pop("state_dict")
        where = sources.of_state(state_dict, line)
        mine = own_state(state_dict, where, sources, rank)
        items: dict[tuple[str, ...], Any] = {(MODEL_KEY, name): value for name, value in mine.items()}
        order: list[tuple[str, ...]] = [(MODEL_KEY, name) for name in state_dict]
        pairs = zip(self.optimizers, content.pop("optimizer_states", []), strict=False)
        for number, (optimizer, state) in enumerate(pairs):
            own = own_optimizer_state(optimizer, sources, rank)
            names = sources.names(optimizer)
            key = optimizer_key(number)
            items |= optimizer_items(key, state, own, names, line.is_writer)
            order += [(key, "state", name) for name in names]
        aliases: dict[tuple[str, ...], tuple[str, ...]] = {
            (MODEL_KEY, name): (MODEL_KEY, sources.first_name(name))
            for name in where
            if sources.first_name(name) != name
        }
        save(line, path, items if self.mesh.replica == 0 else None, aliases, order, content)

    def _meet(self) -> None:
        """Find out over which connections a checkpoint is gathered, or whether it can be."""
        module = self._module()
        is_failing = compat.is_interrupted(module) and not self._has_failed
        is_part = any(parameter.is_meta for parameter in module.parameters())
        self._line, self._is_incomplete = None, False
        if is_failing and not self._is_cut:
            if is_part or self._waiting_state is not None:
                self._give_up("it came before the model was ready")
        elif not hasattr(self._pipeline, "ownership"):
            if is_part:
                raise RuntimeError(
                    "The processes are not connected after a failure, and each holds its own stage only. To save the"
                    " model then, use OnExceptionCheckpoint or ModelCheckpoint(save_on_exception=True)."
                )
        elif is_failing and self.world_size > 1:
            assert self._meeting is not None
            self._line = self._meeting.courier(str(module.trainer.global_step), self.arguments.timeout)
            if self._line is None:
                self._give_up(self._meeting.reason)
        elif self._courier is not None:
            self._line = self._courier
            with self._explaining():
                self._line.meet()

    def _give_up(self, reason: object) -> None:
        self._line = None
        self._is_incomplete = True
        rank_zero_warn(f"No checkpoint was saved after the failure: {reason}.")

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """What goes wrong while a failure is under way must not hide it."""
        try:
            with self._explaining():
                yield
        except Exception as error:
            if not compat.is_interrupted(self._module()):
                raise
            self._give_up(error)

    def _sources(self) -> Sources:
        assert self._pipeline is not None
        return Sources(self._pipeline.ownership, self.mesh)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not compat.is_interrupted(self.lightning_module):  # others may never come
            super().barrier(name)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        return obj if compat.is_interrupted(self.lightning_module) else super().broadcast(obj, src)

    # -- loading ----------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _Location, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._agree_on_path(checkpoint_path)
        local = local_path(path)
        if local is not None and local.is_dir():
            if not is_folder(local):
                raise ValueError(
                    f"{local} is no checkpoint: it is a folder without .metadata and meta.pt. Give a file, or a folder"
                    " that save_distributed_checkpoint=True has written."
                )
            return Folder(local, weights_only).checkpoint()
        options = {} if weights_only is None else {"weights_only": weights_only}
        return _checked(self.checkpoint_io.load_checkpoint(path, **options), path)

    def _agree_on_path(self, path: Any) -> Any:
        """Take rank 0's choice; each rank has looked for ``"best"`` and ``"last"`` by itself."""
        self._has_agreed_on_path = True
        paths: list[Any] = [path]
        if self.world_size > 1:
            paths *= self.world_size
            dist.all_gather_object(paths, path, group=self._host_group)
        for rank, other in enumerate(paths):
            if (other is None) != (paths[0] is None):
                raise MisconfigurationException(
                    f"Rank 0 starts from {paths[0] or 'no checkpoint'}, rank {rank} from {other or 'no checkpoint'}."
                    " Checkpoints must lie where all processes see them."
                )
        return paths[0]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, state = self._module(), checkpoint["state_dict"]
        is_early = not self._is_cut and Ownership.of(module) is None
        if is_early and (isinstance(state, FolderState) or any(p.is_meta for p in module.parameters())):
            self._waiting_state = (state, strict)
        else:
            _load_state(module, self._read(state, module.state_dict), strict)

    def _read(self, state: Mapping[str, Any], own: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What of ``state`` is here; nothing else is read."""
        return self._alike(lambda: state.for_model(own())) if isinstance(state, FolderState) else state

    def _alike(self, read: Callable[[], _T]) -> _T:
        """Read one's own part of a folder; where one rank cannot, none of them goes on to wait for it."""
        problems: list[str | None] = [None] * self.world_size
        problem: Exception | None = None
        try:
            found = read()
        except Exception as error:
            problem = error
        if self.world_size > 1:
            dist.all_gather_object(problems, None if problem is None else str(problem), group=self._host_group)
        if problem is not None:
            raise problem
        for rank, text in enumerate(problems):
            if text is not None:
                raise RuntimeError(f"Rank {rank} cannot load its part: {text}")
        return found

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if isinstance(state, FolderOptimizer):
                optimizer.load_state_dict(self._alike(partial(state.for_optimizer, optimizer)))
            else:
                load_optimizer_state(optimizer, state)


def _checked(checkpoint: dict[str, Any], path: _Location) -> dict[str, Any]:
    """Refuse what was saved by something else than a Trainer, by the name of the file."""
    missing = [key for key in ("pytorch-lightning_version", "state_dict") if key not in checkpoint]
    if missing:
        raise ValueError(
            f"{path} is no checkpoint of a Trainer: it has {list(checkpoint)[:5]}, but not {missing}. Give a file that"
            " trainer.save_checkpoint or ModelCheckpoint has written, or load the weights into the module yourself."
        )
    return checkpoint


def _load_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load what is here; names and shapes of the rest are compared, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter in the checkpoint to a meta")
        module.load_state_dict(state, strict=strict)
