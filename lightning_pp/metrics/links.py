"""How a torchmetrics object is shared: the *instance* is given a subclass of its own class, as layers are.

Copies that the user's code makes of it (as ``MetricTracker`` does) are shared too; a pickle is the plain metric.
"""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn
from torchmetrics import Metric

from lightning_pp.metrics.batch_values import Calls, alone

__all__: list[str] = []

_LINK = "_pipeline_link"
#: attributes of the instance that sharing replaces
_REPLACED = ("compute", "update", "distributed_available_fn", "process_group")
#: attributes that hold values rather than state
_PASSING = ("_forward_cache", "_computed", "_cache")


class Handler(Protocol):
    """Answers what a shared metric is asked."""

    def forward(
        self, metric: Metric, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``metric(*args, **kwargs)``."""

    def update(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``metric.update(*args, **kwargs)``."""

    def compute(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``metric.compute(*args, **kwargs)``."""

    def before_reset(self, metric: Metric) -> None:
        """``metric.reset()`` is about to run."""


class Link:
    """What one shared metric knows besides its own state.

    Args:
        board: The links that this one belongs to.
        name: Of the attribute that holds the metric.
        metric: The metric, not shared yet.

    Attributes:
        calls: Its calls in the batch under way.
        is_nested: Whether there are other metrics inside.
        own: The attributes that sharing replaces.
        value: ``(version, value)`` of the last ``compute``.
        version: Changes with its state.
    """

    __slots__ = ("board", "calls", "is_nested", "name", "own", "value", "version")

    def __init__(self, board: Links, name: str, metric: Metric) -> None:
        self.board = board
        self.name = name
        self.calls = Calls()
        self.own = {key: vars(metric)[key] for key in _REPLACED}
        self.is_nested = sum(isinstance(module, Metric) for module in metric.modules()) > 1
        self.version = 0
        self.value: tuple[Any, Any] | None = None


def link_of(metric: Metric) -> Link:
    """The link of a shared metric."""
    link: Link = vars(metric)[_LINK]
    return link


class Links:
    """The shared metrics of one module.

    Args:
        handler: Answers for them.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._alive: dict[int, weakref.ref[Metric]] = {}
        self._is_copying = False

    def __contains__(self, metric: Metric) -> bool:
        return _LINK in vars(metric)

    def __len__(self) -> int:
        return len(self._alive)

    def add(self, name: str, metric: Metric) -> None:
        """Share ``metric``, unless it is shared."""
        if metric not in self:
            self._attach(metric, Link(self, name, metric))

    def release(self) -> None:
        """Give the metrics their own ways back."""
        for reference in list(self._alive.values()):
            metric = reference()
            if metric is not None:
                self._detach(metric)
                if any(parameter.is_meta for parameter in metric.parameters()):
                    # Lightning moves logged metrics after a run
                    vars(metric)["_apply"] = partial(_apply_to_present, metric)
        self._alive.clear()

    def independent_copy(self, metric: Metric) -> Metric:
        """A copy that has seen nothing, in which no metric is shared."""
        inside = [module for module in metric.modules() if isinstance(module, Metric)]
        states = [
            {key: vars(inner)[key] for key in (*inner._defaults, *_PASSING) if key in vars(inner)} for inner in inside
        ]
        for inner, state in zip(inside, states, strict=True):
            # what it has seen may be large, or hold a graph, which cannot be copied
            vars(inner).update({key: copy.copy(inner._defaults.get(key)) for key in state})
        self._is_copying = True
        weights = {id(tensor): tensor for tensor in (*metric.parameters(), *metric.buffers())}
        try:
            made = copy.deepcopy(metric, weights)  # what it computes with need not be there twice
        finally:
            self._is_copying = False
            for inner, state in zip(inside, states, strict=True):
                vars(inner).update(state)
        for module in made.modules():
            if isinstance(module, Metric):
                alone(module)
        made.reset()
        return made

    def _attach(self, metric: Metric, link: Link) -> None:
        reference = weakref.ref(metric, partial(_drop, self._alive, id(metric)))
        vars(metric)[_LINK] = link
        metric.__class__ = _shared_class(type(metric))
        metric.compute = partial(self._compute, reference)  # type: ignore[method-assign]
        metric.update = partial(self._update, reference)  # type: ignore[method-assign]
        alone(metric)
        self._alive[id(metric)] = reference

    def _detach(self, metric: Metric) -> Link:
        link: Link = vars(metric).pop(_LINK)
        metric.__class__ = type(metric).__mro__[2]
        vars(metric).update(link.own)
        return link

    @contextmanager
    def lifted(self, metric: Metric) -> Iterator[Link]:
        """The block in which ``metric`` is the user's plain one."""
        link = self._detach(metric)
        try:
            yield link
        finally:
            self._attach(metric, link)

    def copied(self, metric: Metric, memo: Any) -> Metric:
        """A deep copy, shared as ``metric`` is."""
        with self.lifted(metric) as link:
            # a wrapper that passes on what it does not know would answer with the metric inside
            vars(metric)["__deepcopy__"] = None
            try:
                made = copy.deepcopy(metric, memo)
            finally:
                del vars(metric)["__deepcopy__"]
            del vars(made)["__deepcopy__"]
        if not self._is_copying:
            self._attach(made, Link(self, link.name, made))
        return made

    def _compute(self, reference: weakref.ref[Metric], *args: Any, **kwargs: Any) -> Any:
        return self.handler.compute(_alive(reference), args, kwargs)

    def _update(self, reference: weakref.ref[Metric], *args: Any, **kwargs: Any) -> None:
        self.handler.update(_alive(reference), args, kwargs)


class _Shared:
    """Mixed in before the metric's own class; see the module's docstring."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        link: Link = self.__dict__[_LINK]
        return link.board.handler.forward(self, super().forward, args, kwargs)  # type: ignore[arg-type,misc]

    def reset(self) -> None:
        self.__dict__[_LINK].board.handler.before_reset(self)
        super().reset()  # type: ignore[misc]

    def _apply(self, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        return super()._apply(_Present(fn), *args, **kwargs)  # type: ignore[misc]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the shared class from the registry that the metric's own class may keep of its subclasses."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__dict__[_LINK].board.copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self.__dict__[_LINK].board.lifted(self):
            function, *rest = self.__reduce_ex__(protocol)
        # pickle would complain that copyreg's function makes another class than the object's
        return (_new if function is copyreg.__newobj__ else function, *rest)  # type: ignore[attr-defined]


def _apply_to_present(metric: Metric, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    return type(metric)._apply(metric, _Present(fn), *args, **kwargs)


class _Present:
    """Applies a function to what is here: a metric's own weights may lie on other stages."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, tensor: Any) -> Any:
        return tensor if tensor.is_meta else self._function(tensor)

    def __str__(self) -> str:  # torchmetrics goes by the function's name
        return str(self._function)


def metrics_in(path: str, holder: object) -> Iterator[tuple[str, Metric]]:
    """The metrics that an object holds, each once, by the names of their attributes; those in plain lists too."""
    seen: set[int] = set()
    for name, value in _held(path, holder):
        modules = [(name, value)]
        if isinstance(value, nn.Module):
            modules = [(".".join(filter(None, (name, inner))), module) for inner, module in value.named_modules()]
        for inner, module in modules:
            if isinstance(module, Metric) and id(module) not in seen:
                seen.add(id(module))
                yield inner, module


def _held(path: str, holder: object) -> Iterator[tuple[str, Any]]:
    """``holder``, and what its attributes and those of its submodules hold in plain containers."""
    yield path, holder
    owners = [(path, holder)]
    if isinstance(holder, nn.Module):
        owners = [(".".join(filter(None, (path, name))), module) for name, module in holder.named_modules()]
    for name, owner in owners:
        for key, value in vars(owner).items():
            if isinstance(value, nn.Module):
                yield f"{name}.{key}", value
            elif isinstance(value, (list, tuple, dict)) and not key.startswith("_"):
                items = value.values() if isinstance(value, dict) else value
                yield from ((f"{name}.{key}", item) for item in items if isinstance(item, nn.Module))


def _shared_class(cls: type) -> type:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (_Shared, cls), namespace)


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _drop(alive: dict[int, Any], key: int, _: object) -> None:
    alive.pop(key, None)


def _alive(reference: weakref.ref[Metric]) -> Metric:
    metric = reference()
    assert metric is not None, "a metric is alive while it is called"
    return metric
