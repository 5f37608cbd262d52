"""Modules as their users would write them: no line in here knows of a pipeline."""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Module(LightningModule):
    """Optimizer and logging that all of them share."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.01)


def regression_data(samples: int = 21, seed: int = 1) -> Dataset[Any]:
    source = generator(seed)
    return TensorDataset(torch.randn(samples, 8, generator=source), torch.randn(samples, 3, generator=source))


class MLP(Module):
    """``R`` of the fault list: three blocks and a head in one ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(8, 8), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class DropoutMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3)),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)),
            nn.Linear(16, 3),
        )
        self.drop = nn.Dropout(0.1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.drop(self.net(self.drop(x))), y)


class Contrasting(MLP):
    """A loss over all samples, wherever they are."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        targets = self.all_gather(y).reshape(-1, 3)
        out = self.all_gather(self.net(x), sync_grads=True).reshape(-1, 3)
        return F.mse_loss(torch.cdist(out, out), torch.cdist(targets, targets))


class Normalised(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(Module):
    """Tied embedding and head, positions held directly, blocks of unequal cost."""

    vocabulary = 17

    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.tok = nn.Embedding(self.vocabulary, 12)
        self.pos_emb = nn.Parameter(torch.randn(1, 10, 12) * 0.02)
        self.blocks = nn.ModuleList(Block(12, 2 if i % 2 else 3, dropout) for i in range(blocks))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, self.vocabulary, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos_emb[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        ids = batch[0]
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    @classmethod
    def loader(cls) -> DataLoader[Any]:
        ids = torch.randint(0, cls.vocabulary, (11, 9), generator=generator(2))
        return DataLoader(TensorDataset(ids), batch_size=5)


class DropoutGPT(GPT):
    """Tied: its tied gradient is summed in another order for every number of stages."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)


class UntiedGPT(GPT):
    """No tied weight, and plain SGD: bit for bit the same for every number of stages."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__(dropout=self.dropout)
        self.head = nn.Linear(12, self.vocabulary, bias=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SparseGPT(UntiedGPT):
    """The embedding's gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(self.vocabulary, 12, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UntiedDropoutGPT(UntiedGPT):
    dropout = 0.2


