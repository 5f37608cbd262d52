"""Which process holds which parameter: gives up what other stages own, keeps tied copies equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.partition.operators import storage_key
from lightning_pp.partition.switch import Switchboard
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.runtime.planner import Cut
from lightning_pp.weights.absent import Absence, AbsentTensor, absent
from lightning_pp.weights.exchange import exchange, named_tensors

__all__: list[str] = []

_MARK = "_pipeline_ownership"


class Ownership:
    """The parameters and buffers of one cut model, on one process.

    Args:
        model: The LightningModule.
        board: Its switched layers.
        cut: Which stages need what.
        mesh: This process's position.
        placement: The position of each stage.
    """

    def __init__(self, model: nn.Module, board: Switchboard, cut: Cut, mesh: Mesh, placement: tuple[int, ...]) -> None:
        self.board = board
        self.board.outside = self._outside
        self.cut = cut
        self.num_stages = len(placement)
        self._model = model
        self._mesh = mesh
        self._placement = placement
        self._positions = self._all_positions()
        self._first_positions: dict[int, int] = {}

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model is not part of the pipeline."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def model(self) -> nn.Module:
        """The LightningModule."""
        return self._model

    @staticmethod
    def of(model: nn.Module) -> Ownership | None:
        """The ownership under which ``model`` was cut before, if it was."""
        found = vars(model).get(_MARK)
        return found if isinstance(found, Ownership) else None

    def mark(self) -> None:
        """Remember on the model that it has been cut."""
        object.__setattr__(self._model, _MARK, self)

    def check_layers(self) -> None:
        """Complain where the layers that were cut are not those of the model any more."""
        present = {id(module) for module in self.model.modules()}
        gone = [name for name, layer in self.board.layers.items() if id(layer) not in present]
        if gone:
            name = type(self.model).__name__
            raise MisconfigurationException(
                f"{name}.configure_model has built {gone[0]!r} anew, which an earlier run has trained. Lightning calls"
                " it before every run: build only what is not there yet (`if self.layer is not None: return`)."
            )

    def unmark(self) -> None:
        """Give the model back as it was; for one that was never spread over processes."""
        self.board.remove()
        vars(self._model).pop(_MARK, None)

    def positions(self, name: str) -> tuple[int, ...]:
        """The places in the pipeline that hold ``name``."""
        return self._positions[name]

    def provider(self, name: str) -> int:
        """The global rank whose copy of ``name`` counts."""
        if name not in self._positions:
            return self._mesh.rank
        return self._mesh.global_rank(self._positions[name][-1 if name in self.cut.updated else 0])

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether this rank is the one that counts ``parameter`` (once for a tied one)."""
        return self._mesh.position == self.first_position(parameter)

    def first_position(self, parameter: Tensor) -> int:
        """The first place that holds ``parameter``."""
        if id(parameter) not in self._first_positions:
            # no module lets go of a parameter without another taking its place, so an id stays its own
            self._first_positions = {id(p): self._positions[name][0] for name, p in self._model.named_parameters()}
        # one that is not in the module is on every rank, and each counts its own
        return self._first_positions.get(id(parameter), self._mesh.position)

    def owned(self) -> list[nn.Parameter]:
        """The parameters that are here."""
        return [p for p in self._model.parameters() if not p.is_meta]

    def release(self, optimizers: Iterable[Optimizer]) -> None:
        """Put everything that other stages own on the meta device, and drop what optimizers keep of it."""

        def nothing(name: str, tensor: Tensor) -> Tensor | None:
            is_done = self.is_here(name) or isinstance(tensor, AbsentTensor)
            return None if is_done else absent(tensor, self.absence(name))

        exchange(self._model, optimizers, nothing)
        away = {id(p) for name, p in self._model.named_parameters() if not self.is_here(name)}
        for optimizer in optimizers:
            for parameter in [p for p in optimizer.state if id(p) in away]:
                del optimizer.state[parameter]

    def absence(self, name: str) -> Absence:
        """Why ``name`` is not here."""
        stages = ", ".join(str(self._placement.index(position)) for position in self._positions[name])
        return Absence(frozenset([f"{name!r} (on stage {stages})"]), self._called)

    def _called(self, tensor: Tensor) -> str:
        key = storage_key(tensor)
        for name, known in named_tensors(self._model):
            if storage_key(known) == key:
                return f"{name!r} (on stage {self._placement.index(self._mesh.position)})"
        return f"a tensor of shape {list(tensor.shape)} on stage {self._placement.index(self._mesh.position)}"

    def to_device(self, device: torch.device) -> None:
        """Move what is here."""
        for module in self._model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_meta and parameter.device != device:
                    parameter.data = parameter.data.to(device)
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[key] = buffer.to(device)

    def tied(self) -> dict[str, tuple[int, ...]]:
        """``{name: positions}`` of the parameters that more than one process holds."""
        names = {name for name, _ in self._model.named_parameters()}
        return {name: found for name, found in self._positions.items() if len(found) > 1 and name in names}

    def _outside(self, name: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a layer call that no step made: only a layer that is here can."""
        if any(parameter.is_meta for parameter in self.board.layers[name].parameters()):
            raise MisconfigurationException(
                f"Layer {name!r} was called outside of training_step, validation_step, test_step and predict_step, on a"
                f" process that does not hold its parameters (stage {self._mesh.position} of {self.num_stages}). To use"
                " the whole model elsewhere, save a checkpoint and load it with load_from_checkpoint."
            )
        return compute(*args, **kwargs)

    def is_here(self, name: str) -> bool:
        """Whether this place in the pipeline holds ``name``."""
        return self._mesh.position in self._positions[name]

    def _all_positions(self) -> dict[str, tuple[int, ...]]:
        """For every name that a parameter or buffer goes by, a tied one's further names included."""
        first_names = {id(tensor): name for name, tensor in named_tensors(self._model)}
        buffers = {name for name, _ in self._model.named_buffers()}
        found = {}
        for name, tensor in named_tensors(self._model, every_name=True):
            first = first_names[id(tensor)]
            stages = self.cut.stages_of(first, first in buffers, self.num_stages)
            found[name] = tuple(sorted({self._placement[stage] for stage in stages}))
        return found
