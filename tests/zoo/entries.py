"""What every entry of the zoo shares: an ordinary LightningModule around a library's model, and small batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

SAMPLES = 8
BATCH = 5  # so that the second batch of an epoch is a smaller one
LENGTH = 7
WORDS = 23
IGNORED = -100

Batch = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One row of the zoo.

    Attributes:
        model: Makes the LightningModule.
        library: Whose model it is.
        title: The model.
        use: How it is used.
        microbatches: Per batch; one sample in each unless given, so that all of them are planned at once.
        precision: Of the Trainer.
        tolerance: How far losses and parameters may be from those of the plain run.
        strategy: Further arguments of the strategy.
        refused: For a row that cannot be cut: what the message says.
        note: For the table.
    """

    model: Callable[[], "Trained"]
    library: str
    title: str
    use: str
    microbatches: int = BATCH
    precision: str = "64-true"
    tolerance: float = 1e-9
    strategy: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    note: str = ""


class Trained(LightningModule):
    """A model of ``transformers`` in training: what a user would write around any of them.

    Args:
        model: Returns an output with a ``loss`` when it is given a batch as keywords.
        data: All samples.
        shifted: Whether the model predicts the next token, so that the first label has no prediction.
    """

    def __init__(self, model: nn.Module, data: Batch, shifted: bool = False) -> None:
        super().__init__()
        self.model = model
        self.shifted = shifted
        self.data = data

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(next(iter(batch.values()))))

    def micro_batch_weight(self, micro_batch: Batch) -> float:
        """The model's loss is a mean over the labels that count."""
        labels = micro_batch["labels"]
        return float((labels[:, 1:] if self.shifted else labels).ne(IGNORED).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def loader(self) -> DataLoader[Any]:
        rows = [{key: value[i] for key, value in self.data.items()} for i in range(SAMPLES)]
        return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int = 1, words: int = WORDS, length: int = LENGTH) -> Tensor:
    return torch.randint(3, words, (SAMPLES, length), generator=generator(seed))


def lengths(length: int = LENGTH) -> Tensor:
    """How much of each row is text; never the same twice in a row."""
    return torch.tensor([length - i % (length - 3) for i in range(SAMPLES)])


def text(pad: str = "", **more: Any) -> Batch:
    """Rows of token ids with labels; ``pad`` says on which side they are filled up, with a mask that tells."""
    ids = tokens()
    batch: Batch = {"input_ids": ids, "labels": ids.clone()}
    if pad:
        place = torch.arange(LENGTH).expand(SAMPLES, -1)
        mask = place < lengths()[:, None] if pad == "right" else place >= LENGTH - lengths()[:, None]
        batch["attention_mask"] = mask.long()
        batch["input_ids"] = ids.masked_fill(~mask, 0)
        batch["labels"] = ids.masked_fill(~mask, IGNORED)
    return batch | more


def packed() -> Batch:
    """Two texts in each row; positions start anew, and the first token of a text has no label."""
    batch = text()
    first = lengths(LENGTH)[:, None] - 2
    place = torch.arange(LENGTH).expand(SAMPLES, -1)
    batch["position_ids"] = torch.where(place < first, place, place - first)
    batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, IGNORED)
    return batch


def images(seed: int = 2, size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(SAMPLES, channels, size, size, generator=generator(seed), dtype=torch.float64)


def classes(number: int = 5, seed: int = 3) -> Tensor:
    return torch.randint(number, (SAMPLES,), generator=generator(seed))
