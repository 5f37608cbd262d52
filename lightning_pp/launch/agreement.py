"""Before anything is built: were all processes started alike? What differs is named, on every rank.

Each process says what it was started with, and rank 0 compares. It goes by the job's store alone: processes that differ
in their stages would not even agree on which groups to make.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.arguments import Arguments

__all__: list[str] = []

#: the Trainer's attributes that decide what a step does or when the processes meet, under their public names
_TRAINER = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "precision", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs", "num_nodes",
)  # fmt: skip
_SEED = "torch.initial_seed()"
#: parameters that are compared one by one
_FEW = 500


def check(store: Any, rank: int, size: int, arguments: Arguments, trainer: Trainer) -> None:
    """Compare what the processes were started with.

    Raises:
        MisconfigurationException: Something differs; every rank says what.
    """
    name = f"lightning_pp/started/{store.add(f'lightning_pp/starts/{rank}', 1)}"
    own = started_with(arguments, trainer)
    store.set(f"{name}/{rank}", json.dumps(own))
    verdict = f"{name}/verdict"
    if rank == 0:
        others = [json.loads(bytes(store.get(f"{name}/{other}"))) for other in range(size)]
        store.set(verdict, json.dumps(differences(others)))
    different, seeds = json.loads(bytes(store.get(verdict)))
    if different:
        raise MisconfigurationException(
            f"The processes were not started alike: {different}. Every process must run the same code with the same"
            " arguments; start all of them with one command and the same files."
        )
    if seeds:
        rank_zero_warn(
            f"The processes start from different random numbers ({seeds}): weights that a stage draws are not those of"
            " one process. Call seed_everything with the same seed on every rank."
        )


def differences(given: list[dict[str, str]]) -> tuple[str, str]:
    """What differs between the ranks, and how far their random numbers do; empty texts where nothing does."""
    found = []
    seeds = ""
    for name in dict.fromkeys(name for one in given for name in one):
        values = [one.get(name, "nothing") for one in given]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if rank is None:
            continue
        text = f"{name} is {values[0]} on rank 0 and {values[rank]} on rank {rank}"
        if name == _SEED:
            seeds = text
        else:
            found.append(text)
    return "; ".join(found), seeds


def started_with(arguments: Arguments, trainer: Trainer) -> dict[str, str]:
    """What this process was started with, by the names that a user gives to it."""
    found = {f"PipelineStrategy({field.name}=)": _shown(getattr(arguments, field.name)) for field in fields(arguments)}
    if Path(arguments.schedule).is_file():
        found["the content of the schedule file"] = _digest([Path(arguments.schedule)])
    found |= {f"Trainer({name}=)": _shown(getattr(trainer, name, None)) for name in _TRAINER}
    found["the Trainer's method"] = str(trainer.state.fn and trainer.state.fn.value)
    found["Trainer(callbacks=) that save checkpoints"] = _shown(type(c).__name__ for c in trainer.checkpoint_callbacks)
    found["seed_everything"] = os.environ.get("PL_GLOBAL_SEED", "not called")
    found[_SEED] = str(torch.initial_seed())
    found["Python"] = platform.python_version()
    found["torch"] = torch.__version__
    found["lightning"] = lightning.__version__
    found["the code of lightning_pp"] = _digest(Path(__file__).parents[1].rglob("*.py"))
    return found | _of_module(trainer.lightning_module)


def _of_module(module: LightningModule) -> dict[str, str]:
    found = {"the model's class": type(module).__qualname__}
    for cls in type(module).__mro__:
        if cls is LightningModule:
            break
        try:
            found[f"the file of {cls.__qualname__}"] = _digest([Path(inspect.getfile(cls))])
        except (OSError, TypeError):  # made in a notebook, or not from a file at all
            continue
    for name, parameter in module.named_parameters():
        is_lazy = torch.nn.parameter.is_lazy(parameter)
        found[f"parameter {name!r}"] = "lazy" if is_lazy else str(list(parameter.shape))
    names = [name for name in found if name.startswith("parameter ")]
    if len(names) > _FEW:  # a large model would fill the store
        text = "".join(f"{name}{found.pop(name)}" for name in names)
        found["the model's parameters"] = f"{len(names)} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return found


def _digest(paths: Any) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return f"version {digest.hexdigest()[:12]}"


def _shown(value: Any) -> str:
    """The value as text that is the same in all processes."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__iter__") and not isinstance(value, (str, bytes)):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return repr(value)
