"""The kinds of blocks that random models are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


@dataclass
class Parcel:
    """A dataclass that nobody has registered anywhere."""

    hidden: Tensor
    extra: dict[str, Any]


class Base(nn.Module):
    """A linear layer, which others refine; ``ids`` are whole numbers and ``flag`` is a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return self.linear(x)


class Curved(Base):
    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return torch.tanh(self.linear(x))


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return x + self.linear(self.norm(x))


class Gated(Base):
    """Takes two values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return self.linear(x) * torch.sigmoid(self.gate(other if flag else x))


class Named(Base):
    """Takes whole numbers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return torch.tanh(self.linear(x)) + self.embedding(ids)


class Pair(Base):
    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        h = torch.tanh(self.linear(x))
        return h, [h.sum(1), None, 3]


class Dict(Base):
    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        h = torch.tanh(self.linear(x))
        return {"hidden": h, "positive": h > 0, "flag": flag, "unused": h.exp()}


class Parcels(Base):
    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        h = torch.tanh(self.linear(x))
        return Parcel(h, {"count": (h > 0).sum(1), "ids": ids})


class Slice(Base):
    """Returns a view that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH + 3)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return self.wide(torch.tanh(self.linear(x)))[:, 2 : 2 + WIDTH]


class Writing(Base):
    """Writes into what it makes, and into a copy of what it is given."""

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        h = self.linear(x)
        h += other
        return h.mul_(0.5)


class WritingIntoInput(Base):
    """Writes into what it is given, which is a copy of the caller's (see ``before="copy"``)."""

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return torch.tanh(self.linear(x.clone())) + x.add_(1.0)


class Dropping(Base):
    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return F.dropout(torch.tanh(self.linear(x)), 0.3, self.training)


class Silent(nn.Module):
    """No parameters."""

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return F.gelu(x)


class Same(nn.Module):
    """Returns what it was given."""

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 3, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return self.gru(x.reshape(len(x), 3, 2))[0].mean(1)


class Nested(nn.Module):
    """A container: its blocks are layers, and its code runs everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, other: Tensor, ids: Tensor, flag: bool) -> Any:
        return x + self.scale * self.steps(x)


KINDS: dict[str, type[nn.Module]] = {
    "linear": Base, "curved": Curved, "normed": Normed, "gated": Gated, "named": Named, "pair": Pair, "dict": Dict,
    "parcel": Parcels, "slice": Slice, "writing": Writing, "into_input": WritingIntoInput, "dropout": Dropping,
    "silent": Silent, "same": Same, "recurrent": Recurrent, "nested": Nested,
}  # fmt: skip
