"""Train a small character-level GPT on Python's own help text, cut over pipeline stages.

The model below is an ordinary LightningModule: nothing in it knows about pipelines. The text comes with
Python (``pydoc_data.topics``), so nothing is downloaded. Run it with and without the strategy:

    python examples/train_gpt.py              # two processes, one pipeline stage each
    python examples/train_gpt.py --plain      # one process, no strategy
"""

import argparse
import csv
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One transformer block: attention, then a two-layer MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharGPT(LightningModule):
    """A decoder-only transformer that predicts the next character."""

    def __init__(
        self,
        alphabet: str,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 32,
        tied: bool = False,
        lr: float = 2e-3,
        warmup: int = 20,
        steps: int = 400,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.alphabet = alphabet
        self.tok_emb = nn.Embedding(len(alphabet), width)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(alphabet), bias=False)
        if tied:
            self.head.weight = self.tok_emb.weight

    def forward(self, chars: Tensor) -> Tensor:
        x = self.tok_emb(chars) + self.pos_emb[:, : chars.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        warmup, steps = self.hparams["warmup"], self.hparams["steps"]

        def factor(step: int) -> float:
            """Linear warm-up, then a cosine down to a tenth."""
            progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def sample(self, prompt: str, length: int, seed: int = 0) -> str:
        """Continue ``prompt`` by ``length`` characters drawn from the model."""
        generator = torch.Generator().manual_seed(seed)
        chars = encode(prompt, self.alphabet)[None]
        for _ in range(length):
            logits = self(chars[:, -self.hparams["context"] :])[0, -1]
            drawn = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            chars = torch.cat([chars, drawn[None]], dim=1)
        return "".join(self.alphabet[i] for i in chars[0].tolist())


class Windows(Dataset[Tensor]):
    """A text cut into windows of ``context + 1`` characters (the last one of each is only a target)."""

    def __init__(self, chars: Tensor, context: int) -> None:
        self.chars, self.context = chars, context

    def __len__(self) -> int:
        return (len(self.chars) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.chars[start : start + self.context + 1]


def read_text() -> str:
    """All help topics that come with Python, one after the other."""
    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str, alphabet: str) -> Tensor:
    """The text as indices into the alphabet."""
    index = {char: i for i, char in enumerate(alphabet)}
    return torch.tensor([index[char] for char in text])


def make_loaders(args: argparse.Namespace, text: str, alphabet: str) -> tuple[DataLoader[Tensor], ...]:
    """Training batches in shuffled order from the first 95 %, validation batches from the rest."""
    chars = encode(text, alphabet)
    cut = len(chars) * 95 // 100
    train, val = Windows(chars[:cut], args.context), Windows(chars[cut:], args.context)
    order = torch.Generator().manual_seed(args.seed)
    return (
        DataLoader(train, args.batch_size, shuffle=True, generator=order),
        DataLoader(val, args.batch_size),
    )


def make_trainer(args: argparse.Namespace, epochs: int) -> Trainer:
    """A Trainer; with ``--plain`` on one device, else with one process per pipeline stage."""
    common: dict[str, Any] = {
        "accelerator": args.accelerator,
        "precision": args.precision,
        "max_epochs": epochs,
        "max_steps": args.steps,
        "val_check_interval": max(1, args.steps // 4),
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
        "logger": CSVLogger(args.out, name="", version=""),
        "enable_checkpointing": False,
    }
    if args.plain:
        return Trainer(devices=1, **common)

    from lightning_pp import PipelineStrategy

    strategy = PipelineStrategy(stages=args.stages, microbatches=args.microbatches, schedule=args.schedule)
    return Trainer(devices=args.devices or args.stages, strategy=strategy, **common)


def read_losses(folder: Path, name: str) -> dict[int, float]:
    """A column of the CSV log, by step."""
    with open(folder / "metrics.csv", newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def report(args: argparse.Namespace, checkpoint: Path) -> None:
    """Print the losses and a sample of text from the saved model."""
    train, val = read_losses(args.out, "train_loss"), read_losses(args.out, "val_loss")
    last = list(train.values())[-10:]
    print(f"\ntrain loss: {next(iter(train.values())):.3f} at first, ", end="")
    print(f"{sum(last) / len(last):.3f} at the end (mean of the last {len(last)} steps)")
    print("val loss:   " + ", ".join(f"{loss:.3f} after step {step + 1}" for step, loss in val.items()))
    model = CharGPT.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).eval()
    print(f"log and checkpoint: {args.out}\nsample:\n{model.sample('The ', 300)}")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="number of pipeline stages (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="pieces of a batch (default: %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="order of the work (default: %(default)s)")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--devices", type=int, help="number of processes (default: the number of stages)")
    parser.add_argument("--precision", default="32-true", help="as the Trainer takes it (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=400, help="optimizer steps (default: %(default)s)")
    length.add_argument("--epochs", type=int, help="passes over the text, instead of --steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=32, help="characters in a window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="one device, no strategy")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for the log and the checkpoint")
    return parser.parse_args()


def main() -> None:
    """Train, save, and show what the model has learnt."""
    args = parse_args()
    torch.set_num_threads(1)
    seed_everything(args.seed)
    text = read_text()
    alphabet = "".join(sorted(set(text)))
    train_loader, val_loader = make_loaders(args, text, alphabet)
    if args.epochs is not None:
        args.steps = args.epochs * len(train_loader)
    model = CharGPT(alphabet, args.width, args.layers, context=args.context, tied=args.tied, steps=args.steps)
    trainer = make_trainer(args, epochs=math.ceil(args.steps / len(train_loader)))
    trainer.fit(model, train_loader, val_loader)
    checkpoint = args.out / "gpt.ckpt"
    trainer.save_checkpoint(checkpoint)
    if trainer.is_global_zero:
        report(args, checkpoint)


if __name__ == "__main__":
    main()
