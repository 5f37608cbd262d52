"""The vocabulary of schedules: one op is one piece of work on one micro-batch of one stage.

Everything that draws, checks, simulates or executes a schedule speaks of these ops and prints them the same
way, ``2F3`` for "stage 2, forward, micro-batch 3", which is also how ``torch.distributed.pipelining`` writes
them in its CSV files (`schedules.py`, class ``_Action``). Splitting the backward into ``I`` and ``W`` follows
"Zero Bubble Pipeline Parallelism" (Qi et al., 2023, section 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

__all__: list[str] = []


class Kind(str, Enum):
    """What an op does. The value is the text used in ``2F3``."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: gradients of the stage's input and of its weights."""
    I = "I"  # noqa: E741
    """First half of a split backward: the gradient of the stage's input."""
    W = "W"
    """Second half of a split backward: the gradients of the stage's weights."""
    SEND_F = "SEND_F"
    """Sends the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receives the stage's input from the stage before."""
    SEND_B = "SEND_B"
    """Sends the gradient of the stage's input to the stage before."""
    RECV_B = "RECV_B"
    """Receives the gradient of the stage's output from the next stage."""


COMPUTE_KINDS: frozenset[Kind] = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""The kinds a schedule is made of; the others are added by ``lower``."""

_PATTERN = re.compile(r"([0-9]{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,9})")


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One op of a program.

    >>> print(Op(2, Kind.F, 3), Op(2, Kind.SEND_F, 3))
    2F3 2SEND_F3
    """

    stage: int
    """Index of the stage, 0 for the one that reads the batch."""
    kind: Kind
    """What is done."""
    mb: int
    """Index of the micro-batch in its batch, from 0."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.mb}"

    @property
    def is_compute(self) -> bool:
        """Whether this is a computation (F, B, I or W), not a message."""
        return self.kind in COMPUTE_KINDS

    @classmethod
    def parse(cls, text: str) -> Op:
        """Reads the short form back; spaces around it are ignored.

        >>> Op.parse("2F3") == Op(2, Kind.F, 3)
        True

        Raises:
            ValueError: If ``text`` is not a stage number, a kind and a micro-batch number.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ValueError(
                f"{text!r} is not an op: write the stage, the kind ({kinds}) and the micro-batch, as in '2F3'"
            )
        stage, kind, mb = match.groups()
        return cls(int(stage), Kind(kind), int(mb))


Schedule = dict[int, list[Op]]
"""Rank -> its computations, in the order in which it runs them."""


def has_backward(schedule: Mapping[int, Sequence[Op]]) -> bool:
    """Whether the schedule trains (has B, I or W), as opposed to evaluates (F only)."""
    return any(op.kind is not Kind.F for ops in schedule.values() for op in ops)


def mark(program: Sequence[Op], index: int, note: str = "") -> str:
    """Prints a program with one op marked, and no more of it than its neighbourhood.

    Args:
        program: The ops of one rank.
        index: Position of the op to mark.
        note: Said after the mark.

    >>> mark([Op(0, Kind.F, 0), Op(0, Kind.F, 1), Op(0, Kind.B, 0)], 1, "waits for 3F9")
    '0F0 [0F1 <-- here, waits for 3F9] 0B0'
    """
    before, after = program[max(0, index - 8) : index], program[index + 1 : index + 5]
    here = f"[{program[index]} <-- here{', ' + note if note else ''}]"
    words = ["..."] * (index > 8) + [str(op) for op in before] + [here] + [str(op) for op in after]
    return " ".join(words + ["..."] * (index + 5 < len(program)))
