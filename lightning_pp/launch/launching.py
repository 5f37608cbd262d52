"""What comes before processes are connected: is there a script to start again, is it one job, where do they meet."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.rendezvous import rendezvous

__all__: list[str] = []


def has_script() -> bool:
    """Whether the running program can be started again: not a notebook, a prompt, ``python -c`` or standard input."""
    main = sys.modules["__main__"]
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and Path(path).is_file())


def check_needs_no_script(num_processes: int) -> None:
    """Refuse to start several processes where :func:`has_script` says no.

    Raises:
        MisconfigurationException: There is more than one process.
    """
    if num_processes > 1:
        raise MisconfigurationException(
            f"PipelineStrategy cannot start {num_processes} processes from here: each runs the same script from the"
            " top, and a notebook, a Python prompt, `python -c` and standard input have no script. Put the code into a"
            " file and run `python train.py` (from a notebook: `!python train.py`), start it with torchrun, or use"
            " devices=1."
        )


def check_same_job(world_size: int) -> None:
    """Refuse a Trainer of another size than that for which this script's processes were started.

    Raises:
        MisconfigurationException: The sizes differ.
    """
    if dist.is_initialized() and dist.get_world_size() != world_size:
        raise MisconfigurationException(
            f"This script's processes were connected as a job of {dist.get_world_size()}, and this Trainer asks for"
            f" devices x num_nodes = {world_size}. Use the same devices and num_nodes for all Trainers of a script, or"
            " put the other run into a script of its own."
        )


def open_store(environment: ClusterEnvironment, timeout: timedelta) -> Any:
    """The key-value store through which the processes find each other.

    A failure disconnects them, and a script may go on to its next Trainer. They meet again in the same store, whose
    server lives as long as the process of rank 0, under keys that nobody has used before.
    """
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    rank = environment.global_rank()
    store, *_ = next(iter(rendezvous("env://", rank, environment.world_size(), timeout=timeout)))
    atexit.register(id, store)  # a reference that lasts
    return dist.distributed_c10d.PrefixStore(f"lightning_pp/{store.add(f'lightning_pp/connections/{rank}', 1)}", store)
