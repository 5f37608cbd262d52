"""What depends on the library: names of torch that are not public, dtypes on Gloo, transfers under way."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pp.runtime.comm import Peer, Readback, backend_for, job_store, make_group
from tests.launch import run_ranks
from tests.runtime.ranks import CPU, connect, leave

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def test_private_names_are_where_they_were() -> None:
    """torch may move these without notice; comm.py is the only file to change then."""
    assert callable(dist.distributed_c10d._get_default_store)
    assert issubclass(dist.distributed_c10d.PrefixStore, dist.Store)
    assert {"send", "recv"} <= set(dir(dist.ProcessGroupGloo))
    if dist.is_nccl_available():
        assert hasattr(dist.ProcessGroupNCCL.Options(), "_timeout")


def test_job_store_needs_a_job() -> None:
    with pytest.raises(ValueError, match="process group"):
        job_store()


def test_backends() -> None:
    assert backend_for(CPU) == "gloo"
    assert backend_for(torch.device("cuda", 0)) == "nccl"
    assert backend_for(torch.device("cuda", 0), "gloo") == "gloo"


def refuse() -> str:
    connect()
    try:
        make_group("x", 0, 1, "mpi", timedelta(seconds=5))
    except ValueError as error:
        return str(error)
    return ""


def test_other_backends_are_refused() -> None:
    assert run_ranks(refuse, 1) == ["process_group_backend='mpi': allowed are 'gloo' and 'nccl'."]


def test_readback_on_the_host() -> None:
    assert Readback(torch.tensor([1.5, -2.0], dtype=torch.float64)).read() == [1.5, -2.0]


def exchange() -> Any:
    rank = connect()
    # three ranks have groups of two, made by their members alone
    received = []
    if rank < 2:
        peer = Peer(make_group("pair", rank, 2, "gloo", timedelta(seconds=10)), 1 - rank, CPU, "gloo")
        for number, dtype in enumerate(DTYPES):
            tensor = torch.arange(6).reshape(2, 3).to(dtype).T
            if rank == 0:
                pending = peer.send(tensor)
                assert not pending.is_done()
                pending.wait()
            else:
                received.append(torch.equal(peer.receive((3, 2), dtype).wait(), tensor))
                assert len(received) == number + 1
    leave()
    return received


def test_every_dtype_travels_and_groups_are_made_by_their_members_alone() -> None:
    assert run_ranks(exchange, 3) == [[], [True] * len(DTYPES), []]
