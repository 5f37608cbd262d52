"""Puts the parts that the ranks hold together into one ordinary Lightning checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.runtime.mesh import Mesh
from lightning_pp.saving.courier import Courier
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []


class Sources:
    """Which rank gives what to a checkpoint: the first pipeline's ranks, each what counts with it.

    Args:
        ownership: Of the cut model.
        mesh: This process's position.
    """

    def __init__(self, ownership: Ownership, mesh: Mesh) -> None:
        self._ownership = ownership
        self._mesh = mesh
        self._first_names: dict[int, str] = {}
        self._aliases: dict[str, str] = {}
        for name, tensor in named_tensors(ownership.model):
            first = self._first_names.setdefault(id(tensor), name)
            if first != name:
                self._aliases[name] = first

    def first_name(self, name: str) -> str:
        """The name under which a tensor travels that goes by several."""
        return self._aliases.get(name, name)

    def names(self, optimizer: Optimizer) -> list[str]:
        """The first names of an optimizer's parameters, in the order that numbers them; numbers outside the model."""
        parameters = optimizer_parameters(optimizer)
        return [self._first_names.get(id(p), f"parameter_{number}") for number, p in enumerate(parameters)]

    def of_parameter(self, parameter: Tensor) -> int:
        """The rank whose optimizer state of a parameter counts."""
        if id(parameter) not in self._first_names:
            return 0  # not in the module, so on every rank
        return self._rank(self._ownership.first_position(parameter))

    def of_state(self, state_dict: Mapping[str, Any], courier: Courier) -> dict[str, int]:
        """``{name: rank that gives it}``, the same on all ranks; the ranks meet here.

        What is neither parameter nor buffer (a layer's extra state, names that the user's hooks have made) comes from
        where the layer runs, and from another rank where that one does not have it.
        """
        sources = {}
        others = {}
        for name, value in state_dict.items():
            known = self._known(name)
            if known is None:
                others[name] = not (isinstance(value, Tensor) and value.is_meta)
            else:
                sources[name] = known
        gathered = courier.gather(others if self._mesh.replica == 0 else {})
        others_sources: dict[str, int] = courier.share(self._settle(gathered))
        return sources | others_sources

    def _settle(self, gathered: list[dict[str, bool]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in dict.fromkeys(name for names in gathered for name in names):
            holders = [rank for rank, names in enumerate(gathered) if names.get(name)]
            wanted = self._rank(self._position_around(name))
            if holders:
                found[name] = wanted if wanted in holders else holders[0]
        return found

    def _position_around(self, name: str) -> int:
        """Where the innermost module around ``name`` is that holds anything; the last stage runs the code of all."""
        while "." in name:
            name = name.rpartition(".")[0]
            for other, _ in named_tensors(self._ownership.model):
                if other.startswith(f"{name}."):
                    return self._ownership.positions(other)[0]
        return self._mesh.num_stages - 1

    def _known(self, name: str) -> int | None:
        try:
            positions = self._ownership.positions(name)
        except KeyError:
            return None
        return self._rank(positions[-1 if self.first_name(name) in self._ownership.cut.updated else 0])

    def _rank(self, position: int) -> int:
        """The rank at ``position`` of the first pipeline."""
        return position * self._mesh.num_replicas


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they go by."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def own_state(state_dict: Mapping[str, Any], where: Mapping[str, int], sources: Sources, rank: int) -> dict[str, Any]:
    """What ``rank`` gives, a tensor of several names under the first of them."""
    return {sources.first_name(name): value for name, value in state_dict.items() if where.get(name) == rank}


def gather_state_dict(state_dict: dict[str, Any], sources: Sources, courier: Courier) -> dict[str, Any]:
    """The whole model's state on the writer, in host memory; other ranks get their own part back.

    Args:
        state_dict: This rank's, with everything it does not hold on the meta device. It is changed in place, so that
            order, type and module versions stay what they were.
        sources: Who gives what.
        courier: To the writer.
    """
    where = sources.of_state(state_dict, courier)
    received = courier.collect({} if courier.is_writer else own_state(state_dict, where, sources, courier.rank))
    if not courier.is_writer:
        return state_dict
    # what the writer has no name for (a stage has registered it while it ran) comes last
    for name in [*state_dict, *(name for name in where if name not in state_dict)]:
        if where.get(name, courier.rank) == courier.rank:
            value = state_dict[name]
            state_dict[name] = value.cpu() if isinstance(value, Tensor) else value
        else:
            state_dict[name] = received[sources.first_name(name)]
    return state_dict


def own_optimizer_state(optimizer: Optimizer, sources: Sources, rank: int) -> dict[Any, Any]:
    """``{key of a parameter in the optimizer's state dict: its state}``, of what counts on this rank."""
    parameters = optimizer_parameters(optimizer)
    return {
        key: state
        for key, state in optimizer.state_dict()["state"].items()
        if rank == (sources.of_parameter(parameters[key]) if isinstance(key, int) else 0)
    }


def gather_optimizer_state(optimizer: Optimizer, sources: Sources, courier: Courier) -> dict[str, Any]:
    """The whole optimizer's state dict on the writer, in host memory; other ranks get their own part back.

    Args:
        optimizer: With the same parameters in the same order on every rank.
        sources: Who gives what.
        courier: To the writer.
    """
    own = optimizer.state_dict()
    mine = own_optimizer_state(optimizer, sources, courier.rank)
    parts: dict[Any, Any] = {}
    for key, state in mine.items():
        parts[key, None] = list(state)  # its keys in order, of which there may be none
        parts.update({(key, name): value for name, value in state.items()})
    received = courier.collect({} if courier.is_writer else parts)
    if not courier.is_writer:
        return own
    received = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in (parts | received).items()}
    merged = {
        key: {name: received[key, name] for name in names} for (key, part), names in received.items() if part is None
    }
    in_order = sorted(merged, key=lambda key: (not isinstance(key, int), key if isinstance(key, int) else 0))
    return {**own, "state": {key: merged[key] for key in in_order}}


def load_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what belongs to parameters that are here out of a whole optimizer's state; the rest is not touched.

    ``load_state_dict`` goes by the places of parameters in the groups, whatever they are called, and puts each state
    where its parameter is.
    """
    parameters = optimizer_parameters(optimizer)
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    absent = {key for key, parameter in zip(saved, parameters, strict=False) if parameter.is_meta}
    state = {key: copied(value) for key, value in state_dict["state"].items() if key not in absent}
    optimizer.load_state_dict({**state_dict, "state": state})


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order that numbers them in the state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copied(value: Any) -> Any:
    """A copy whose tensors do not lie in the file that they were read from."""
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone())
