"""The module, its batch and its optimizer, as the command line names them; nothing of it takes memory."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pp.partition import tree
from lightning_pp.partition.random_state import preserved
from lightning_pp.runtime.deferred import deferring
from lightning_pp.weights.materialise import Construction

__all__: list[str] = []

_CPU = torch.device("cpu")
_SPEC = re.compile(r"(\w+)\[([\d,\s]*)\]")
#: name -> dtype of the parameters and floating inputs, and of autocast
PRECISIONS: Mapping[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "64-true": (torch.float64, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a config names.

    Attributes:
        model: Makes the module.
        data: Makes the data module; None where there is none.
        strategy: The arguments of the strategy.
        precision: The Trainer's; None where it has none.
    """

    model: Callable[[], LightningModule]
    data: Callable[[], LightningDataModule] | None
    strategy: Mapping[str, Any]
    precision: str | None


def import_class(path: str, base: type) -> type[Any]:
    """The class that ``package.module:Class`` or ``package.module.Class`` names.

    Raises:
        ValueError: There is none.
    """
    place, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(place), name) if place else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path!r} is no {base.__name__} class: write package.module:Class")
    return found


def read_config(path: str, model_path: str | None, data_path: str | None, init_args: dict[str, Any]) -> Target:
    """Read a LightningCLI config.

    Args:
        path: The YAML file.
        model_path: The module's class, where the file does not name it.
        data_path: The data module's class, where the file does not name it.
        init_args: Stand above what the file says of the module.

    Raises:
        ValueError: The file cannot be read, or does not fit.
    """
    yaml: Any = importlib.import_module("yaml")  # comes with Lightning's command line
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: this is no LightningCLI config")
    config = config.get("fit", config)
    model = _maker(config.get("model"), model_path, LightningModule, init_args)
    if model is None:
        raise ValueError(f"--config {path} has no model.class_path: name the module's class on the command line")
    trainer = config.get("trainer") or {}
    strategy = trainer.get("strategy")
    arguments = strategy.get("init_args") if isinstance(strategy, dict) else None
    precision = trainer.get("precision")
    return Target(model, _maker(config.get("data"), data_path, LightningDataModule, {}), arguments or {},
                  None if precision is None else str(precision))  # fmt: skip


def _maker(section: Any, path: str | None, base: type, init_args: dict[str, Any]) -> Callable[[], Any] | None:
    """Makes what a section of a config describes, as LightningCLI would."""
    from jsonargparse import ArgumentParser

    section = dict(section or {})
    if "class_path" in section:
        path, section = section["class_path"], dict(section.get("init_args") or {})
    if path is None:
        return None
    cls = import_class(path, base)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "made")

    def make() -> Any:
        try:
            return parser.instantiate_classes(parser.parse_object({"made": {**section, **init_args}})).made
        except Exception as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error

    return make


def plain_maker(path: str, init_args: dict[str, Any]) -> Callable[[], LightningModule]:
    """Makes the class at ``path`` with ``init_args``."""
    cls = import_class(path, LightningModule)

    def make() -> LightningModule:
        try:
            return cls(**init_args)  # type: ignore[no-any-return]
        except TypeError as error:
            raise ValueError(f"{path}: {error}; give its arguments with --init-args") from error
        except Exception as error:
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error

    return make


def build(make: Callable[[], LightningModule], precision: str) -> tuple[LightningModule, Construction]:
    """Make the module without memory for its parameters, in its precision."""
    construction = _Drawless()
    try:
        with preserved(), construction.building(_CPU):
            module = make()
            module.trainer = _trainer()
            module.configure_model()
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    dtype = PRECISIONS[precision][0]
    if dtype is not None:
        with construction.following():
            module.to(dtype)
    return module, construction


class _Drawless(Construction):
    """Builds as the strategy does, but for the random numbers, which take a time that nobody has to spend here."""

    @contextmanager
    @override
    def building(self, device: torch.device) -> Iterator[None]:
        with deferring(self._recording, device, seed=0):
            yield


