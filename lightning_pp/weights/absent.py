"""Tensors that lie on other stages: they have no values here, and are not to be taken for empty.

torch lets a tensor on the meta device take part in any operation, and leaves out without a word what it would have
written into a real one: ``key.mul_(0.9).add_(query)`` in a hook, with ``query`` on another stage, shrinks ``key`` to
nothing. So what other stages own is a tensor that sees the operations that it is used in. What is computed from it is
absent too; what lies here is not changed by it, but the user is told. Nothing else is slower for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from lightning_pp.partition import tree
from lightning_pp.partition.operators import written_arguments
from lightning_pp.partition.provenance import user_line

__all__: list[str] = []


@dataclass(frozen=True)
class Absence:
    """Why a tensor has no values.

    Attributes:
        of: The parameters and buffers that it is, or was computed from, with their stages.
        called: What a tensor of this process is called.
    """

    of: frozenset[str]
    called: Callable[[Tensor], str]


class AbsentTensor(Tensor):
    """A tensor on the meta device whose values another stage has."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # operators are enough
    _absence: Absence

    @staticmethod
    def made(tensor: Tensor, absence: Absence) -> AbsentTensor:
        """``tensor``, which is on the meta device, as an absent one."""
        found: AbsentTensor = Tensor._make_subclass(AbsentTensor, tensor)
        found._absence = absence
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute shapes, and refuse to change what is here."""
        kwargs = kwargs or {}
        inputs = tree.tensors_of((args, kwargs))
        absence = _together([tensor._absence for tensor in inputs if isinstance(tensor, AbsentTensor)])
        here = [tensor for tensor in inputs if not tensor.is_meta]
        for target, source in _mixtures(func, args, kwargs) if here else ():
            raise MisconfigurationException(_refusal(f"changes {absence.called(target)} by", source._absence))
        try:
            with no_dispatch():
                result = _computed(func, args, kwargs)
        except RuntimeError as error:  # torch minds some mixtures itself, and says which devices
            if not here:
                raise
            raise MisconfigurationException(_refusal(f"mixes {absence.called(here[0])} with", absence)) from error
        return tree.map_leaves(partial(_absent_as_well, absence), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is absent as well."""
        if id(self) not in memo:
            copied: Tensor = AbsentTensor.made(_empty(self), self._absence)
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In another process it is a plain tensor on the meta device: no part of the pipeline leaves this one."""
        is_parameter = isinstance(self, nn.Parameter)
        plain = nn.Parameter(_empty(self), self.requires_grad) if is_parameter else _empty(self)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def absent(tensor: Tensor, absence: Absence) -> Tensor:
    """``tensor`` without its memory; one of a class of its own stays a plain tensor on the meta device."""
    empty = _empty(tensor)
    is_plain = type(tensor) in (Tensor, nn.Parameter, AbsentTensor)
    return AbsentTensor.made(empty, absence) if is_plain else empty


def kind_of(tensor: Tensor) -> type[Tensor]:
    """The class of ``tensor``; of an absent one, that which it would have where its values are."""
    if not isinstance(tensor, AbsentTensor):
        return type(tensor)
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What the user, or a library, has put on ``tensor``."""
    if not isinstance(tensor, AbsentTensor):
        return tensor.__dict__
    return {key: value for key, value in tensor.__dict__.items() if key not in ("_absence", "_is_param")}


def _together(absences: list[Absence]) -> Absence:
    first = absences[0]
    if all(other is first for other in absences):
        return first
    return Absence(frozenset().union(*(other.of for other in absences)), first.called)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _mixtures(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, AbsentTensor]]:
    """Each tensor with values that ``func`` would write into, with one without that it would compute the values from.

    An operator on lists of tensors computes each from those at the same place of the other lists.
    """
    targets = {id(tensor) for tensor in written_arguments(func, args, kwargs) if not tensor.is_meta}
    if not targets:
        return
    given = [*args, *kwargs.values()]
    alone = [item for item in given if isinstance(item, Tensor)]
    rows = [alone, *zip(*(item for item in given if _is_list(item)), strict=False)]
    for row in rows:
        sources = [item for item in (*row, *alone) if isinstance(item, AbsentTensor)]
        yield from ((item, sources[0]) for item in row if id(item) in targets and sources)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives; where it writes into nothing that is here, all that it reads may be without values."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        targets = written_arguments(func, args, kwargs)
        if not targets or not all(target.is_meta for target in targets):
            raise
        args, kwargs = tree.map_leaves(lambda leaf: _empty(leaf) if _is_here(leaf) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _is_here(item: Any) -> bool:
    return isinstance(item, Tensor) and not item.is_meta


def _is_list(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and any(isinstance(inside, Tensor) for inside in item)


def _absent_as_well(absence: Absence, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_meta or isinstance(leaf, AbsentTensor):
        return leaf
    return AbsentTensor.made(leaf, absence)


def _refusal(what: str, absence: Absence) -> str:
    first, *others = sorted(absence.of)
    of = f"{first} and {len(others)} more" if others else first
    return (
        f"{user_line()} {what} what it computes from {of}. Each process holds the parameters of its own stage; those of"
        " the others are on the meta device, without values, and torch would leave them out without a word. Let the two"
        " lie on one stage: `split` names the layers with which the stages begin, `layers` a module that is never"
        " divided. Where each process may do its own part, leave out what is not here (`if not p.is_meta`)."
    )