class HeadInGlueGPT(GPT):
    """The head is the embedding's weight, used in a function call."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos_emb[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tok.weight)


class VaryingLengthGPT(GPT):
    @classmethod
    def loader(cls) -> DataLoader[Any]:
        batches = [torch.randint(0, cls.vocabulary, (5, n), generator=generator(n)) for n in (6, 4, 9, 6)]
        return DataLoader([[ids] for ids in batches], batch_size=None)  # type: ignore[arg-type]


class PaddedGPT(GPT):
    """Cross-entropy over valid tokens only."""

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        return F.cross_entropy(self(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)

    @classmethod
    def loader(cls) -> DataLoader[Any]:
        ids = torch.randint(0, cls.vocabulary, (11, 8), generator=generator(3))
        valid = torch.arange(11) % 5 + 1
        labels = torch.where(torch.arange(8)[None] < valid[:, None], ids.roll(-1, 1), -100)
        return DataLoader(TensorDataset(ids, labels), batch_size=5)


class WeightedGPT(PaddedGPT):
    def micro_batch_weight(self, micro_batch: Any) -> float:
        return float((micro_batch[1] != -100).sum())


class PerSampleGPT(PaddedGPT):
    """What micro-batches of one sample come to without weights: the mean over samples of each one's mean."""

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        losses = F.cross_entropy(self(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        valid = labels != -100
        return (losses.view_as(labels).sum(1) / valid.sum(1)).mean()


class UNet(Module):
    """Long skips; trained as a diffusion model with noise that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.ModuleList([_conv(4, 6, 2), _conv(6, 8, 2)])
        self.middle = _conv(8, 8, 1)
        self.up = nn.ModuleList([_conv(8 + 8, 6, 1), _conv(6 + 6, 4, 1)])
        self.leave = nn.Conv2d(4 + 4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skips = [x]
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(block(torch.cat([x, skips.pop()], 1)), scale_factor=2.0)
        return self.leave(torch.cat([x, skips.pop()], 1))

    def loss(self, batch: Any) -> Tensor:
        image, noise = batch
        return F.mse_loss(self(image + 0.5 * noise), noise)

    @staticmethod
    def loader() -> DataLoader[Any]:
        source = generator(4)
        images = torch.randn(7, 1, 8, 8, generator=source)
        return DataLoader(TensorDataset(images, torch.randn(7, 1, 8, 8, generator=source)), batch_size=4)


class DrawingUNet(UNet):
    """Draws its noise in the step: input and target must come from one draw."""

    def loss(self, batch: Any) -> Tensor:
        image, _ = batch
        noise = torch.randn_like(image)
        return F.mse_loss(self(image + 0.5 * noise), noise)


def _conv(channels: int, out: int, stride: int) -> nn.Module:
    return _ConvBlock(channels, out, stride)


class _ConvBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, stride, padding=1)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class EncoderDecoder(Module):
    """``nn.Transformer`` with embeddings used on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=13, ninp=8, nhead=2, nhid=8, nlayers=2, dropout=0.0)

    def loss(self, batch: Any) -> Tensor:
        source, target = batch
        return F.nll_loss(self.model(source, target), target.view(-1))

    @staticmethod
    def loader() -> DataLoader[Any]:
        source = generator(5)
        ids = torch.randint(0, 13, (9, 6), generator=source)
        return DataLoader(TensorDataset(ids, ids.roll(1, 1)), batch_size=4)


@dataclass
class Carried:
    """A dataclass that nobody has registered anywhere."""

    hidden: Tensor
    extra: dict[str, Any]


class _Rich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        carried: Carried = state["carried"]
        hidden = torch.tanh(self.linear(carried.hidden))
        return {
            "carried": Carried(hidden, {"mask": hidden > 0, "count": (hidden > 0).sum(1), "nothing": None}),
            "pair": (hidden * 2, [state["flag"], 3]),
            "flag": state["flag"],
            "unused": hidden.exp(),
        }


class RichBoundaries(Module):
    """Blocks that return dicts, tuples, a dataclass, bool and int tensors, None, flags and an output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Rich() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch["x"], batch["y"]
        state: dict[str, Any] = {"carried": Carried(x * batch["scale"], {}), "flag": True}
        for block in self.blocks:
            state = block(state)
            assert state["flag"] is True
            assert state["carried"].extra["nothing"] is None
            assert state["pair"][1][1] == 3
        carried = state["carried"]
        hidden = torch.where(carried.extra["mask"], carried.hidden, 0.1 * state["pair"][0])
        return F.mse_loss(self.head(hidden) + carried.extra["count"][:, None] * 0.01, y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        samples = [{"x": x, "y": y} for x, y in regression_data()]  # type: ignore[attr-defined]

        def collate(items: list[Any]) -> dict[str, Any]:
            return {**default_collate(items), "scale": torch.tensor(0.5), "meta": "text", "positions": torch.arange(5)}

        return DataLoader(samples, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


class InPlaceGlue(Module):
    """Writes into layer outputs between the layers, and has layers that write into their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(8, 8), "act": nn.ReLU(inplace=True)}) for _ in range(3)
        )
        self.relus = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.first(x)
        h += 0.1
        h.relu_()
        for block in self.blocks:
            out = block["linear"](h)
            out[:, 0].mul_(2)
            h = block["act"](out) + h
        h = self.relus(h.contiguous().view(-1, 8))
        return F.mse_loss(self.head(h), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class FrozenHalf(MLP):
    """The first half is frozen, and the optimizer is given only what trains."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[:4].parameters():
            parameter.requires_grad_(False)


class FrozenLastHalf(MLP):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[4:].parameters():
            parameter.requires_grad_(False)


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(-1)
        return torch.tanh(self.linear(x)) * share[:, :1] + x, (share**2).sum(1).mean()


class AuxiliaryLoss(Module):
    """Every block adds a term to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Expert() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        extra = x.new_zeros(())
        for block in self.blocks:
            x, aux = block(x)
            extra = extra + aux
        return F.mse_loss(self.head(x), y) + 0.1 * extra

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(24), batch_size=8)


class _Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.condition = nn.Linear(3, 3)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.linear(x) * torch.sigmoid(self.condition(condition))


