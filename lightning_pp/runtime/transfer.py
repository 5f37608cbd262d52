"""How long a message takes from one rank to the next, measured on the channels themselves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from lightning_pp.runtime.channel import Message, Receiver, Sender, Specs
from lightning_pp.runtime.comm import synchronise
from lightning_pp.schedule import Edge, Kind

__all__: list[str] = []

#: round trips, of which the first does not count
_TRIPS = 8
#: seconds that one end computes before it sends: an end that has waited for so long is slower to wake, as in a step
_PAUSE = 0.004


def transfer_seconds(
    position: int,
    num_ranks: int,
    senders: Mapping[Edge, Sender],
    receivers: Mapping[Edge, Receiver],
    crossing: Mapping[int, Specs],
    device: torch.device,
) -> float | None:
    """Send activations to the next rank and back, and return half of what that takes; all ranks must call.

    Args:
        position: This rank's place in a pipeline of one stage per rank.
        num_ranks: P.
        senders: This rank's ends of its outgoing edges.
        receivers: This rank's ends of its incoming edges.
        crossing: ``{receiving stage: what crosses into it}``.
        device: Where messages live.

    Returns:
        Seconds from this rank to the next one; None on the last rank.
    """
    found = None
    for first in (0, 1):  # neighbours meet in pairs, so that no pair waits for another
        source = position if position % 2 == first else position - 1
        if source < 0 or source + 1 >= num_ranks:
            continue
        there, back = Edge(source, source + 1, Kind.F), Edge(source + 1, source, Kind.B)
        is_first = position == source
        sender, receiver = (senders[there], receivers[back]) if is_first else (senders[back], receivers[there])
        seconds = trip_seconds(sender, receiver, crossing[source + 1], device, is_first)
        found = seconds if is_first else found
    return found


def trip_seconds(sender: Sender, receiver: Receiver, specs: Specs, device: torch.device, is_first: bool) -> float:
    """Half a round trip of ``specs``, beginning at the end that ``is_first``; both ends of the two edges must call."""
    messages: list[Message] = [(-1, trip) for trip in range(_TRIPS)]
    receiver.expect(messages, lambda message: specs)
    tensors = [torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
    seconds = []
    for message in messages:
        synchronise(device)
        if is_first:
            _compute()
            start = time.perf_counter()
            sender.send(message, tensors)
            receiver.take(message)
            synchronise(device)
            seconds.append(time.perf_counter() - start - _PAUSE)
        else:
            receiver.take(message)
            synchronise(device)
            _compute()
            sender.send(message, tensors)
    sender.finish()
    return max(0.0, statistics.median(seconds[1:]) / 2) if is_first else 0.0


def _compute() -> None:
    """Keep a core busy, and let the other end's fall asleep."""
    end = time.perf_counter() + _PAUSE
    while time.perf_counter() < end:
        pass
