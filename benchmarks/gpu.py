"""``python -m benchmarks.gpu``: checks and measures on one GPU that hosts all ranks; with ``--device cpu`` on none.

Every rank is a node of its own with one device, so that NCCL does not mind that it is the same one. Each part prints
what it found; a part that fails says so, and the others go on.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from benchmarks.contestants import QUIET
from benchmarks.models import GPT
from lightning_pp import ActivationMemoryMonitor, BubbleMonitor, PipelineStrategy
from tests.launch import run_ranks


@dataclass(frozen=True)
class Setting:
    """What all parts share.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        backend: ``"nccl"`` or ``"gloo"``.
        stages: Number of ranks.
        width: Of the model.
        blocks: Of the model.
        context: Tokens per sample.
        steps: Batches per run.
    """

    device: str
    backend: str
    stages: int
    width: int
    blocks: int
    context: int
    steps: int

    def model(self) -> GPT:
        """The model, the same every time."""
        seed_everything(1, verbose=False)
        return GPT(self.blocks, self.width, self.context)

    def loader(self, samples: int) -> DataLoader[Any]:
        """Batches of ``samples``."""
        draw = torch.Generator().manual_seed(2)
        shape = (samples, self.context + 1)
        batches = [torch.randint(256, shape, generator=draw) for _ in range(self.steps)]
        return DataLoader([(b[:, :-1], b[:, 1:]) for b in batches], batch_size=None)  # type: ignore[arg-type]


class Watch(Callback):
    """Losses, seconds per batch, and the memory of this rank."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.ends: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach())
        if batch_idx == trainer.num_training_batches - 1 and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def train(
    setting: Setting,
    samples: int,
    strategy: dict[str, Any] | None,
    precision: Any = "32-true",
    callbacks: tuple[Callback, ...] = (),
) -> Watch:
    """Train on this rank; without a strategy as one plain process."""
    watch = Watch()
    options: dict[str, Any] = {}
    if strategy is not None:
        backend = setting.backend if int(os.environ["WORLD_SIZE"]) > 1 else None
        options["strategy"] = PipelineStrategy(process_group_backend=backend, **strategy)
        options["num_nodes"] = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator=setting.device,
        devices=1,
        precision=precision,
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[watch, *callbacks],
        **QUIET,
        **options,
    )
    trainer.fit(setting.model(), setting.loader(samples))
    return watch


