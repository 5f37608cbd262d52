"""Writes checkpoint folders of ``torch.distributed.checkpoint``: every rank writes what it gives.

The layout is that of Lightning's own sharded checkpoints: the model under ``model``, optimizers under ``optimizer_0``
and so on with their states under names of parameters, and everything else in ``meta.pt``, so Lightning's tool makes one
ordinary file of a folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_pp.launch.failure import FollowingError
from lightning_pp.saving.courier import Courier
from lightning_pp.saving.files import METADATA, beside, check_replaceable, reason, remove, replace, sync_file

__all__: list[str] = []

#: where in the nested state dict a value stands
_Path = tuple[str, ...]
#: what the model is called at the top
MODEL_KEY = "model"


def optimizer_key(number: int) -> str:
    """What optimizer ``number`` is called at the top."""
    return f"optimizer_{number}"


def optimizer_items(
    key: str, state_dict: Mapping[str, Any], mine: Mapping[Any, Any], names: list[str], is_writer: bool
) -> dict[_Path, Any]:
    """What one rank gives of an optimizer, keyed by names of parameters.

    Args:
        key: See :func:`optimizer_key`.
        state_dict: The optimizer's own.
        mine: The states that this rank gives.
        names: Of all parameters, in the order that numbers them.
        is_writer: Whether this rank gives what is the same on all.
    """
    items: dict[_Path, Any] = {}
    if is_writer:
        groups = [{**group, "params": [names[k] for k in group["params"]]} for group in state_dict["param_groups"]]
        items[key, "param_groups"] = groups
    for number, state in mine.items():
        name = names[number] if isinstance(number, int) else str(number)
        if state and all(isinstance(part, str) for part in state):
            items.update({(key, "state", name, part): value for part, value in state.items()})
        else:
            items[key, "state", name] = state
    return items


class _SavePlanner(DefaultSavePlanner):
    """Plans for values that have been taken out of their nest already, to where they stand in it."""

    def __init__(self, items: Mapping[_Path, Any]) -> None:
        super().__init__()
        self._items = items

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = {".".join(path): value for path, value in self._items.items()}
        self.mappings = {".".join(path): path for path in self._items}
        self.is_coordinator = is_coordinator


def save(
    courier: Courier,
    path: Path,
    items: dict[_Path, Any] | None,
    aliases: Mapping[_Path, _Path],
    order: Sequence[_Path],
    metadata: Mapping[str, Any],
) -> None:
    """Write a folder together; it takes the place of what is at ``path`` once it is complete.

    Args:
        courier: To the writer.
        path: The same on all ranks, on a file system that all of them see.
        items: What this rank gives; None for one that gives nothing.
        aliases: Further places of what is written once.
        order: Places, or what they begin with, in the order that an ordinary file has; of the writer.
        metadata: What goes into ``meta.pt``; of the writer.
    """
    partial = beside(path, "partial")
    together(courier, lambda: _make_room(partial, path))
    storage = FileSystemWriter(partial)
    storage.set_up_storage_writer(courier.is_writer)
    planner = _SavePlanner(items or {})
    planner.set_up_planner({}, storage.storage_meta(), courier.is_writer)
    plan = storage.prepare_local_plan(planner.create_local_plan()) if items is not None else None
    plans = courier.gather(plan)
    whole: Metadata | None = None
    if courier.is_writer:
        plans, whole = _joined(plans, planner, storage)
    plan = courier.scatter(plans)
    results, problem = _attempt(lambda: _write(plan, planner, storage))
    gathered = courier.gather((results, problem))

    def finish() -> None:
        for rank, (_, failure) in enumerate(gathered):
            if failure is not None:
                raise OSError(f"rank {rank}: {failure}")
        assert whole is not None
        further = _add_aliases(whole, gathered, aliases)
        _sort(whole, order)
        storage.finish(whole, [*(done for done, _ in gathered), further])
        torch.save(dict(metadata), partial / METADATA)
        sync_file(partial / METADATA)
        replace(partial, path)

    together(courier, lambda: _or_clear(finish, partial))


def _or_clear(finish: Callable[[], None], partial: Path) -> None:
    """``finish()``; where that fails, nothing is left of what all ranks have written."""
    try:
        finish()
    except BaseException:
        remove(partial)
        raise


def _make_room(partial: Path, path: Path) -> None:
    check_replaceable(path)
    remove(partial)
    partial.mkdir(parents=True)


def _joined(
    plans: list[SavePlan | None], planner: DefaultSavePlanner, storage: FileSystemWriter
) -> tuple[list[Any], Metadata]:
    """The plan of each rank, and what all of them write."""
    givers = [rank for rank, plan in enumerate(plans) if plan is not None]
    joined, metadata = planner.create_global_plan([plan for plan in plans if plan is not None])
    by_rank: list[Any] = [None] * len(plans)
    for rank, plan in zip(givers, storage.prepare_global_plan(joined), strict=True):
        by_rank[rank] = plan
    return by_rank, metadata


def _write(plan: SavePlan | None, planner: DefaultSavePlanner, storage: FileSystemWriter) -> list[WriteResult]:
    if plan is None:
        return []
    results: list[WriteResult] = storage.write_data(planner.finish_plan(plan), planner).wait()
    return results


def _add_aliases(
    metadata: Metadata, gathered: Iterable[tuple[list[WriteResult], Any]], aliases: Mapping[_Path, _Path]
) -> list[WriteResult]:
    """Let further names of a tensor point to the same bytes."""
    added = []
    names = {".".join(alias): (".".join(first), alias) for alias, first in aliases.items()}
    for alias, (first, path) in names.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[first]
        metadata.planner_data[alias] = path
        for results, _ in gathered:
            for result in results:
                if result.index.fqn == first:
                    added.append(dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias)))
    return added


def _sort(metadata: Metadata, order: Sequence[_Path]) -> None:
    """Put the values in the order in which one process would have written them."""
    places = {path: number for number, path in enumerate(order)}

    def place(name: str) -> int:
        path = metadata.planner_data[name]
        return next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), len(places))

    names = sorted(metadata.state_dict_metadata, key=place)
    metadata.state_dict_metadata = {name: metadata.state_dict_metadata[name] for name in names}


def _attempt(action: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return action(), None
    except Exception as error:
        found = reason(error)
        return None, f"{type(found).__name__}: {found}"


def together(courier: Courier, action: Callable[[], None]) -> None:
    """Let the writer do something; all ranks fail if it does."""
    error: BaseException | None = None
    if courier.is_writer:
        try:
            action()
        except Exception as caught:
            error = reason(caught)
    problem = courier.share(f"{type(error).__name__}: {error}" if error is not None else None)
    if error is not None:
        raise error
    if problem is not None:
        raise FollowingError(f"Rank 0 could not write the checkpoint: {problem}")
