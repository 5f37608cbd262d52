"""Layers that can be answered from outside: the one way this package reaches into a user's model.

A layer is switched by giving the *instance* a subclass of its own class whose ``__call__`` first asks a handler. The
name, ``isinstance`` checks, parameters, hooks and the state dict stay what they were, and wrappers that call the layer
again in the backward pass (gradient checkpointing) arrive here too, which a replaced ``forward`` would not notice.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.backends import mha

__all__: list[str] = []

#: ``handler(layer name, the layer's own call, args, kwargs) -> the layer's output``
Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_ATTRIBUTE = "_pipeline_switch"


class Switch:
    """What one switched layer knows: its name and the board it belongs to."""

    __slots__ = ("board", "name")

    def __init__(self, name: str, board: Switchboard) -> None:
        self.name = name
        self.board = board


@contextmanager
def without_fast_path() -> Iterator[None]:
    """The block in which steps run in stages.

    ``nn.TransformerEncoder`` packs padded batches into nested tensors where no gradient is wanted. Those have no sizes
    to plan with and cannot be sent, so its fast path is off meanwhile.
    """
    is_fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(is_fast)


class Switchboard:
    """The switched layers of one model.

    Attributes:
        handler: Answers layer calls while it is set; None outside of a step.
        outside: Answers layer calls while no handler is set (user code in a hook); None lets the layer compute.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        self.handler: Handler | None = None
        self.outside: Handler | None = None

    def install(self) -> None:
        """Switch every layer; one that another board has switched changes over to this one."""
        for name, layer in self.layers.items():
            object.__setattr__(layer, _ATTRIBUTE, Switch(name, self))
            if not isinstance(layer, _Switched):
                layer.__class__ = _switched_class(type(layer))

    def remove(self) -> None:
        """Give every layer its own class back."""
        for layer in self.layers.values():
            if isinstance(layer, _Switched):
                layer.__class__ = type(layer).__mro__[2]
                object.__delattr__(layer, _ATTRIBUTE)

    @contextmanager
    def answered_by(self, handler: Handler | None) -> Iterator[None]:
        """Let ``handler`` answer all layer calls inside the block."""
        before, self.handler = self.handler, handler
        try:
            with without_fast_path():
                yield
        finally:
            self.handler = before


class _Switched:
    """Mixed in before the layer's own class; see the module's docstring."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        switch: Switch = self.__dict__[_ATTRIBUTE]
        board = switch.board
        handler = board.handler or board.outside
        compute = super().__call__  # type: ignore[misc]
        if handler is None:
            return compute(*args, **kwargs)
        return handler(switch.name, compute, args, kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the switched class from the registry that the layer's own class may keep of its subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are the user's plain layer: no part of the pipeline leaves the process."""
        reduced: Any = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        function, args, *rest = reduced
        plain = type(self).__mro__[2]
        args = tuple(plain if arg is type(self) else arg for arg in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: item for key, item in rest[0].items() if key != _ATTRIBUTE}
        # pickle would complain that copyreg's function makes another class than the object's
        return (_new if function is copyreg.__newobj__ else function, args, *rest)  # type: ignore[attr-defined]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user has given ``module``."""
    cls: type[nn.Module] = type(module)
    return cls.__mro__[2] if issubclass(cls, _Switched) else cls


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _switched_class(cls: type) -> type:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (_Switched, cls), namespace)
