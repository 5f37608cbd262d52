"""Lowering: every send meets its receive, in one order per edge, and nothing is sent within a rank."""

from __future__ import annotations

import pytest

from lightning_pp.schedule import (
    SCHEDULES,
    Edge,
    Kind,
    Op,
    build,
    edge_of,
    forward_only,
    from_csv,
    linear,
    looped,
    lower,
    max_held,
    message_of,
    one_f_one_b,
    placement_of,
    v,
)

SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)


def _moved(lowered, placement, kinds):
    """Edge -> messages of these kinds, in the order of the programs."""
    found = {}
    for rank, program in lowered.programs.items():
        for op in program:
            if op.kind in kinds:
                edge = edge_of(op, placement)
                assert rank == (edge.source if op.kind in SENDS else edge.target)
                found.setdefault(edge, []).append(message_of(op))
    return found


def assert_sound(schedule):
    lowered, placement = lower(schedule), placement_of(schedule)
    sent, received = _moved(lowered, placement, SENDS), _moved(lowered, placement, RECEIVES)
    assert {edge: tuple(order) for edge, order in sent.items()} == lowered.edges
    assert {edge: sorted(order) for edge, order in received.items()} == {e: sorted(o) for e, o in sent.items()}
    for edge, order in lowered.edges.items():
        assert edge.source != edge.target
        assert len(set(order)) == len(order)
        for stage, _ in order:
            sender = stage - 1 if edge.kind is Kind.F else stage + 1
            assert (placement[sender], placement[stage]) == (edge.source, edge.target)
    for rank, program in lowered.programs.items():
        assert [op for op in program if op.is_compute] == list(schedule[rank])
    return lowered


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "mbs"), [(1, 3), (2, 1), (4, 2), (4, 8), (5, 7), (32, 40)])
def test_library(name, ranks, mbs):
    lowered = assert_sound(build(name, ranks, mbs))
    assert len(lowered.edges) == 2 * (ranks - 1)
    assert set(max_held(lowered).values()) <= {1}


def test_programs_of_1f1b():
    lowered = lower(one_f_one_b(3, 2))
    assert {rank: " ".join(map(str, ops)) for rank, ops in lowered.programs.items()} == {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        1: "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        2: "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
    }
    assert lowered.edges == {
        Edge(0, 1, Kind.F): ((1, 0), (1, 1)),
        Edge(1, 0, Kind.B): ((0, 0), (0, 1)),
        Edge(1, 2, Kind.F): ((2, 0), (2, 1)),
        Edge(2, 1, Kind.B): ((1, 0), (1, 1)),
    }
    assert list(map(str, lowered.edges)) == ["F:0->1", "B:1->0", "F:1->2", "B:2->1"]


def test_interleaved_wraps_round(interleaved):
    lowered = assert_sound(interleaved)
    assert Edge(3, 0, Kind.F) in lowered.edges
    assert Edge(0, 3, Kind.B) in lowered.edges
    assert len(lowered.edges) == 8
    assert set(max_held(lowered).values()) == {1}


def test_split_backward_sends_after_the_input_gradient(zb_h1):
    program = assert_sound(zb_h1).programs[1]
    for at, op in enumerate(program):
        if op.kind is Kind.I:
            assert program[at - 1] == Op(1, Kind.RECV_B, op.mb)
            assert program[at + 1] == Op(1, Kind.SEND_B, op.mb)
        if op.kind is Kind.W:
            assert program[at - 1].kind is not Kind.RECV_B


def test_v_placement_has_no_local_messages(v_schedule):
    lowered = assert_sound(v_schedule)
    assert " ".join(map(str, lowered.programs[1])) == (
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B1 2B1 1I1 1SEND_B1 1W1"
    )
    assert lowered.edges == {
        Edge(0, 1, Kind.B): ((2, 0), (2, 1)),
        Edge(0, 1, Kind.F): ((1, 0), (1, 1)),
        Edge(1, 0, Kind.B): ((0, 0), (0, 1)),
        Edge(1, 0, Kind.F): ((3, 0), (3, 1)),
    }


@pytest.mark.parametrize("placement", [linear(4), looped(3, 2), v(4, 2), v(3, 3)])
def test_forward_only(placement):
    lowered = assert_sound(forward_only(placement, 5))
    assert {edge.kind for edge in lowered.edges} == {Kind.F}
    assert set(max_held(lowered).values()) == {1}


def test_one_rank_sends_nothing():
    assert lower(forward_only(looped(1, 3), 2)).edges == {}


def test_max_held_counts_messages_that_came_too_early():
    in_order = from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2")
    last_first = from_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F2,1F0,1F1,1B0,1B1,1B2")
    forward, backward = Edge(0, 1, Kind.F), Edge(1, 0, Kind.B)
    assert max_held(lower(in_order)) == {forward: 1, backward: 1}
    assert max_held(lower(last_first)) == {forward: 3, backward: 3}


def test_refuses_what_cannot_run():
    with pytest.raises(ValueError, match="deadlock: 0B0 on rank 0"):
        lower(from_csv("0B0,0F0"))
