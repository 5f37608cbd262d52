"""Checks the arguments of ``PipelineStrategy`` as far as they can be checked without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pp.schedule import AUTO, SCHEDULES, named, read_csv

__all__: list[str] = []

BALANCES = ("flops", "params", "time", "memory")
_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of :class:`lightning_pp.PipelineStrategy`, checked."""

    stages: int | Literal["auto"]
    microbatches: int | None
    schedule: str
    layers: Sequence[str | type[nn.Module]] | None
    split: Sequence[str] | None
    balance: str
    activation_checkpointing: bool | Sequence[str | type[nn.Module]]
    process_group_backend: str | None
    timeout: timedelta

    def __post_init__(self) -> None:
        if self.stages != "auto":
            _check_count("stages", self.stages, "'auto' or an int of at least 1")
        if self.microbatches is not None:
            _check_count("microbatches", self.microbatches, "None or an int of at least 1")
        if self.balance not in BALANCES:
            raise ValueError(f"balance={self.balance!r}: allowed are {', '.join(map(repr, BALANCES))}.")
        if self.process_group_backend is not None and self.process_group_backend not in _BACKENDS:
            raise ValueError(
                f"process_group_backend={self.process_group_backend!r}: allowed are None, 'gloo' and 'nccl'."
            )
        if isinstance(self.split, str) or isinstance(self.layers, str):
            raise TypeError("`split` and `layers` take lists: write ['name'], not 'name'.")
        if not isinstance(self.timeout, timedelta):
            raise TypeError(f"timeout={self.timeout!r}: allowed is a datetime.timedelta, in YAML '0:30:00'.")
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout={self.timeout}: it must be longer than 0 seconds.")
        self._check_schedule()
        self._check_split()

    def _check_schedule(self) -> None:
        if named(self.schedule) is not None:
            return
        if not self.schedule.endswith(".csv") and not Path(self.schedule).is_file():
            raise ValueError(
                f"schedule={self.schedule!r}: allowed are {', '.join(map(repr, (*SCHEDULES, AUTO)))}, '1f1b+1' and the"
                " like (extra micro-batches in flight, one number or one per rank), and the path of a CSV file."
            )
        read_csv(self.schedule)

    def _check_split(self) -> None:
        if self.split is not None and self.stages != "auto" and len(self.split) != self.stages - 1:
            raise ValueError(
                f"split={list(self.split)!r} names {len(self.split)} layer(s), but stages={self.stages} needs"
                f" {self.stages - 1}: those that begin stages 1 to {self.stages - 1}."
            )

    def num_stages(self, world_size: int) -> int:
        """The pipeline depth for a job of ``world_size`` processes.

        Raises:
            MisconfigurationException: The processes cannot be laid out as asked.
        """
        stages = world_size if self.stages == "auto" else self.stages
        if world_size % stages:
            raise MisconfigurationException(
                f"PipelineStrategy(stages={stages}) needs a multiple of {stages} processes, but devices x num_nodes ="
                f" {world_size}. Set devices to a multiple of {stages}, or stages to a divisor of {world_size}."
            )
        if self.split is not None and len(self.split) != stages - 1:
            raise MisconfigurationException(
                f"split={list(self.split)!r} names {len(self.split)} layer(s), but {stages} stages need {stages - 1}."
            )
        return stages

    def num_microbatches(self, num_stages: int) -> int:
        """Most micro-batches per batch."""
        return 4 * num_stages if self.microbatches is None else self.microbatches


def _check_count(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: allowed is {allowed}.")
    if value < 1:
        raise ValueError(f"{name}={value}: allowed is {allowed}.")
