"""What single torch operators do that matters to a cut: draw, read values, write, or look at shapes only."""

from __future__ import annotations

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


def is_value_free(func: Any) -> bool:
    """Whether the result depends on the shape, dtype and device of the inputs only."""
    return func.overloadpacket.__name__ in _VALUE_FREE


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this operator draws from a default generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if _argument(func, args, kwargs, "generator") is not None:
        return False
    # attention kernels carry the tag even where nothing is dropped
    return bool(_argument(func, args, kwargs, "dropout_p") != 0.0)


def own_generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator of the user's that this operator draws from, if it does."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = _argument(func, args, kwargs, "generator")
    return generator if isinstance(generator, torch.Generator) else None


def values_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose values this operator hands to Python, or lets decide a shape."""
    if func is torch.ops.aten.index.Tensor:  # the tag is for masks; whole numbers have a shape of their own
        indices = tree.tensors_of(_argument(func, args, kwargs, "indices"))
        return [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if func is torch.ops.aten.masked_select.default:
        return tree.tensors_of(_argument(func, args, kwargs, "mask"))
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return tree.tensors_of((args, kwargs))
    return []


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this operator writes into."""
    schema = func._schema
    names = [spec.name for spec in schema.arguments if spec.alias_info is not None and spec.alias_info.is_write]
    if not names and "batch_norm" in schema.name and _argument(func, args, kwargs, "training") is not False:
        names = ["running_mean", "running_var"]  # which the schemas do not confess
    return [tensor for name in names for tensor in tree.tensors_of(_argument(func, args, kwargs, name))]


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
