"""The flush over real processes: every rank gets what the last stage has, and batches are compared."""

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pp.runtime import flush as module
from lightning_pp.runtime import microbatch
from lightning_pp.runtime.flush import DifferentBatchesError, Flush
from tests.launch import run_ranks
from tests.runtime.ranks import CPU, connect, leave

Pair = namedtuple("Pair", "first second")


def reports() -> list[Any]:
    """What a last stage might report, step after step: structures come back, grow, shrink and change their sizes."""
    large = torch.arange(3000, dtype=torch.float32).reshape(3, 1000)
    return [
        {"loss": torch.tensor(0.1, dtype=torch.float64), "n": 3},
        {"loss": torch.tensor(-0.0), "nan": torch.tensor(math.nan), "inf": torch.tensor(-math.inf)},
        {"loss": torch.tensor(0.2, dtype=torch.float64), "n": 3},
        {"loss": torch.tensor(0.2, dtype=torch.float64), "n": True},
        {"loss": torch.tensor(0.2, dtype=torch.float64), "n": 1},
        {"loss": torch.tensor(0.2, dtype=torch.float64), "n": 1.0},
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), [torch.tensor(7), torch.tensor([True, False, True])]),
        Pair(torch.tensor([2**62 + 1, -(2**63), -1]), None),
        {"large": large, "flags": large > 5, "half": large.bfloat16(), "short": large.short(), "t": large.T},
        {"small": torch.zeros(0, 3), "empty": {}, "text": "a"},
        torch.tensor([1 + 2j, 3 - 4j]),
        None,
        {"loss": torch.tensor(0.3, dtype=torch.float64), "n": 3},
        {"edge": torch.arange(1024.0), "past": torch.arange(1025)},
        (torch.tensor([2.5, 3.5], dtype=torch.bfloat16), [torch.tensor(8), torch.tensor([False, False, True])]),
    ]


def flush_for(rank: int, size: int, reads_packed: bool | None = None) -> Flush:
    return Flush(dist.group.WORLD, dist.group.WORLD, rank, size, CPU, reads_packed)


def share_all(size: int, reads_packed: bool, remembered: int) -> list[Any]:
    rank = connect()
    module._REMEMBERED = remembered
    flush = flush_for(rank, size, reads_packed)
    found = []
    for _ in range(2):  # the second time all is known, unless it was forgotten
        for report in reports():
            flush.begin(torch.tensor(2.5, dtype=torch.float64))
            found.append(flush.share(report if rank == size - 1 else None))
    flush.check()
    assert len(flush._known) <= remembered
    leave()
    return found


@pytest.mark.parametrize(
    ("size", "reads_packed", "remembered"),
    [(2, True, 256), (2, False, 5), (3, True, 5), (3, False, 256), (4, True, 256), (4, False, 5)],
)
def test_every_rank_gets_what_the_last_has(size: int, reads_packed: bool, remembered: int) -> None:
    """Bit for bit, with dtypes and plain types; in both ways of reading, and with more structures than are kept."""
    for found in run_ranks(share_all, size, size, reads_packed, remembered):
        for ours, theirs in zip(found, reports() * 2, strict=True):
            assert_identical(ours, theirs)


def share_ahead(size: int) -> list[Any]:
    """Some ranks start to receive while others do not, or do something else together first."""
    rank = connect()
    flush = Flush(dist.new_group(range(size)), dist.group.WORLD, rank, size, CPU)
    found = []
    for step in range(2):
        for number, report in enumerate(reports()):
            flush.begin(torch.tensor(2.5, dtype=torch.float64))
            if (rank + number + step) % 3:
                flush.expect()
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size
            found.append(flush.share(report if rank == size - 1 else None))
    leave()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_may_start_to_receive_at_any_time(size: int) -> None:
    for found in run_ranks(share_ahead, size, size):
        for ours, theirs in zip(found, reports() * 2, strict=True):
            assert_identical(ours, theirs)


def assert_identical(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*raw)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_identical(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            assert_identical(one, other)
    else:
        assert ours == theirs


def test_a_single_rank_keeps_its_report() -> None:
    report = {"loss": torch.tensor(1.0)}
    assert Flush(None, None, 0, 1, CPU).share(report) is report


def compare(size: int, reads_packed: bool, batches: list[Any]) -> list[str]:
    rank = connect()
    flush = flush_for(rank, size, reads_packed)
    texts = []
    for batch in batches[rank]:
        try:
            flush.begin(microbatch.checksum(batch, CPU))
            flush.expect()
            flush.share(torch.tensor(1.0) if rank == size - 1 else None)
            texts.append("")
        except DifferentBatchesError as error:
            texts.append(str(error))
    leave()
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_different_batches_are_told_to_every_rank(size: int) -> None:
    same = torch.tensor([[1.0], [2.0], [4.0]])
    batches = [[same, same] for _ in range(size)]
    batches[1] = [same, same + 1]
    for first, second in run_ranks(compare, size, size, True, batches):
        assert first == ""
        assert "The stages saw different batches: their checksums, by stage, are" in second
        assert str([17.0, 23.0] + [17.0] * (size - 2)) in second


def test_where_the_host_does_not_wait_it_is_told_a_step_later() -> None:
    same = torch.tensor([[1.0], [2.0], [4.0]])
    batches = [[same, same, same], [same, same + 1, same]]
    for texts in run_ranks(compare, 2, 2, False, batches):
        assert texts[:2] == ["", ""]
        assert "[17.0, 23.0]" in texts[2]


def test_nan_is_no_difference_and_another_order_is_one() -> None:
    nan = torch.tensor([[1.0, math.nan], [2.0, math.inf], [3.0, 4.0]])
    rows = {"x": torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]), "y": torch.tensor([0, 1, 1])}
    turned = {key: value[[1, 0, 2]] for key, value in rows.items()}
    for texts in run_ranks(compare, 2, 2, True, [[nan, rows], [nan.clone(), turned]]):
        assert texts[0] == ""
        assert "different batches" in texts[1]


def test_what_cannot_be_sent_is_named() -> None:
    flush = Flush(None, None, 1, 2, CPU)
    with pytest.raises(TypeError, match=r"cannot be sent to another process: .*lambda"):
        flush.share({"loss": torch.tensor(1.0), "function": lambda: 0})
