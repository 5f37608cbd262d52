"""Links between real processes: two pipelines side by side do not hear each other."""

from datetime import timedelta

import torch

from lightning_pp.runtime.channel import Spec
from lightning_pp.runtime.links import open_links
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.schedule import Edge, Kind, gpipe, looped, lower
from tests.launch import run_ranks
from tests.runtime.ranks import CPU, connect, greedy, leave


def talk(num_stages: int, num_replicas: int) -> list[tuple[str, float, int]]:
    """Send this rank's global number along every edge, in two sessions; says what came from where."""
    mesh = Mesh(connect(), num_stages, num_replicas)
    heard = []
    for session in range(2):
        edges = lower(gpipe(num_stages, 2)).edges
        senders, receivers = open_links(mesh, edges, CPU, "gloo", timedelta(seconds=20))
        for sender in senders.values():
            sender.send((0, 0), [torch.tensor(mesh.rank + 100.0 * session)], None)
        for edge, receiver in receivers.items():
            receiver.expect([(0, 0)], lambda message: (Spec((), torch.float32, False),))
            (tensor,) = receiver.take((0, 0))
            heard.append((str(edge), tensor.item() - 100 * session, receiver._label.other))
        for sender in senders.values():
            sender.finish()
    leave()
    return heard


def test_replicas_talk_to_their_own_stages() -> None:
    """rank = stage * replicas + replica."""
    heard = run_ranks(talk, 4, 2, 2)
    assert heard == [
        [("B:1->0", 2, 2)] * 2,
        [("B:1->0", 3, 3)] * 2,
        [("F:0->1", 0, 0)] * 2,
        [("F:0->1", 1, 1)] * 2,
    ]


def test_a_middle_stage_hears_both_sides() -> None:
    first, middle, last = run_ranks(talk, 3, 3, 1)
    assert first == [("B:1->0", 1, 1)] * 2
    assert middle == [("F:0->1", 0, 0), ("B:2->1", 2, 2)] * 2 or middle == [("B:2->1", 2, 2), ("F:0->1", 0, 0)] * 2
    assert last == [("F:1->2", 1, 1)] * 2


def around() -> tuple[list[Edge], list[Edge]]:
    mesh = Mesh(connect(), 3)
    edges = lower(greedy(looped(3, 2), 4)).edges
    senders, receivers = open_links(mesh, edges, CPU, "gloo", timedelta(seconds=20))
    leave()
    return sorted(senders), sorted(receivers)


def test_looped_stages_have_a_link_from_the_last_rank_to_the_first() -> None:
    for rank, (out, into) in enumerate(run_ranks(around, 3)):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        assert out == sorted([Edge(rank, after, Kind.F), Edge(rank, before, Kind.B)])
        assert into == sorted([Edge(before, rank, Kind.F), Edge(after, rank, Kind.B)])