def as_node(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` as the one rank of a node."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(
        NODE_RANK=rank,
        LOCAL_RANK="0",
        NCCL_HOSTID=f"node{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
    )
    return function(*args)


def on_ranks(stages: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function`` on ``stages`` ranks."""
    return run_ranks(as_node, stages, function, *args, timeout=150)


def losses(setting: Setting, strategy: dict[str, Any] | None, precision: str) -> list[float]:
    """The losses of a run."""
    return [float(loss) for loss in train(setting, 8, strategy, precision).losses]


def numerics(setting: Setting) -> None:
    """Losses of the pipeline beside those of the plain Trainer, by precision."""
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        if precision == "16-mixed" and setting.device == "cpu":
            continue
        plain = on_ranks(1, losses, setting, None, precision)[0]
        piped = on_ranks(setting.stages, losses, setting, {"microbatches": 4}, precision)[0]
        apart = max(abs(one - other) for one, other in zip(plain, piped, strict=True))
        print(f"numerics {precision}: loss {plain[-1]:.5f}, largest difference in {len(plain)} steps {apart:.2e}")


def peaks(setting: Setting, schedule: str, microbatches: int) -> tuple[dict[str, float], int]:
    """What the memory monitor has seen, and the most that torch has allocated on this rank."""
    monitor = ActivationMemoryMonitor()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    train(setting, 2 * microbatches, {"microbatches": microbatches, "schedule": schedule}, callbacks=(monitor,))
    return monitor.last, torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0


def memory(setting: Setting) -> None:
    """Activations held for backward by schedule and number of micro-batches; flat for 1F1B."""
    for schedule in ("1f1b", "gpipe"):
        for number in (4, 16, 32) if setting.device == "cuda" else (4, 8):
            last, allocated = on_ranks(setting.stages, peaks, setting, schedule, number)[0]
            held, flying = (last[f"pipeline/stage0/{key}"] for key in ("activation_peak_bytes", "in_flight_peak"))
            print(
                f"memory {schedule} M={number}: the first stage holds {held:,.0f} B in {flying:.0f} micro-batches;"
                f" allocated at most {allocated:,} B"
            )


def pace(setting: Setting, strategy: dict[str, Any] | None) -> float:
    """Median seconds per batch."""
    ends = train(setting, 8, strategy).ends
    return statistics.median(end - start for start, end in pairwise(ends[1:]))


def overhead(setting: Setting) -> None:
    """One stage and one micro-batch beside the plain Trainer, in alternation."""
    ratios = []
    for _ in range(3):
        plain = on_ranks(1, pace, setting, None)[0]
        ratios.append(on_ranks(1, pace, setting, {"microbatches": 1})[0] / plain)
    print(f"overhead P=1, M=1 over the plain Trainer: {statistics.median(ratios):.4f} of {ratios}")


def host_seconds(setting: Setting) -> float:
    """Host time per op of a step that the device is not waited for in."""
    seconds = []

    class Timed(PipelineStrategy):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = super().training_step(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return output

    os.environ["WORLD_SIZE"] = "1"
    tiny = Setting(setting.device, setting.backend, 1, 64, 2, 16, 6)
    trainer = Trainer(
        accelerator=setting.device, devices=1, max_epochs=1, strategy=Timed(stages=1, microbatches=32), **QUIET
    )
    trainer.fit(tiny.model(), tiny.loader(64))
    return statistics.median(seconds[1:]) / 64


def host(setting: Setting) -> None:
    """Microseconds of host time per op, the user's code included."""
    print(f"host time per op: {on_ranks(1, host_seconds, setting)[0] * 1e6:.0f} us")


def bubbles(setting: Setting, schedule: str) -> dict[str, float]:
    """What the bubble monitor has seen."""
    monitor = BubbleMonitor()
    train(setting, 32, {"microbatches": 16, "schedule": schedule}, callbacks=(monitor,))
    return monitor.last


def bubble(setting: Setting) -> None:
    """Bubble by schedule. Ranks of one GPU share it: what counts is that every number is there and in range."""
    for schedule in ("1f1b", "eager_1f1b", "auto_1f1b"):
        last = on_ranks(setting.stages, bubbles, setting, schedule)[0]
        print(f"bubble {schedule} M=16: {last['pipeline/bubble_fraction']:.3f}")


def shared_time(setting: Setting) -> tuple[float, float]:
    """Seconds in which transfers run on this rank's device, and those of them in which it computes too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train(setting, 32, {"microbatches": 16, "schedule": "eager_1f1b"})
    kernels = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    spans: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for event in kernels:
        spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    both = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans[1] for begin, end in spans[0])
    return sum(stop - start for start, stop in spans[1]) / 1e6, both / 1e6


def overlap(setting: Setting) -> None:
    """How much of the transfers' time lies under computation, by the profiler's kernels."""
    if setting.device != "cuda" or setting.backend != "nccl":
        print("overlap: kernels of transfers exist with NCCL only")
        return
    for rank, (transfers, under) in enumerate(on_ranks(setting.stages, shared_time, setting)):
        print(f"overlap rank {rank}: transfers {transfers:.3f} s, of which {under:.3f} s beside computation")


PARTS: tuple[Callable[[Setting], None], ...] = (numerics, memory, overhead, host, bubble, overlap)


def works(setting: Setting) -> bool:
    """Whether the backend carries messages between ranks of this machine."""
    try:
        on_ranks(setting.stages, losses, setting, {"microbatches": 4}, "32-true")
    except AssertionError as error:
        print(f"{setting.backend} does not run here: {str(error).strip().splitlines()[-1]}")
        return False
    return True


def main(arguments: list[str] | None = None) -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=[part.__name__ for part in PARTS])
    given = parser.parse_args(arguments)
    is_gpu = given.device == "cuda"
    sizes = (1024, 8, 512, 8) if is_gpu else (32, 4, 16, 4)
    setting = Setting(given.device, "nccl" if is_gpu else "gloo", given.stages, *sizes)
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, {given.stages} stages")
    if is_gpu and not works(setting):
        setting = Setting(given.device, "gloo", given.stages, *sizes)
    for part in PARTS:
        if part.__name__ not in given.parts:
            continue
        start = time.perf_counter()
        try:
            part(setting)
        except Exception:  # the other parts are worth their time
            traceback.print_exc()
        print(f"{part.__name__}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
