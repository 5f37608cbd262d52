"""Sequence models as their users write them: a translator, recurrent networks, experts chosen by the data."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

PAD = 0
WORDS = 13


def sentences(samples: int = 11) -> list[Tensor]:
    source = torch.Generator().manual_seed(6)
    lengths = torch.randint(2, 8, (samples,), generator=source).tolist()
    return [torch.randint(1, WORDS, (length,), generator=source) for length in lengths]


def pairs(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return {"source": ids, "target": ids.flip(1), "lengths": torch.tensor([len(row) for row in rows])}


def text_loader() -> DataLoader[Any]:
    return DataLoader(sentences(), batch_size=5, collate_fn=pairs)  # type: ignore[arg-type]


class Translator(LightningModule):
    """``nn.Transformer`` with the causal mask and both padding masks, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=PAD)
        self.positions = nn.Parameter(torch.randn(16, 8) * 0.1)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) * 8**0.5 + self.positions[: ids.shape[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch["source"], batch["target"]
        hidden = self.transformer(
            self.embed(source),
            self.embed(target[:, :-1]),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=torch.float64),
            src_key_padding_mask=(source == PAD).double().masked_fill(source == PAD, -1e9),
            memory_key_padding_mask=(source == PAD).double().masked_fill(source == PAD, -1e9),
        )
        loss = F.cross_entropy(self.head(hidden).transpose(1, 2), target[:, 1:], ignore_index=PAD)
        self.log("loss", loss, on_epoch=True, batch_size=len(source))
        return loss

    def micro_batch_weight(self, micro_batch: Any) -> float:
        return float((micro_batch["target"][:, 1:] != PAD).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    loader = staticmethod(text_loader)


class Tagger(LightningModule):
    """A bidirectional ``nn.LSTM`` on packed sequences; the module is one layer, and so is the packing around it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, padding_idx=PAD)
        self.lstm = PackedLSTM(6, 5)
        self.between = nn.Sequential(nn.Linear(10, 6), nn.Tanh())
        self.gru = nn.GRU(6, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["source"]
        hidden = self.lstm(self.words(ids), batch["lengths"])
        hidden, last = self.gru(self.between(hidden))
        tags = self.head(hidden + last[-1][:, None])
        each = F.cross_entropy(tags.transpose(1, 2), ids % 3, reduction="none")
        loss = (each * (ids != PAD)).sum(1).mean()
        self.log("loss", loss, batch_size=len(ids))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    loader = staticmethod(text_loader)


class PackedLSTM(nn.Module):
    def __init__(self, entering: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(entering, width, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class PackingInTheStep(Tagger):
    """Packs between the layers, and hands a ``PackedSequence`` from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.second = nn.LSTM(5, 10, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, lengths = batch["source"], batch["lengths"]
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.lstm(packed)
        packed, _ = self.second(packed)
        hidden, _ = pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])
        hidden, _ = self.gru(self.between(hidden))
        each = F.cross_entropy(self.head(hidden).transpose(1, 2), ids % 3, reduction="none")
        return (each * (ids != PAD)).sum(1).mean()


class Experts(nn.Module):
    """Top-1 routing by boolean indices: how many tokens an expert gets is in the data."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(number)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        share, chosen = logits.softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero(as_tuple=True)[0]
            if len(mine):
                out[mine] = expert(tokens[mine]) * share[mine][:, None]
        return out.view_as(x), (logits.logsumexp(-1) ** 2).mean()


class ExpertBlock(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.moe = Experts(width, number)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + torch.tanh(self.mix(x.cumsum(1)))
        out, penalty = self.moe(self.norm(x))
        return x + out, penalty


class MixtureOfExperts(LightningModule):
    """Blocks of experts. Their inner ``ModuleList`` must not be cut: ``layers=`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList(ExpertBlock(6, 3) for _ in range(4))
        self.head = nn.Linear(6, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["source"]
        h, penalties = self.words(ids), []
        for block in self.blocks:
            h, penalty = block(h)
            penalties.append(penalty)
        loss = F.cross_entropy(self.head(h).transpose(1, 2), batch["target"])
        self.log("loss", loss, batch_size=len(ids))
        self.log("penalty", sum(penalties), batch_size=len(ids))
        return loss + 1e-3 * sum(penalties)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    loader = staticmethod(text_loader)


class RoutedInTheStep(MixtureOfExperts):
    """The step itself looks at which expert a token goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.router = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.words(batch["source"])
        chosen = self.router(h).argmax(-1)
        out = torch.zeros_like(h)
        for number, block in enumerate(self.blocks):
            mine = chosen == number
            if mine.any():
                out[mine] = block(h[mine])
        return F.cross_entropy(self.head(out).transpose(1, 2), batch["target"])
