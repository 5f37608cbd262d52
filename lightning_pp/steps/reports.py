"""What a step tells loggers and prints: it comes from the last stage, and rank 0 has the loggers.

Lightning's loggers and ``self.print`` do nothing but on rank 0, which ends its steps at the first layer of another
stage. So calls that a step makes are taken down on the last stage, once for every micro-batch, and made on rank 0 when
the batch is done. While a step is planned, on made-up values, they are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from typing_extensions import override

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        logger: The number of the logger; -1 is the module's own ``print``.
        path: Attributes of it, the last of which is called.
        args: As they were given.
        kwargs: The same.
    """

    logger: int
    path: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def taken_down(module: LightningModule) -> Iterator[list[Call]]:
    """Collect the calls of the block instead of making them."""
    calls: list[Call] = []
    trainer = module.trainer
    loggers = trainer.loggers
    stand_ins: list[Any] = [_Logger(number, logger, calls) for number, logger in enumerate(loggers)]
    trainer.loggers = stand_ins
    object.__setattr__(module, "print", _Recorded(calls, -1, ("print",)))
    try:
        yield calls
    finally:
        object.__delattr__(module, "print")
        trainer.loggers = loggers


def make(module: LightningModule, calls: Sequence[Call]) -> None:
    """Make calls that another rank has collected."""
    for call in calls:
        target: Any = module if call.logger < 0 else module.trainer.loggers[call.logger]
        for name in call.path:
            target = getattr(target, name)
        target(*call.args, **call.kwargs)


class _Recorded:
    """A method, or what its attributes lead to."""

    def __init__(self, calls: list[Call], logger: int, path: tuple[str, ...]) -> None:
        self._calls = calls
        self._logger = logger
        self._path = path

    def __getattr__(self, name: str) -> _Recorded:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorded(self._calls, self._logger, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append(Call(self._logger, self._path, args, kwargs))


class _Logger:
    """Stands in for a logger: methods and the experiment are recorded, other attributes are its own."""

    def __init__(self, number: int, logger: Any, calls: list[Call]) -> None:
        self._number = number
        self._logger = logger
        self._calls = calls

    @property  # type: ignore[misc]
    @override
    def __class__(self) -> type:  # the user's code may ask which logger it is
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment" or callable(getattr(type(self._logger), name, None)):
            return _Recorded(self._calls, self._number, (name,))
        return getattr(self._logger, name)
