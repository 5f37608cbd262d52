"""Positions: stages outermost."""

import pytest

from lightning_pp.runtime.mesh import Mesh


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (4, 1), (2, 2), (3, 2), (2, 5)])
def test_every_rank_has_one_place(num_stages: int, num_replicas: int) -> None:
    meshes = [Mesh(rank, num_stages, num_replicas) for rank in range(num_stages * num_replicas)]
    assert sorted((m.position, m.replica) for m in meshes) == [
        (position, replica) for position in range(num_stages) for replica in range(num_replicas)
    ]
    for mesh in meshes:
        assert mesh.global_rank(mesh.position) == mesh.rank
        assert [Mesh(rank, num_stages, num_replicas).position for rank in mesh.pipeline] == list(range(num_stages))
        assert {Mesh(rank, num_stages, num_replicas).replica for rank in mesh.pipeline} == {mesh.replica}


def test_stages_are_outermost() -> None:
    assert Mesh(3, 2, 2).pipeline == [1, 3]
    assert Mesh(4, 3, 2).pipeline == [0, 2, 4]
