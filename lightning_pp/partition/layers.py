"""Which modules are layers: the smallest pieces that are never cut inside.

A layer is a block of an ``nn.ModuleList`` or ``nn.Sequential``, or a module with parameters that hangs beside such
lists (an embedding, a final norm, a head). The modules on the way down to the blocks are containers: their Python code
is the glue that every stage runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from torch import nn

__all__: list[str] = []

_BLOCK_LISTS = (nn.ModuleList, nn.Sequential)


def find_layers(
    model: nn.Module, wanted: Sequence[str | type[nn.Module]] | None = None, ignored: tuple[type, ...] = ()
) -> dict[str, nn.Module]:
    """Find the layers of ``model``, in the order of its module tree.

    Args:
        model: The LightningModule; never a layer itself.
        wanted: None to find them. Otherwise classes, import paths of classes (``"package.module.Block"``) or names of
            modules; modules with parameters that lie outside of all wanted ones become layers too.
        ignored: Classes that are never layers (metrics).

    Returns:
        ``{name: module}``, every module once (a shared one under its first name), no layer inside another.

    Raises:
        ValueError: An entry of ``wanted`` matches nothing; the message lists what there is.
    """
    layers: dict[str, nn.Module] = {}
    seen: set[int] = set()
    is_layer = _is_found_layer if wanted is None else _wanted_rule(model, wanted)

    def visit(name: str, module: nn.Module, parent: nn.Module) -> None:
        if id(module) in seen or isinstance(module, ignored):
            return
        seen.add(id(module))
        if is_layer(module, parent):
            layers[name] = module
            seen.update(id(inner) for inner in module.modules())
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}", child, module)

    for name, child in model.named_children():
        visit(name, child, model)
    return layers


def chosen_layers(
    model: nn.Module, layers: Mapping[str, nn.Module], wanted: bool | Sequence[str | type[nn.Module]]
) -> frozenset[str]:
    """Names of those ``layers`` that ``wanted`` names, by themselves or by what they stand in.

    Args:
        model: The LightningModule.
        layers: Its layers, by name.
        wanted: True for all, False for none. Otherwise classes, import paths of classes or names of modules.

    Raises:
        ValueError: An entry of ``wanted`` names no layer; the message lists what there is.
    """
    if isinstance(wanted, bool):
        return frozenset(layers) if wanted else frozenset()
    chosen: set[str] = set()
    for entry in wanted:
        named = dict(model.named_modules())
        is_name = isinstance(entry, str) and bool(entry) and entry in named
        found = {id(named[entry])} if is_name else _of_class(model, entry)
        inside = {id(inner) for module in model.modules() if id(module) in found for inner in module.modules()}
        names = [name for name, layer in layers.items() if id(layer) in inside]
        if not names:
            classes = sorted({type(layer).__name__ for layer in layers.values()})
            raise ValueError(
                f"activation_checkpointing={list(wanted)!r}: {entry!r} is no layer of {type(model).__name__}. Give"
                f" True, or classes or names of layers: its layers are {', '.join(layers)}, of the classes"
                f" {', '.join(classes)}."
            )
        chosen.update(names)
    return frozenset(chosen)


def _is_found_layer(module: nn.Module, parent: nn.Module) -> bool:
    if isinstance(module, _BLOCK_LISTS) or not _has_forward(module):
        return False
    if isinstance(parent, _BLOCK_LISTS):
        return True
    holds_blocks = any(isinstance(inner, _BLOCK_LISTS) for inner in module.modules())
    return not holds_blocks and _has_parameters(module)


def _wanted_rule(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> Callable[[nn.Module, nn.Module], bool]:
    matches: set[int] = set()
    for entry in wanted:
        found = _matching(model, entry)
        if not found:
            classes = sorted({type(module).__name__ for module in model.modules()} - {type(model).__name__})
            raise ValueError(
                f"layers={list(wanted)!r}: {entry!r} matches no module of {type(model).__name__}. Give a class, the"
                f" import path of a class or a module's name. Its classes are {', '.join(classes)}; its modules"
                f" {', '.join(name for name, _ in model.named_children())} and what they hold."
            )
        matches.update(found)

    def is_layer(module: nn.Module, parent: nn.Module) -> bool:
        if id(module) in matches:
            return True
        holds_matches = any(id(inner) in matches for inner in module.modules())
        return not holds_matches and _has_parameters(module) and _has_forward(module)

    return is_layer


def _matching(model: nn.Module, entry: str | type[nn.Module]) -> set[int]:
    named = dict(model.named_modules())
    if isinstance(entry, str) and entry in named and entry:
        if not _has_forward(named[entry]):
            raise ValueError(
                f"layers=[{entry!r}]: {entry!r} is a {type(named[entry]).__name__}, which is never called itself. Name"
                f" what it holds: {', '.join(f'{entry}.{name}' for name, _ in named[entry].named_children())}."
            )
        return {id(named[entry])}
    return _of_class(model, entry)


def _of_class(model: nn.Module, entry: str | type[nn.Module]) -> set[int]:
    cls = _import_class(entry) if isinstance(entry, str) else entry
    return {id(module) for module in model.modules() if cls is not None and isinstance(module, cls)} - {id(model)}


def _import_class(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _has_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
