"""What a layer changes in the lists, dicts and dataclasses that it is given, shown to the code that gave them.

While a trace runs, a layer sees copies of its argument containers. What it adds to them is shown to the caller, so that
a use of it can be refused: on other stages it would be missing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_pp.partition import tree

__all__: list[str] = []


def show_changes(original: Any, changed: Any, real_of: dict[int, Any]) -> Iterator[Callable[[], None]]:
    """Make ``original`` hold what its copy ``changed`` holds.

    Args:
        original: Nested lists, tuples, dicts and dataclasses.
        changed: Its copy, after the layer has run.
        real_of: By ``id()``, what the leaves of the copy were copied from.

    Yields:
        For each changed container what gives it its old content back.
    """
    if type(original) is not type(changed) or isinstance(original, Tensor):
        return
    before, after = _entries(original), _entries(changed)
    for key, item in before.items():
        if key in after:
            yield from show_changes(item, after[key], real_of)
    new = {key: _shown(before.get(key), item, real_of) for key, item in after.items()}
    if not isinstance(original, tuple) and (
        new.keys() != before.keys() or any(new[key] is not before[key] for key in before)
    ):
        yield _filled(original, new)


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return dict(vars(value)) if _is_open_dataclass(value) else {}


def _shown(before: Any, item: Any, real_of: dict[int, Any]) -> Any:
    """The entry as the caller sees it: containers that were there stay the same objects."""
    if type(before) is type(item) and not tree.is_leaf(item):
        return before
    return real_of.get(id(item), item)


def _filled(container: Any, new: dict[Any, Any]) -> Callable[[], None]:
    live = vars(container) if _is_open_dataclass(container) else container
    content = copy.copy(live)

    def put(items: Any) -> None:
        live.clear()
        if isinstance(live, list):
            live.extend(items)
        else:
            live.update(items)

    put(list(new.values()) if isinstance(live, list) else new)
    return lambda: put(content)


def _is_open_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
