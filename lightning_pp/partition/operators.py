"""What single torch operators do that matters to a cut: draw, read values, write, or look at shapes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pp.partition import tree

__all__: list[str] = []

#: operators whose result depends on the shape, dtype and device of their input but not on its values
_VALUE_FREE = frozenset(
    f"{kind}_{how}"
    for kind, how in (
        *(("new", how) for how in ("zeros", "ones", "empty", "full", "empty_strided")),
        *((kind, "like") for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")),
    )
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one operator does, whatever it is given.

    Attributes:
        is_value_free: Whether the result depends on the shape, dtype and device of the inputs only.
        may_draw: Whether it may draw random numbers.
        may_read: Whether it may hand values to Python, or let them decide a shape.
        writes: The arguments that it writes into: position and name.
        is_norm: Whether it writes into running statistics, unless it is told that nothing is trained.
    """

    is_value_free: bool
    may_draw: bool
    may_read: bool
    writes: tuple[tuple[int, str], ...]
    is_norm: bool


@cache
def facts(func: Any) -> Facts:
    """What is known of operator ``func``, worked out once."""
    arguments = list(enumerate(func._schema.arguments))
    writes = [
        (place, spec.name) for place, spec in arguments if spec.alias_info is not None and spec.alias_info.is_write
    ]
    is_norm = not writes and "batch_norm" in func._schema.name
    if is_norm:  # which the schemas do not confess
        writes = [(place, spec.name) for place, spec in arguments if spec.name in ("running_mean", "running_var")]
    return Facts(
        is_value_free=func.overloadpacket.__name__ in _VALUE_FREE,
        may_draw=torch.Tag.nondeterministic_seeded in func.tags,
        may_read=func in (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default)
        or torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags,
        writes=tuple(writes),
        is_norm=is_norm,
    )


def is_value_free(func: Any) -> bool:
    """Whether the result depends on the shape, dtype and device of the inputs only."""
    return facts(func).is_value_free


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this operator draws from a default generator."""
    if not facts(func).may_draw or _argument(func, args, kwargs, "generator") is not None:
        return False
    # attention kernels carry the tag even where nothing is dropped
    return bool(_argument(func, args, kwargs, "dropout_p") != 0.0)


def own_generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator of the user's that this operator draws from, if it does."""
    if not facts(func).may_draw:
        return None
    generator = _argument(func, args, kwargs, "generator")
    return generator if isinstance(generator, torch.Generator) else None


def values_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose values this operator hands to Python, or lets decide a shape."""
    if not facts(func).may_read:
        return []
    if func is torch.ops.aten.index.Tensor:  # the tag is for masks; whole numbers have a shape of their own
        indices = tree.tensors_of(_argument(func, args, kwargs, "indices"))
        return [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if func is torch.ops.aten.masked_select.default:
        return tree.tensors_of(_argument(func, args, kwargs, "mask"))
    return tree.tensors_of((args, kwargs))


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this operator writes into."""
    known = facts(func)
    if not known.writes or (known.is_norm and _argument(func, args, kwargs, "training") is False):
        return []
    found = [args[place] if place < len(args) else kwargs.get(name) for place, name in known.writes]
    return tensors_in(found)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments or results of an operator, which may lie in lists, but no deeper than that."""
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list)):
                found += tensors_in(value)
    return found


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage while it lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a wrapper subclass has no storage of its own
        return id(tensor)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """One argument of a call, by name; its default where it was left out, None where there is none."""
    for position, spec in enumerate(func._schema.arguments):
        if spec.name == name:
            return args[position] if position < len(args) else kwargs.get(name, spec.default_value)
    return None