class LateField(Module):
    """The last block uses a field of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = _Conditioned()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = x
        for block in self.body:
            h = block(h)
        return F.mse_loss(self.last(h, y.flip(-1)), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class TwiceCalled(Module):
    """A block that is called twice, and one whose output skips over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.between = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        skip = self.enter(x)
        h = self.between(self.shared(skip))
        h = self.shared(h) + skip
        return F.mse_loss(self.head(h), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class KeepsLogits(MLP):
    """Keeps a layer's value for a callback, without reading it again."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.hidden_view = self.net[:2](x)
        out = self.net[2:](self.hidden_view)
        self.last_logits = out.detach()
        return F.mse_loss(out, y)


class CheckpointedBlocks(UntiedDropoutGPT):
    """Recomputes its blocks as users do it, with dropout on."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos_emb[:, : ids.shape[1]]
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class ReentrantBlocks(CheckpointedBlocks):
    reentrant = True


class SpanningReentrant(UntiedDropoutGPT):
    """One reentrant checkpoint around all blocks: it builds its graph only when it returns."""

    reentrant = True

    def forward(self, ids: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        x = self.tok(ids) + self.pos_emb[:, : ids.shape[1]]
        return self.head(self.norm(torch.utils.checkpoint.checkpoint(body, x, use_reentrant=self.reentrant)))


class SpanningCheckpoint(SpanningReentrant):
    reentrant = False


class PopsAndHooks(MLP):
    """Takes its batch apart, hooks a layer's output, and asks it to keep its gradient."""

    def loss(self, batch: Any) -> Tensor:
        assert batch.pop("kind") == "text"
        hidden = self.net[:2](batch["x"])
        hidden.register_hook(lambda grad: grad * 0.5)
        hidden.retain_grad()
        return F.mse_loss(self.net[2:](hidden), batch["y"])

    @staticmethod
    def loader() -> DataLoader[Any]:
        samples = [{"x": x, "y": y} for x, y in regression_data()]  # type: ignore[attr-defined]
        return DataLoader(samples, batch_size=8, collate_fn=_labelled)  # type: ignore[arg-type]


def _labelled(items: list[Any]) -> dict[str, Any]:
    return {**default_collate(items), "kind": "text"}


class GlueBuffers(Module):
    """Buffers of every kind that the code between the layers reads, one that it updates, and BatchNorm in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(8) % 3 > 0)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.rand(4)), persistent=False)
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("nothing", torch.zeros(0))
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = torch.where(self.mask, x, 0)[:, self.order]
        x = torch.view_as_real(torch.view_as_complex(x.view(-1, 4, 2)) * self.turn.to(torch.complex128)).flatten(1)
        out = self.head(self.body(x)) - self.center
        if self.training:
            self.center.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return F.mse_loss(out, y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class SharedNormModel(Module):
    """Modules inside blocks that are shared between blocks."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class DictOutput(MLP):
    """Returns a dict with more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        loss = F.mse_loss(out, y)
        self.log_dict({"train_loss": loss, "size": torch.tensor(2.0)}, batch_size=len(x))
        return {"loss": loss, "predictions": out, "bias": out.mean()}


class OtherNames(MLP):
    """Calls its batch index something else, as Lightning allows."""

    def training_step(self, b: Any, i: int) -> Any:
        loss = F.mse_loss(self.net(b[0]), b[1]) * (1 + i)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, b: Any, i: int) -> None:
        self.log("val_loss", self.loss(b) + i)


class BatchOnly(MLP):
    """Takes no batch index at all."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch))


class AnyArguments(MLP):
    def training_step(self, *args: Any) -> Any:
        return self.loss(args[0]) + args[1]


class LSTM(LightningModule):
    """Lightning's demo: carries its hidden state from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=11, ninp=6, nhid=6, nlayers=1)
        self.hidden: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch
        if self.hidden is None:
            self.hidden = self.model.init_hidden(source.size(0))
        self.hidden = (self.hidden[0].detach(), self.hidden[1].detach())
        output, self.hidden = self.model(source, self.hidden)
        return F.nll_loss(output, target.view(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @staticmethod
    def loader() -> DataLoader[Any]:
        ids = torch.randint(0, 11, (8, 6), generator=generator(7))
        return DataLoader(TensorDataset(ids, ids), batch_size=4)


class Measured(MLP):
    """Metrics of torchmetrics: called in steps, computed at the end of epochs, in a collection too."""

    def __init__(self) -> None:
        super().__init__()
        self.train_error = MeanSquaredError().set_dtype(torch.float64)
        self.val_errors = MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()})
        self.val_errors.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.log("step_error", self.train_error(out, batch[1]))
        assert self.train_error.compute().isfinite()  # where nobody else asks
        return F.mse_loss(out, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("train_error", self.train_error.compute())
        self.train_error.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_errors.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_errors.compute())
        self.val_errors.reset()


class BuiltLate(MLP):
    """Builds its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = MLP().net


class FusedOptimizer(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class ForeachOptimizer(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, foreach=True, weight_decay=0.1)


class CompiledLayers(GPT):
    """Each block compiled in place; the backend that runs what was captured."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class Parametrized(Module):
    """Weights that are computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.body = nn.ModuleList(weight_norm(nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.utils.parametrizations.orthogonal(nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.body:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.head(x), y)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(regression_data(), batch_size=8)


class Recurrent(Module):
    """An LSTM and a GRU between an embedding and a head; nothing carried from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.gru = nn.GRU(5, 7, batch_first=True)
        self.head = nn.Linear(7, 11)

    def loss(self, batch: Any) -> Tensor:
        source, target = batch
        hidden, (last, _) = self.lstm(self.embedding(source))
        hidden, _ = self.gru(hidden + last[-1][:, None])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())

    @staticmethod
    def loader() -> DataLoader[Any]:
        return LSTM.loader()


class DemoLSTM(LightningLSTM):
    """Lightning's demo itself, on data that needs no download."""

    def __init__(self) -> None:
        super().__init__(vocab_size=11)

    def prepare_data(self) -> None:
        pass

    @staticmethod
    def loader() -> DataLoader[Any]:
        return LSTM.loader()


class DemoTransformer(LightningTransformer):
    """Lightning's demo itself, dropout and all, on data that needs no download."""

    def __init__(self) -> None:
        super().__init__(vocab_size=13)

    def prepare_data(self) -> None:
        pass

    @staticmethod
    def loader() -> DataLoader[Any]:
        return EncoderDecoder.loader()


class DemoTransformerWithoutDropout(DemoTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=13, dropout=0.0)


class Average:
    """A running average, as many projects have one."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def update(self, values: Tensor) -> None:
        self.total += values.sum().item()
        self.count += len(values)


class Keeper(MLP):
    """Collects by step and looks at what it has collected at the end, in the ways that tutorials show."""

    def __init__(self) -> None:
        super().__init__()
        self.train_losses: list[Tensor] = []
        self.val_outputs: list[dict[str, Tensor]] = []
        self.by_name: dict[str, list[Any]] = defaultdict(list)
        self.by_loader: list[list[Tensor]] = [[]]
        self.predicted: list[float] = []
        self.average = Average()
        self.seen = 0
        self.recent: deque[float] = deque(maxlen=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.train_losses.append(loss.detach())
        self.seen += len(batch[0])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_batches", torch.stack(self.train_losses).mean())
        self.log("batches", float(len(self.train_losses)))
        self.log("seen", float(self.seen))
        self.train_losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.net(x)
        errors = (out - y).abs().mean(1)
        self.val_outputs.append({"loss": F.mse_loss(out, y), "errors": errors})
        self.by_name["out"].append(out)
        self.by_name["pair"].append((errors.mean(), y))
        self.by_loader[0].append(out.sum(1))
        self.predicted.extend(errors.tolist())
        self.average.update(errors)
        self.spread = errors.max()
        self.recent.append(float(y.sum()))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack([output["loss"] for output in self.val_outputs]).mean())
        self.log("val_errors", torch.cat([output["errors"] for output in self.val_outputs]).median())
        self.log("val_batches", float(len(self.by_name["out"])))
        self.log("val_rows", float(sum(len(y) for _, y in self.by_name["pair"])))
        self.log("val_sum", torch.cat(self.by_loader[0]).sum())
        self.log("val_max", max(self.predicted))
        self.log("val_number", float(len(self.predicted)))
        self.log("val_average", self.average.total / self.average.count)
        self.log("spread", float(self.spread > 0))
        self.log("recent", min(1.0, len(self.recent)))
        self.val_outputs.clear()
        self.by_name.clear()
        self.by_loader = [[]]
        self.predicted.clear()
        self.average = Average()


class Boring(BoringModel):
    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(torch.randn(12, 32, generator=generator(8)), batch_size=4)  # type: ignore[arg-type]


MODELS = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, LightningModule) and hasattr(cls, "loader")
}
