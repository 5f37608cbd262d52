"""Channels between two real processes: order, headers, windows, buffers, and what is said when a peer is gone."""

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_pp.runtime.channel import DEPTH, Label, Notes, Receiver, Sender, Spec, Specs, gradient_specs
from lightning_pp.runtime.comm import Peer, PeerLost, job_store, make_group
from lightning_pp.runtime.window import WINDOW
from tests.launch import run_ranks, try_ranks
from tests.runtime.ranks import CPU, connect, leave


def ends(rank: int, timeout: float = 20) -> tuple[Sender, Receiver]:
    """Rank 0 sends activations to rank 1; each rank uses its own end."""
    peer = Peer(make_group("test", rank, 2, "gloo", timedelta(seconds=timeout)), 1 - rank, CPU, "gloo")
    label = Label("activation", 1 - rank)
    return Sender(peer, peer, label), Receiver(peer, peer, label)


def message(mb: int) -> list[torch.Tensor]:
    """Five tensors; the sizes depend on the micro-batch."""
    rows = 2 + mb % 3
    return [
        torch.full((rows, 3), mb, dtype=torch.float64, requires_grad=True),
        torch.full((rows,), mb, dtype=torch.bfloat16),
        torch.arange(rows * mb).reshape(mb, rows).T,  # not contiguous; empty for mb 0
        torch.tensor(mb % 2 == 0),
        torch.tensor(complex(mb, 1)),
    ]


def test_gradients_are_those_of_what_requires_them() -> None:
    specs = tuple(Spec.of(tensor) for tensor in message(2))
    assert gradient_specs(specs) == (Spec((4, 3), torch.float64, False),)


def stream(num_messages: int, order: list[int]) -> Any:
    rank = connect()
    sender, receiver = ends(rank)
    names = [(1, mb) for mb in range(num_messages)]
    known: dict[int, Specs] = {}
    result: Any = None
    if rank == 0:
        told = set()
        for name in names:
            tensors = message(name[1])
            signature = name[1]
            sender.send(name, tensors, None if signature in told else tuple(map(Spec.of, tensors)))
            told.add(signature)
        sender.finish()
        result = len(sender._under_way)
    else:
        receiver.expect(names, lambda m: known.get(m[1]), lambda m, specs: known.__setitem__(m[1], specs))
        result = [[t.clone() for t in receiver.take((1, mb))] for mb in order], known, receiver.intake.buffers
    leave()
    return result


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6], [3, 0, 1, 6, 2, 5, 4]])
def test_messages_arrive_with_their_dtypes_and_in_the_order_wanted(order: list[int]) -> None:
    left, (received, known, waiting) = run_ranks(stream, 2, 7, order)
    assert left == waiting == 0
    for mb, tensors in zip(order, received, strict=True):
        sent = message(mb)
        assert known[mb] == tuple(map(Spec.of, sent))
        for ours, theirs in zip(tensors, sent, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def with_notes(order: list[int]) -> Any:
    """What the first message's note says decides how the others come."""
    rank = connect()
    sender, receiver = ends(rank)
    names = [(1, mb) for mb in range(4)]
    specs = (Spec((2,), torch.float32, False),)
    read: list[tuple[int, list[int]]] = []
    result: Any = None
    if rank == 0:
        for name in names:
            has_note = name[1] == 0
            header = None if has_note else (Spec((name[1],), torch.float32, False),)
            sender.send(name, [torch.ones(name[1] or 2)], header, [7, 9, 2] if has_note else None)
        sender.finish()
    else:
        notes = Notes({(1, 0)}, lambda m: 3, lambda m, note: read.append((m[1], note)))
        receiver.expect(names, lambda m: specs if m[1] == 0 else None, lambda m, s: None, notes)
        result = [len(receiver.take((1, mb))[0]) for mb in order], read, receiver.intake.buffers
    leave()
    return result


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1]])
def test_a_note_is_read_before_the_next_message_is_looked_at(order: list[int]) -> None:
    assert run_ranks(with_notes, 2, order)[1] == ([mb or 2 for mb in order], [(0, [7, 9, 2])], 0)


def ahead(num_tensors: int, window: int) -> int:
    """Rank 1 takes nothing before rank 0 has sent everything; otherwise both wait until the test is ended."""
    rank = connect()
    sender, receiver = ends(rank)
    names = [(1, mb) for mb in range(window + DEPTH)]
    tensors = [torch.ones(2 + i) for i in range(num_tensors)]
    specs = tuple(map(Spec.of, tensors))
    if rank == 0:
        sender.window = window
        for name in names:
            sender.send(name, tensors)
        job_store().set("through", "")
        sender.finish()
    else:
        receiver.expect(names, lambda m: specs)
        job_store().wait(["through"])
        for name in names:
            receiver.take(name)
    leave()
    return len(names)


@pytest.mark.parametrize("num_tensors", [1, 5])
@pytest.mark.parametrize("window", [1, WINDOW, 9])
def test_an_edge_holds_window_and_depth_messages(num_tensors: int, window: int) -> None:
    """However many tensors they have: the sender is through while the receiver has taken nothing."""
    assert run_ranks(ahead, 2, num_tensors, window, timeout=25) == [window + DEPTH] * 2


def wait_in_vain(side: str) -> str:
    rank = connect()
    sender, receiver = ends(rank, timeout=1)
    specs = (Spec((2,), torch.float32, False),)
    text = ""
    start = time.monotonic()
    try:
        if side == "receive" and rank == 1:
            receiver.expect([(1, 3)], lambda m: specs)
            receiver.take((1, 3))
        elif side == "header" and rank == 1:
            receiver.expect([(1, 3)], lambda m: None, lambda m, s: None)
            receiver.take((1, 3))
        elif side == "send" and rank == 0:
            sender.send((1, 3), [torch.ones(2)])
            sender.finish()
    except PeerLost as error:
        assert time.monotonic() - start < 5
        text = str(error)
    leave()
    return text


def test_a_timeout_says_what_was_waited_for() -> None:
    """After the timeout of one second, or a little later on a busy machine."""
    for side in ("receive", "header"):
        text = run_ranks(wait_in_vain, 2, side)[1]
        assert re.match(r"waited [1-4]\.\d s for the activation of micro-batch 3 from rank 0: ", text), text
    text = run_ranks(wait_in_vain, 2, "send")[0]
    assert re.match(r"waited [1-4]\.\d s for rank 1 to take the activation of micro-batch 3: ", text), text


def lose(dying: int) -> tuple[str, float]:
    import os

    rank = connect()
    sender, receiver = ends(rank, timeout=60)
    specs = (Spec((2,), torch.float32, False),)
    if rank == dying:
        time.sleep(0.5)
        os._exit(1)
    start = time.monotonic()
    try:
        if rank == 1:
            receiver.expect([(1, 0)], lambda m: specs)
            receiver.take((1, 0))
        else:
            sender.send((1, 0), [torch.ones(2)])
            sender.finish()
    except PeerLost as error:
        return str(error), time.monotonic() - start
    return "", 0


@pytest.mark.alone
@pytest.mark.parametrize("dying", [0, 1])
def test_a_peer_that_dies_is_noticed_within_two_seconds(dying: int) -> None:
    results = try_ranks(lose, 2, dying, timeout=20)
    text, seconds = results[1 - dying]
    assert "the activation of micro-batch 0" in text
    assert seconds < 2.5
