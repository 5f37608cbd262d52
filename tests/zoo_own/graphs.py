"""Models on graphs and sets, whose batch is an object of their own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Graphs:
    """Some graphs as one: all nodes one after the other, edges between their numbers, and which graph a node is of."""

    def __init__(self, nodes: Tensor, edges: Tensor, graph: Tensor, target: Tensor) -> None:
        self.nodes = nodes
        self.edges = edges
        self.graph = graph
        self.target = target

    def to(self, device: Any) -> Graphs:
        return Graphs(*(tensor.to(device) for tensor in self))

    def __iter__(self) -> Any:
        return iter((self.nodes, self.edges, self.graph, self.target))

    @classmethod
    def joined(cls, graphs: list[Graphs]) -> Graphs:
        starts = torch.tensor([0, *(len(graph.nodes) for graph in graphs)]).cumsum(0)
        return cls(
            torch.cat([graph.nodes for graph in graphs]),
            torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=False)], 1),
            torch.cat([torch.full((len(graph.nodes),), number) for number, graph in enumerate(graphs)]),
            torch.cat([graph.target for graph in graphs]),
        )

    def separated(self) -> list[Graphs]:
        found = []
        for number in range(len(self.target)):
            mine = (self.graph == number).nonzero()[:, 0]
            edges = self.edges[:, self.graph[self.edges[0]] == number] - mine[0]
            target = self.target[number : number + 1]
            found.append(Graphs(self.nodes[mine], edges, torch.zeros(len(mine), dtype=torch.long), target))
        return found


def graphs(samples: int = 9) -> list[Graphs]:
    source = torch.Generator().manual_seed(9)
    found = []
    for _ in range(samples):
        number = int(torch.randint(2, 7, (), generator=source))
        edges = torch.randint(0, number, (2, 2 * number), generator=source)
        nodes = torch.randn(number, 5, generator=source, dtype=torch.float64)
        found.append(Graphs(nodes, edges, torch.zeros(number, dtype=torch.long), nodes.sum().reshape(1)))
    return found


class MessagePassing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.update = nn.Linear(2 * width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges
        messages = torch.tanh(self.message(torch.cat([nodes[sender], nodes[receiver]], 1)))
        gathered = torch.zeros_like(nodes).index_add(0, receiver, messages)
        return nodes + torch.tanh(self.update(torch.cat([nodes, gathered], 1)))


class GraphNet(LightningModule):
    """Three rounds of messages, the mean over the nodes of each graph, one number per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.rounds = nn.ModuleList(MessagePassing(6) for _ in range(3))
        self.leave = nn.Linear(6, 1)

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        h = self.enter(batch.nodes)
        for layer in self.rounds:
            h = layer(h, batch.edges)
        number = len(batch.target)
        sums = h.new_zeros(number, h.shape[1]).index_add(0, batch.graph, h)
        pooled = sums / torch.bincount(batch.graph, minlength=number)[:, None]
        loss = F.mse_loss(self.leave(pooled)[:, 0], batch.target)
        self.log("loss", loss, batch_size=number)
        return loss

    def split_batch(self, batch: Graphs, num_microbatches: int) -> list[Graphs]:
        single = batch.separated()
        number = min(num_microbatches, len(single))
        bounds = [len(single) * part // number for part in range(number + 1)]
        return [Graphs.joined(single[a:b]) for a, b in pairwise(bounds)]

    def micro_batch_weight(self, micro_batch: Graphs) -> float:
        return float(len(micro_batch.target))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(graphs(), batch_size=4, collate_fn=Graphs.joined)  # type: ignore[arg-type]


class DeepSets(LightningModule):
    """Sets of different sizes as a list of tensors, which nobody could cut without being told how."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))
        self.whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sets = batch["sets"]
        each = self.each(torch.cat(sets))
        pooled = torch.stack([part.sum(0) for part in each.split([len(one) for one in sets])])
        loss = F.mse_loss(self.whole(pooled)[:, 0], batch["target"])
        self.log("loss", loss, batch_size=len(pooled))
        return loss

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        number = min(num_microbatches, len(batch["sets"]))
        bounds = [len(batch["sets"]) * part // number for part in range(number + 1)]
        slices = [slice(a, b) for a, b in pairwise(bounds)]
        return [{"sets": batch["sets"][s], "target": batch["target"][s]} for s in slices]

    def micro_batch_weight(self, micro_batch: Any) -> float:
        return float(len(micro_batch["sets"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(graphs(), batch_size=4, collate_fn=_as_sets)  # type: ignore[arg-type]


def _as_sets(items: list[Graphs]) -> dict[str, Any]:
    return {"sets": [item.nodes for item in items], "target": torch.cat([item.target for item in items])}


class Conveyed(nn.Module):
    """A round that takes the whole object, and gives the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MessagePassing(6)

    def forward(self, graphs: Graphs) -> Tensor:
        return self.inner(graphs.nodes, graphs.edges)


class GraphsThroughLayers(GraphNet):
    """What one layer has made lies in an object that is given to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(Conveyed() for _ in range(3))

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        state = Graphs(self.enter(batch.nodes), batch.edges, batch.graph, batch.target)
        for layer in self.rounds:
            state = Graphs(layer(state), batch.edges, batch.graph, batch.target)
        number = len(batch.target)
        pooled = state.nodes.new_zeros(number, 6).index_add(0, batch.graph, state.nodes)
        return F.mse_loss(self.leave(pooled)[:, 0], batch.target)
