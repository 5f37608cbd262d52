"""All runs of the zoo, and what comes of comparing them."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.launch import run_ranks
from tests.zoo import libraries
from tests.zoo.entries import Entry
from tests.zoo.rows import ROWS
from tests.zoo.running import Plain, Seen, run_four, run_plain, run_two

PATIENCE = 900.0


class Zoo:
    """Runs all rows in the same processes, once, when somebody asks.

    Args:
        folder: For the checkpoints.
        rows: Those whose libraries are installed unless given.
    """

    def __init__(self, folder: Path, rows: dict[str, Entry] | None = None) -> None:
        found = {name: row for name, row in ROWS.items() if libraries.absent(row.library) is None}
        self.rows = found if rows is None else rows
        self._folder = folder

    @cached_property
    def two(self) -> list[dict[str, Seen]]:
        """By rank, what two stages saw."""
        return run_ranks(run_two, 2, self.rows, self._folder, timeout=PATIENCE)

    @cached_property
    def four(self) -> list[dict[str, Seen]]:
        """By rank, what four stages saw that went on from the checkpoints of two."""
        assert self.two
        return run_ranks(run_four, 4, self.rows, self._folder, timeout=PATIENCE)

    @cached_property
    def plain(self) -> dict[str, Plain]:
        """The runs without the strategy."""
        assert self.two
        return run_ranks(run_plain, 1, self.rows, self._folder, timeout=PATIENCE)[0]  # type: ignore[no-any-return]

    def of(self, name: str, stages: int) -> list[Seen]:
        """By rank, what ``stages`` stages saw of row ``name``."""
        return [seen[name] for seen in (self.two if stages == 2 else self.four)]

    def verdict(self, name: str, stages: int) -> str:
        """``equal``, ``refused``, or what differs."""
        found, expected = self.of(name, stages), self.plain[name].whole
        if all("MisconfigurationException" in seen.error for seen in found):
            return "refused"
        errors = [seen.error for seen in found if seen.error]
        return errors[0] if errors else differs(expected, found, self.rows[name].tolerance) or "equal"

    def checkpoint_verdict(self, name: str) -> str:
        """``equal`` where the plain run loads, and goes on from, what two stages have saved."""
        plain, tolerance = self.plain[name], self.rows[name].tolerance
        if plain.resumed is None:
            return "nothing was saved"
        if plain.resumed.error:
            return plain.resumed.error
        return (
            differs(plain.whole, [plain.resumed], tolerance)
            or unlike(plain.whole.state, plain.loaded, tolerance)
            or "equal"
        )


def differs(expected: Seen, found: list[Seen], tolerance: float) -> str:
    """What of ``found``, on any rank, differs from the plain run; empty where nothing does.

    A run that was resumed is compared with the end of the plain one.
    """
    if expected.error:
        return expected.error
    state: dict[str, Tensor] = {}
    for rank, seen in enumerate(found):
        if not seen.losses or len(expected.losses) % len(seen.losses):
            return f"{len(seen.losses)} losses on rank {rank} instead of {len(expected.losses)}"
        numbers = list(zip(seen.losses, expected.losses[-len(seen.losses) :], strict=True))
        if seen.logged.keys() != expected.logged.keys():
            return f"logged {sorted(seen.logged)} on rank {rank} instead of {sorted(expected.logged)}"
        numbers += [(seen.logged[key], value) for key, value in expected.logged.items()]
        for one, other in numbers:
            if not abs(one - other) <= tolerance:
                return f"the loss is {one} on rank {rank} instead of {other}"
        for name, tensor in seen.state.items():
            if name in state and not torch.equal(state[name], tensor):
                return f"copies of {name} differ"
            state[name] = tensor
    return unlike(expected.state, state, tolerance)


def unlike(expected: dict[str, Tensor], found: dict[str, Any], tolerance: float) -> str:
    """What differs between two state dicts."""
    if expected.keys() != found.keys():
        return f"only one has {sorted(expected.keys() ^ found.keys())}"
    for name, tensor in expected.items():
        difference = (tensor.double() - found[name].double()).abs().max().item() if tensor.numel() else 0.0
        if not difference <= tolerance:
            return f"{name} differs by {difference:.1e}"
    return ""
