"""Windows: enough for every schedule, no larger than needed, and the paper run agrees with real buffers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.runtime.window import WINDOW, windows
from lightning_pp.schedule import (
    SCHEDULES,
    Edge,
    Kind,
    Lowered,
    Schedule,
    forward_only,
    gpipe,
    linear,
    looped,
    lower,
    one_f_one_b,
    v,
)
from tests.runtime.ranks import greedy

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 64)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_schedules_of_this_package_need_no_more_than_one(name: str, num_ranks: int, num_microbatches: int) -> None:
    lowered = lower(SCHEDULES[name](num_ranks, num_microbatches))
    assert set(windows(lowered, at_least=1).values()) <= {1}
    assert set(windows(lowered).values()) <= {WINDOW}


@pytest.mark.parametrize("placement", [linear(4), looped(3, 2), v(3, 3), v(4, 2)])
@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
def test_evaluation_under_any_placement(placement: tuple[int, ...], num_microbatches: int) -> None:
    lowered = lower(forward_only(placement, num_microbatches))
    assert can_run(lowered, windows(lowered, at_least=1))


def mixed(num_microbatches: int) -> Schedule:
    """Rank 0 runs all its forwards first, rank 1 alternates: valid, and each waits for the other to take."""
    return {0: gpipe(2, num_microbatches)[0], 1: one_f_one_b(2, num_microbatches)[1]}


@pytest.mark.parametrize("num_microbatches", [6, 17, 64])
def test_a_rank_that_takes_late_needs_a_large_window(num_microbatches: int) -> None:
    lowered = lower(mixed(num_microbatches))
    found = windows(lowered)
    assert can_run(lowered, found)
    assert not can_run(lowered, dict.fromkeys(lowered.edges, 1))
    # all gradients but the last, or all activations but the last, or something between
    forward, backward = found[Edge(0, 1, Kind.F)], found[Edge(1, 0, Kind.B)]
    assert forward + backward == max(num_microbatches - 1, 2 * WINDOW)


def can_run(lowered: Lowered, window: dict[Edge, int]) -> bool:
    """A second, slower account of the same thing: one rank steps at a time, full edges are asked before each step."""
    at = dict.fromkeys(lowered.programs, 0)
    sent: dict[Edge, list[tuple[int, int]]] = {edge: [] for edge in lowered.edges}
    taken: dict[Edge, set[tuple[int, int]]] = {edge: set() for edge in lowered.edges}
    edges = {(edge.kind, message): edge for edge, messages in lowered.edges.items() for message in messages}
    last: dict[int, Edge | None] = dict.fromkeys(at)
    moved = True
    while moved:
        moved = False
        for rank, program in lowered.programs.items():
            full = last[rank]
            if full is not None and len(sent[full]) - len(taken[full]) > window[full]:
                continue
            last[rank] = None
            if at[rank] == len(program):
                continue
            op = program[at[rank]]
            if op.kind in (Kind.SEND_F, Kind.SEND_B):
                kind = Kind.F if op.kind is Kind.SEND_F else Kind.B
                message = (op.stage + (1 if kind is Kind.F else -1), op.mb)
                last[rank] = edges[kind, message]
                sent[edges[kind, message]].append(message)
            elif op.kind in (Kind.RECV_F, Kind.RECV_B):
                message = (op.stage, op.mb)
                edge = edges[Kind.F if op.kind is Kind.RECV_F else Kind.B, message]
                if message not in sent[edge]:
                    continue
                taken[edge].update(sent[edge][: sent[edge].index(message) + 1])
            at[rank] += 1
            moved = True
    return all(at[rank] == len(program) for rank, program in lowered.programs.items())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mixture_of_valid_programs_runs_with_the_windows_found(data: st.DataObject) -> None:
    """Each rank takes its list from another schedule; mixtures that ``check`` refuses are left out."""
    num_ranks = data.draw(st.integers(2, 4))
    num_microbatches = data.draw(st.integers(1, 12))
    placement = data.draw(st.sampled_from([linear(num_ranks), looped(num_ranks, 2), v(num_ranks, 2)]))
    sources = [greedy(placement, num_microbatches, first) for first in (Kind.F, Kind.B)]
    schedule = {rank: data.draw(st.sampled_from(sources))[rank] for rank in range(num_ranks)}
    try:
        lowered = lower(schedule)
    except ValueError:
        return
    found = windows(lowered, at_least=1)
    assert can_run(lowered, found)
    for edge, window in found.items():
        assert 1 <= window <= len(lowered.edges[edge])