def _trainer() -> Trainer:
    """One that runs nothing, for modules that ask theirs something."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                       enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    finally:
        logger.setLevel(level)


def step_context(precision: str, device: str = "cpu") -> Callable[[], AbstractContextManager[Any]]:
    """The context in which the step runs on a kind of device."""
    dtype, autocast = PRECISIONS[precision]
    if autocast is not None:
        return lambda: torch.autocast(device, autocast)
    return (lambda: _default_dtype(dtype)) if dtype is not None else nullcontext


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def find_batch(module: LightningModule, data: LightningDataModule | None, given: str | None, precision: str) -> Any:
    """The batch: as given by its shapes, or the first one of the training data.

    Raises:
        ValueError: There is none.
    """
    batch = _shaped(given) if given is not None else _first(module, data)
    dtype = PRECISIONS[precision][0]

    def converted(leaf: Any) -> Any:
        is_float = dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return tree.map_leaves(converted, batch)


def _first(module: LightningModule, data: LightningDataModule | None) -> Any:
    with preserved():
        try:
            if data is not None:
                data.prepare_data()
                data.setup("fit")
            return next(iter((data or module).train_dataloader()))
        except Exception as error:
            if data is None and module.example_input_array is not None:
                return module.example_input_array
            where = type(data or module).__name__
            raise ValueError(
                f"{where}.train_dataloader gives no batch ({type(error).__name__}: {' '.join(str(error).split())}):"
                ' describe one with --batch, such as \'{"x": "float32[32, 128]", "y": "int64[32]"}\''
            ) from error


def _shaped(text: str) -> Any:
    try:
        spec = json.loads(text)
    except ValueError:
        spec = text  # one tensor needs no quotes
    return _tensors(spec, text)


def _tensors(spec: Any, text: str) -> Any:
    if isinstance(spec, dict):
        return {key: _tensors(item, text) for key, item in spec.items()}
    if isinstance(spec, list) and spec and all(type(item) is int for item in spec):
        return torch.empty(spec, device="meta")
    if isinstance(spec, list) and spec:
        return [_tensors(item, text) for item in spec]
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"--batch {text}: a tensor is a list of sizes such as [32, 128] (float32), or text such as"
            ' "int64[32, 128]"; tensors may stand in objects and lists'
        )
    return torch.empty([int(size) for size in match[2].split(",") if size.strip()], dtype=dtype, device="meta")


def optimizer_states(module: LightningModule, name: str | None) -> dict[str, int]:
    """Bytes of optimizer state by parameter: the optimizer takes one step on parameters without memory.

    Args:
        module: The module, on meta.
        name: A class of :mod:`torch.optim`; None for what the module configures.

    Raises:
        ValueError: There is no such optimizer, or it does not run so.
    """
    made = _optimizer(module, name)
    before = [(parameter, parameter.grad) for group in made.param_groups for parameter in group["params"]]
    for group in made.param_groups:
        group.update(dict.fromkeys({"fused"} & group.keys(), False))  # the same states, but on devices only
    try:
        for parameter, _ in before:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        made.step()
    except Exception as error:
        raise ValueError(
            f"{type(made).__name__} cannot take a step without memory ({type(error).__name__}: {error}): name a"
            " class of torch.optim with --optimizer"
        ) from error
    finally:
        for parameter, grad in before:
            parameter.grad = grad
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: sum(tensor.nbytes for tensor in tree.tensors_of(dict(state)))
        for parameter, state in made.state.items()
        if id(parameter) in names
    }


def _optimizer(module: LightningModule, name: str | None) -> Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name is not None:
        cls = getattr(torch.optim, name, None)
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
            raise ValueError(f"--optimizer {name}: torch.optim has no such class; allowed is SGD, Adam, AdamW, ...")
        return cls(parameters, lr=1e-3)  # type: ignore[call-arg]
    try:
        found = module.configure_optimizers()
    except Exception as error:
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers needs more than there is before a run"
            f" ({type(error).__name__}: {' '.join(str(error).split())}): name a class of torch.optim with --optimizer"
        ) from error
    if isinstance(found, Mapping):
        found = found["optimizer"]
    while isinstance(found, (list, tuple)) and found:  # ([optimizers], [schedulers]) too
        found = found[0]
    if not isinstance(found, Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers returns no optimizer: name a class of torch.optim with"
            " --optimizer"
        )
    return found
