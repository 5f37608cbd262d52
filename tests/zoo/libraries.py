"""The libraries whose models are in the zoo: whether they are there, and how they are imported."""

import importlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

NAMES = ("transformers", "peft", "timm")


def absent(name: str) -> str | None:
    """Why library ``name`` cannot be used here; None where it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed; docs/zoo.md says how to install the libraries of the zoo"


def versions() -> str:
    """What there is, with versions."""
    names = ("torch", *(name for name in NAMES if absent(name) is None))
    return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in names)


def load() -> None:
    """Import what is installed, without network and without advice."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), _torchvision():
        warnings.simplefilter("ignore")
        for name in NAMES:
            if absent(name) is None:
                importlib.import_module(name)


@contextmanager
def _torchvision() -> Iterator[None]:
    """Let timm import names from torchvision where there is none.

    PyPI's torchvision is built for CUDA and fails on import beside a torch that is not. timm imports its data sets and
    transforms when it is imported, and its models use none of them.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _Names()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


class _Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and everything in it: modules of empty classes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Constants(name, (), {})


class _Constants(type):
    """A class whose attributes are their own names, as those of an enumeration could be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name
