"""Modules that other pipelines are known to train wrongly, or not at all; no line in here knows of a pipeline."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.models import GPT, MLP, CheckpointedBlocks, ReentrantBlocks, regression_data

__all__: list[str] = []


class Descending(MLP):
    """Plain SGD: a gradient of the wrong size is seen, which Adam would hide."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class Squeezed(Descending):
    """Loses a dimension where a micro-batch has one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net[6] = nn.Linear(8, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x).squeeze(), y[:, 0].squeeze())


class _Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapters(Descending):
    """Frozen layers with small ones beside them that train; the first and the last block train not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(_Adapter() for _ in range(4)), nn.Linear(8, 3).requires_grad_(False))
        self.net[0].requires_grad_(False)


class _Strided(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        if self.kind == "transposed":
            return h.t()
        return h[:, None].expand(-1, 2, -1) if self.kind == "expanded" else torch.stack([h, -h, h], 1)[:, ::2]


class Strided(Descending):
    """Layers that return views: transposed, expanded and with steps."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.blocks = nn.ModuleList(_Strided(kind) for kind in ("transposed", "expanded", "stepped"))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.blocks[0](x).t()
        hidden = self.blocks[1](hidden).sum(1)
        return F.mse_loss(self.head(self.blocks[2](hidden)[:, 1]), y)


class _Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.linear(x), "more": [x, None]}


class AnswersInADict(Descending):
    """Its last layer returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net[6] = _Answers()

    def loss(self, batch: Any) -> Tensor:
        answer = self.net(batch[0])
        return F.mse_loss(answer["logits"], batch[1]) + answer["more"][0].square().mean()


class _Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Reused(Descending):
    """Each block uses its one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(_Reused() for _ in range(4)), nn.Linear(8, 3))


class Recomputed(CheckpointedBlocks):
    """Gradient checkpoints of the user's own."""

    dropout = 0.0


class RecomputedReentrant(ReentrantBlocks):
    dropout = 0.0


class CompiledBlocks(GPT):
    """Each block in the wrapper that ``torch.compile`` returns."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]


class Normalised(Descending):
    """BatchNorm in two stages, on batches that are a multiple of the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(8), nn.BatchNorm1d(8)]
        self.net = nn.Sequential(nn.Linear(8, 8), norms[0], nn.Tanh(), nn.Linear(8, 8), norms[1], nn.Linear(8, 3))

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(24), batch_size=8)
