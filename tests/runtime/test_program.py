"""Programs made ready: who takes what, over which channel."""

from typing import Any

import pytest

from lightning_pp.runtime.program import check_executable, prepare
from lightning_pp.schedule import Kind, from_csv, lower, placement_of

V = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"


def ready(rank: int) -> Any:
    lowered = lower(from_csv(V))
    placement = placement_of(from_csv(V))
    senders: Any = {edge: f"to {edge.target}" for edge in lowered.edges if edge.source == rank}
    receivers: Any = {edge: f"from {edge.source}" for edge in lowered.edges if edge.target == rank}
    return prepare(lowered, rank, placement, senders, receivers)


def test_results_for_a_stage_of_the_same_rank_stay_here() -> None:
    neighbours = {str(task.op): task.neighbour for task in ready(1).tasks if task.op.is_compute}
    assert neighbours == {"1F0": (2, 0), "2F0": None, "2B0": (1, 0), "1B0": None}
    assert {task.neighbour for task in ready(0).tasks} == {None}


def test_transfers_know_their_channel_and_message() -> None:
    found = [(str(t.op), t.message, t.sender, t.receiver) for t in ready(1).tasks if not t.op.is_compute]
    assert found == [
        ("1RECV_F0", (1, 0), None, "from 0"),
        ("2SEND_F0", (3, 0), "to 0", None),
        ("2RECV_B0", (2, 0), None, "from 0"),
        ("1SEND_B0", (0, 0), "to 0", None),
    ]


def test_what_comes_is_listed_by_channel() -> None:
    program = ready(1)
    assert program.incoming == (("from 0", Kind.B, ((2, 0),)), ("from 0", Kind.F, ((1, 0),))) or program.incoming == (
        ("from 0", Kind.F, ((1, 0),)),
        ("from 0", Kind.B, ((2, 0),)),
    )
    assert program.windows == (("to 0", 4), ("to 0", 4))


def test_split_backward_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0I1 on rank 0\)"):
        check_executable(lower(from_csv("0F0,0F1,0B0,0I1,0W1")))
    check_executable(lower(from_csv(V)))
