"""One test per bug that was fixed, with its story."""

from typing import Any

import pytest
import torch

from lightning_pp.runtime import microbatch
from lightning_pp.runtime.channel import DEPTH, Spec, Specs
from lightning_pp.runtime.job import SignaturePlan
from lightning_pp.runtime.window import WINDOW
from lightning_pp.schedule import Schedule, gpipe, one_f_one_b
from tests.launch import run_ranks
from tests.runtime.ranks import connect, engine_for, expected, job_for, leave, parts_of
from tests.runtime.test_channel import ahead, ends


def mixed(num_microbatches: int) -> Schedule:
    return {0: gpipe(2, num_microbatches)[0], 1: one_f_one_b(2, num_microbatches)[1]}


def run_mixed(num_microbatches: int) -> Any:
    rank = connect()
    engine = engine_for(mixed(num_microbatches), rank)
    job = job_for(mixed(num_microbatches), engine, parts_of(num_microbatches + 3, num_microbatches))
    engine.run(job)
    leave()
    return engine._stage.parameters[rank].grad  # type: ignore[attr-defined]


def test_a_rank_that_sends_long_before_it_takes() -> None:
    """Sends were awaited after a constant number of them: with more micro-batches than buffers, both ranks stopped."""
    gradients = expected(2, 27, 24)[1]
    for rank, found in enumerate(run_ranks(run_mixed, 2, 24, timeout=20)):
        torch.testing.assert_close(found, gradients[rank], atol=1e-12, rtol=0)


def test_a_cut_with_five_tensors_does_not_stall() -> None:
    """The window counted tensors, so that one message of five filled it."""
    assert run_ranks(ahead, 2, 5, WINDOW, timeout=25) == [WINDOW + DEPTH] * 2


def swap_headers() -> dict[int, tuple[int, ...]]:
    rank = connect()
    sender, receiver = ends(rank)
    sizes = {0: 3, 1: 5}
    known: dict[int, Specs] = {}
    if rank == 0:
        for mb, size in sizes.items():
            sender.send((1, mb), [torch.ones(size)], (Spec((size,), torch.float32, False),))
        sender.finish()
    else:
        receiver.expect([(1, 0), (1, 1)], lambda m: known.get(m[1]), lambda m, specs: known.__setitem__(m[1], specs))
        receiver.take((1, 1))
        receiver.take((1, 0))
    leave()
    return {mb: specs[0].shape for mb, specs in known.items()}


def test_a_header_belongs_to_its_own_message() -> None:
    """A receiver that wanted the second message first took the first one's header for the second's."""
    assert run_ranks(swap_headers, 2)[1] == {0: (3,), 1: (5,)}


def test_the_gradients_of_a_message_are_known_with_it() -> None:
    """They were worked out again for every message of every batch."""
    plan = SignaturePlan({})
    plan.learn(2, (Spec((3,), torch.float32, True), Spec((4,), torch.int64, False)))
    assert plan.gradients == {1: (Spec((3,), torch.float32, False),)}


def test_lists_of_unequal_lengths_are_joined() -> None:
    """Names by sample were lost: with parts of unequal sizes only the last part's remained."""
    assert microbatch.join([{"n": ["a", "b"]}, {"n": ["c"]}], [2, 1], [0.5, 0.5]) == {"n": ["a", "b", "c"]}


def test_a_loss_of_one_element_has_a_mean() -> None:
    """A loss of shape [1] is legal without the pipeline, and its weighted mean raised."""
    mean = microbatch.weighted_mean([torch.tensor([1.0]), torch.tensor([3.0])], [0.5, 0.5])
    assert torch.equal(mean, torch.tensor([2.0]))


def test_keys_of_a_mapping_are_part_of_its_signature() -> None:
    """Two encodings with the same tensors under other keys were planned alike."""
    from collections import UserDict

    assert microbatch.signature(UserDict(a=torch.ones(2))) != microbatch.signature(UserDict(b=torch.ones(2)))


def test_objects_by_sample_that_hold_tensors_are_looked_into() -> None:
    """A list with one dict of boxes per image was known by its length alone, whatever the boxes' shapes."""
    one, other = ({"x": torch.ones(1, 2), "t": [{"boxes": torch.ones(n, 4)}]} for n in (2, 3))
    assert microbatch.signature(one) != microbatch.signature(other)


def move_large(num_ranks: int) -> float:
    """Micro-batches of 32 MB, eight of them, both ways."""
    rank = connect(60)
    schedule = one_f_one_b(num_ranks, 8)
    engine = engine_for(schedule, rank, timeout=60)
    stage: Any = engine._stage

    def forward(layout: int, step: Any, received: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        tensor = received[0] if received else torch.full((8 * 2**20,), float(step()), requires_grad=True)
        if layout == num_ranks - 1:
            return {"loss": tensor[::1000].mean()}, []
        return None, [tensor + 1]

    stage.forward = forward
    job = job_for(schedule, engine, [(torch.ones(1), 1 / 8)] * 8)
    job.step = lambda mb: mb
    results = engine.run(job)
    leave()
    return sum(result["loss"].item() for result in results.values())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_large_messages(num_ranks: int) -> None:
    """A transfer of 32 MB does not fit into any socket's buffer, and must go on while both ends compute."""
    assert run_ranks(move_large, num_ranks, num_ranks, timeout=60)[-1] == 28 + 8 * (num_ranks - 1)
