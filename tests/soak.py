"""A long run: validation, checkpoints and batches of many lengths; is memory flat, does anything pile up or drift?

``python -m tests.soak --steps 2000``

The plain run is made beside it, and what grows is compared with what grows there. torch notes the last 2000 collectives
of a process for whoever looks for a hang, each with its names and its call stack: 2 to 3 MiB until the notes are full.
They are switched off here, or they would hide what the pipeline itself leaves.
"""

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pp import PipelineStrategy
from tests.launch import run_ranks
from tests.training import QUIET

#: lengths of sequences; a batch has one of them, as a loader that sorts samples into buckets gives
LENGTHS = (5, 9, 14, 20, 23)
#: looks at a process in a run
LOOKS = 40
#: how many entries torch's record of collectives has; its name in older versions is the other one
RECORD = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class Sequences(LightningModule):
    """Predicts the next token; small, but with all that a language model has."""

    def __init__(self, width: int = 16, vocabulary: int = 29) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 24, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.losses: list[Tensor] = []

    def loss(self, ids: Tensor) -> Tensor:
        x = self.tok(ids[:, :-1])
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches(torch.utils.data.Dataset[Tensor]):
    """Batches that are made when they are wanted; each is different."""

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + index)
        size = 5 + index % 4
        return torch.randint(0, 29, (size, LENGTHS[index % len(LENGTHS)] + 1), generator=generator)


class Looks(Callback):
    """Looks at this process again and again."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.losses: list[float] = []
        self.rss: list[int] = []
        self.objects: list[int] = []
        self.threads: list[int] = []
        self.handles: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())
        if trainer.global_step % self.every == 0:
            gc.collect()
            self.objects.append(len(gc.get_objects()))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
            self.threads.append(len(os.listdir("/proc/self/task")))
            self.handles.append(len(os.listdir("/proc/self/fd")))


def soak(steps: int, stages: int, folder: str) -> dict[str, Any]:
    """One process's part of the run; ``stages=0`` is the plain run."""
    os.environ.update(dict.fromkeys(RECORD, "0"))
    torch.manual_seed(7)
    looks, module = Looks(max(1, steps // LOOKS)), Sequences()
    keeper = ModelCheckpoint(folder, every_n_train_steps=max(10, steps // 10), save_top_k=2, monitor="loss")
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": True}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, microbatches=stages)
    start = time.monotonic()
    Trainer(
        accelerator="cpu", devices=max(1, stages), max_steps=steps, precision="64-true", callbacks=[looks, keeper],
        val_check_interval=min(steps, max(10, steps // 10)), limit_val_batches=4, **options,
    ).fit(
        module,
        torch.utils.data.DataLoader(Batches(steps, 0), batch_size=None),
        torch.utils.data.DataLoader(Batches(4, 10**6), batch_size=None),
    )  # fmt: skip
    parameters = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    return {**vars(looks), "seconds": time.monotonic() - start, "parameters": parameters}


def drift(plain: dict[str, Any], ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """The largest difference of any loss, and of any parameter at the end."""
    losses = max(abs(a - b) for rank in ranks for a, b in zip(rank["losses"], plain["losses"], strict=True))
    found = {name: p for rank in ranks for name, p in rank["parameters"].items()}
    assert found.keys() == plain["parameters"].keys()
    return losses, max(float((found[name] - p).abs().max()) for name, p in plain["parameters"].items())


def growth(run: dict[str, Any], name: str, since: float = 0.25) -> tuple[int, int]:
    """What a count was after the first quarter of the run, and at its end: each the middle of five looks."""
    series = run[name]
    first = int(len(series) * since)

    def middle(values: list[int]) -> int:
        return sorted(values)[len(values) // 2]

    return middle(series[first : first + 5]), middle(series[-5:])


def more(run: dict[str, Any], name: str) -> int:
    """By how much a count has grown since the first quarter of the run."""
    before, after = growth(run, name)
    return after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which a run has hung")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = run_ranks(soak, 1, given.steps, 0, f"{folder}/plain", timeout=given.timeout)[0]
        ranks = run_ranks(soak, given.stages, given.steps, given.stages, f"{folder}/piped", timeout=given.timeout)
    print(f"{given.steps} steps: plain {plain['seconds']:.0f} s, {given.stages} stages {ranks[0]['seconds']:.0f} s")
    print("largest difference of a loss {:.1e}, of a parameter {:.1e}".format(*drift(plain, ranks)))
    for name, one in (("plain", plain), *((f"rank {number}", rank) for number, rank in enumerate(ranks))):
        before, after = growth(one, "rss")
        counts = ", ".join(
            f"{what} {'{} -> {}'.format(*growth(one, what))}" for what in ("objects", "threads", "handles")
        )
        print(f"{name}: over the last three quarters RSS {before / 2**20:.2f} -> {after / 2**20:.2f} MiB, {counts}")


if __name__ == "__main__":
    main()
