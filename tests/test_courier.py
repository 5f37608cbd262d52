"""What is brought to the writer arrives as it was, and ranks that have failed find each other or do not wait."""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_pp.runtime.comm import job_store
from lightning_pp.saving.courier import Courier
from lightning_pp.saving.interrupted import Meeting
from tests.launch import run_ranks

SECONDS = timedelta(seconds=20)


def connect(size: int) -> int:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=SECONDS)
    return rank


def things(rank: int) -> dict[Any, Any]:
    """Tensors of all kinds, and what is none."""
    images = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(rank))
    return {
        ("scalar", rank): torch.tensor(rank + 0.5, dtype=torch.float64),
        ("empty", rank): torch.empty(0, 3, dtype=torch.int16),
        ("flags", rank): images[0, 0] > 0,
        ("complex", rank): torch.complex(images, images),
        ("half", rank): images.bfloat16(),
        ("channels last", rank): images.to(memory_format=torch.channels_last),
        ("transposed", rank): images[0, 0].t(),
        ("every other", rank): images[:, ::2],
        ("expanded", rank): torch.ones(1, 3).expand(4, 3),
        ("parameter", rank): torch.nn.Parameter(images),
        ("sparse", rank): torch.eye(3).to_sparse(),
        ("object", rank): {"a": [1, None, "b"]},
    }


def bring() -> list[str]:
    rank = connect(3)
    courier = Courier("test", rank, 3, SECONDS)
    assert courier.gather(rank * 10) == ([0, 10, 20] if rank == 0 else [])
    assert courier.share(f"from {rank}") == "from 0"
    assert courier.scatter([1, 2, 3] if rank == 0 else []) == rank + 1
    found = courier.collect({} if rank == 0 else things(rank))
    if rank != 0:
        assert found == {}
        return []
    expected = things(1) | things(2)
    assert list(found) == list(expected)
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[key] == value
            continue
        assert found[key].dtype == value.dtype
        assert found[key].layout == value.layout
        assert torch.equal(found[key].to_dense(), value.to_dense()), key
        if key[0] in ("channels last", "transposed"):
            assert found[key].stride() == value.stride()
    return [key[0] for key in found]


def test_everything_arrives_as_it_was() -> None:
    assert len(run_ranks(bring, 3)[0]) == 2 * len(things(0))


def meet() -> list[tuple[bool, str | None, float]]:
    rank = connect(2)
    meetings: list[tuple[bool, str | None, float]] = []

    def at(name: str, place: str | None) -> None:
        dist.barrier()
        start = time.monotonic()
        meeting = Meeting(job_store(), name, rank, 2)
        if place is not None:
            courier = meeting.courier(place, SECONDS)
            if courier is not None:
                assert courier.share(rank) == 0
            # one that has failed is not tried again
            assert courier is not None or meeting.courier(place, SECONDS) is None
            meetings.append((courier is not None, meeting.reason, time.monotonic() - start))

    at("together", "step 3")
    at("apart", f"step {rank}")
    at("alone", "step 3" if rank == 1 else None)
    dist.barrier()
    return meetings


def test_ranks_that_have_failed_meet_or_do_not_wait() -> None:
    zero, one = run_ranks(meet, 2)
    for together, apart in (zero[:2], one[:2]):
        assert together[:2] == (True, None)
        assert apart[:2] == (False, "the processes have stopped at different steps")
        assert apart[2] < 3
    assert one[2][:2] == (False, "not all processes have stopped")
    assert one[2][2] < 8
