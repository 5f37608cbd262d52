"""Builds this rank's ends of all edges, in an order that every rank shares."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from lightning_pp.runtime.channel import Label, Receiver, Sender
from lightning_pp.runtime.comm import Peer, job_store, make_group
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.schedule import Edge, Kind

__all__: list[str] = []

_HOST = torch.device("cpu")


def open_links(
    mesh: Mesh, edges: Iterable[Edge], device: torch.device, backend: str, timeout: timedelta
) -> tuple[dict[Edge, Sender], dict[Edge, Receiver]]:
    """Make a channel for every edge that begins or ends at this rank, and try each once.

    Every channel has a process group of its own (two for NCCL, whose headers go through host memory), so that the
    traffic of one never waits for that of another. The first exchange happens here: a communicator that is created
    lazily, by whichever end comes first, is a known cause of hangs.

    Args:
        mesh: This process's position.
        edges: All edges of the pipeline, between positions.
        device: Where tensors live.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long a transfer may take.
    """
    senders: dict[Edge, Sender] = {}
    receivers: dict[Edge, Receiver] = {}
    here = mesh.position
    session = job_store().add(f"lightning_pp/sessions/{mesh.rank}", 1)
    for edge in sorted(edges):
        if here not in (edge.source, edge.target):
            continue
        own, other = (0, 1) if here == edge.source else (1, 0)
        name = f"{session}/{mesh.replica}/{edge}"
        peer = Peer(make_group(name, own, 2, backend, timeout), other, device, backend)
        header_peer = peer
        if backend != "gloo" or device != _HOST:
            header_peer = Peer(make_group(f"{name}/host", own, 2, "gloo", timeout), other, _HOST, "gloo")
        carries = "activation" if edge.kind is Kind.F else "gradient"
        if here == edge.source:
            senders[edge] = Sender(peer, header_peer, Label(carries, mesh.global_rank(edge.target)))
        else:
            receivers[edge] = Receiver(peer, header_peer, Label(carries, mesh.global_rank(edge.source)))
        _greet(peer, own == 0, device)
        if header_peer is not peer:
            _greet(header_peer, own == 0, _HOST)
    return senders, receivers


def open_beside(mesh: Mesh, backend: str, timeout: timedelta) -> Any:
    """Make a group of all ranks of the pipeline for what is under way beside its steps.

    Nothing else goes there, so that a collective may begin at another point of a step on each rank. It ends with the
    pipeline, while torch keeps what ``new_group`` makes as long as the process.
    """
    session = job_store().add(f"lightning_pp/beside/{mesh.rank}", 1)
    return make_group(f"beside/{session}/{mesh.replica}", mesh.position, mesh.num_stages, backend, timeout)


def _greet(peer: Peer, is_sender: bool, device: torch.device) -> None:
    if is_sender:
        peer.send(torch.ones(1, dtype=torch.float32, device=device)).wait()
    else:
        peer.receive((1,), torch.float32).wait()
