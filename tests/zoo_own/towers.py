"""Contrastive and multi-task models: an encoder called twice, a momentum encoder, several heads, running buffers."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def views(samples: int = 12) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(8)
    one = torch.randn(samples, 6, generator=source)
    return DataLoader(TensorDataset(one, one + 0.1 * torch.randn(samples, 6, generator=source)), batch_size=5)


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


class SimCLR(LightningModule):
    """Calls its encoder once for each view."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.projector = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (F.normalize(self.projector(self.encoder(view)), dim=1) for view in batch)
        logits = first @ second.t() / 0.2
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == labels).double().mean())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    loader = staticmethod(views)


class ConcatenatedSimCLR(SimCLR):
    """As the warning says: one call on both views."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        both = F.normalize(self.projector(self.encoder(torch.cat(batch))), dim=1)
        first, second = both.chunk(2)
        logits = first @ second.t() / 0.2
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        self.log("loss", loss)
        return loss


class MoCo(LightningModule):
    """A momentum encoder that the step updates, and a queue of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query = encoder()
        self.key = encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 15), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        return self.contrast(batch)

    def contrast(self, batch: Any) -> Tensor:
        query = F.normalize(self.query(batch[0]), dim=1)
        with torch.no_grad():
            key = F.normalize(self.key(batch[1]), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        with torch.no_grad():
            places = (self.place + torch.arange(len(key))) % self.queue.shape[1]
            self.queue[:, places] = key.t()
            self.place.copy_((self.place + len(key)) % self.queue.shape[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.query.parameters(), lr=0.05)

    loader = staticmethod(views)


class MoCoInHook(MoCo):
    """Updates its momentum encoder after the optimizer's step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.contrast(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow()


class MultiTask(LightningModule):
    """One body, three heads, three losses weighted by parameters of their own, all logged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder()
        self.heads = nn.ModuleDict({"value": nn.Linear(8, 1), "sign": nn.Linear(8, 2), "rebuilt": nn.Linear(8, 6)})
        self.log_scales = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x, other = batch
        h = self.body(x)
        return {
            "value": F.smooth_l1_loss(self.heads["value"](h)[:, 0], other.sum(1)),
            "sign": F.cross_entropy(self.heads["sign"](h), (other[:, 0] > 0).long()),
            "rebuilt": F.mse_loss(self.heads["rebuilt"](h), other),
        }

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        losses = self.losses(batch)
        self.log_dict({f"train/{name}": loss for name, loss in losses.items()}, on_step=True, on_epoch=True)
        total = sum(loss * (-self.log_scales[name]).exp() + self.log_scales[name] for name, loss in losses.items())
        return {"loss": total, "parts": {name: loss.detach() for name, loss in losses.items()}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, loss in self.losses(batch).items():
            self.log(f"val/{name}", loss)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.heads.parameters(), "lr": 0.02}]
        return torch.optim.AdamW([*groups, {"params": self.log_scales.parameters(), "weight_decay": 0.0}], lr=0.01)

    loader = staticmethod(views)


class Counting(nn.Module):
    """Keeps a running mean of its inputs, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean = self.mean + (x.mean(0) - self.mean) / self.calls
        return torch.tanh(self.linear(x - self.mean))


class RunningBuffers(LightningModule):
    """Buffers that layers update, and one that the step itself updates with their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Counting() for _ in range(3))
        self.leave = nn.Linear(8, 6)
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.enter(batch[0])
        for block in self.blocks:
            h = block(h)
        out = self.leave(h)
        loss = F.mse_loss(out / self.scale.clone(), batch[1])
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * out.detach().abs().mean())
        self.log("scale", self.scale)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    loader = staticmethod(views)
