"""The faults: each is planted in the middle of a run of three ranks, and what must be printed for it."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineStrategy
from lightning_pp.launch import watcher
from lightning_pp.runtime.flush import Flush
from tests.faults import disk
from tests.faults.processes import Job, plant
from tests.training import QUIET

SIZE = 3
#: the batch in which it happens
WHEN = 3


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


class Fault:
    """Happens on one rank at one place of one batch; one instance is in every process."""

    batch = -1
    is_done = False
    folder = Path()

    def __init__(self, where: str, who: int, what: Callable[[], Any]) -> None:
        self.where, self.who, self.what = where, who, what

    def __call__(self, where: str) -> None:
        if where == self.where and rank() == self.who and self.batch == WHEN and not self.is_done:
            self.is_done = True
            plant()
            self.what()


class Passing(torch.autograd.Function):
    """Passes everything on; the fault may come in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fault("backward")
        return grad, None


#: what a layer may do to its output in one batch only
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"dtype": Tensor.float, "shape": lambda x: x[:, :6]}


class Layer(nn.Linear):
    def __init__(self, fault: Fault) -> None:
        super().__init__(7, 7)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not while it is planned
            self.fault("forward")
        changes = self.fault.where in CHANGES and x.dtype == torch.float64 and self.fault.batch == WHEN
        if changes:
            plant()
        x = Passing.apply(super().forward(x.double()), self.fault).tanh()
        return CHANGES[self.fault.where](x) if changes else x


class Samples(Dataset[Any]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 55

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 5 * WHEN + 2 and self.fault.where == "dataset" and rank() == self.fault.who:
            plant()
            self.fault.what()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(7, generator=generator).double(), torch.randn(2, generator=generator).double()


class Model(LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.blocks = nn.ModuleList(Layer(fault) for _ in range(SIZE))
        self.head = nn.Linear(7, 2)
        if fault.what in (fill_the_disk, limit_files):
            self.ballast = nn.Parameter(torch.zeros(30_000))  # lies on the last stage, as no layer needs it

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        x = self.head(x.double())
        self.fault("loss")
        loss = F.mse_loss(x, y)
        if self.fault.where == "nan" and self.fault.batch == WHEN:
            plant()
            loss = loss * (x - x.detach()).sum().sqrt()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        fault = self.fault

        class SGD(torch.optim.SGD):
            def step(self, *args: Any, **kwargs: Any) -> Any:
                result = super().step(*args, **kwargs)
                fault("optimizer")
                return result

        return SGD(self.parameters(), lr=0.1)


class Clock(Callback):
    """Tells the fault which batch it is, and is a place for one."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        Fault.batch = trainer.fit_loop.total_batch_idx
        self.fault("callback")


def train(fault: Fault, folder: str, timeout: float = 60, trainer: Any = None, distributed: bool = False) -> None:
    """The script of every case."""
    Fault.folder = Path(folder)
    torch.manual_seed(3)
    watcher._GRACE = 2.0
    keeper = ModelCheckpoint(folder, filename="kept", every_n_train_steps=2, save_top_k=1)
    share, write = Flush.share, torch.save

    def shared(self: Flush, *args: Any) -> Any:
        fault("flush")
        return share(self, *args)

    def written(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        write(content, file, *args, **kwargs)
        fault("save")

    Flush.share, torch.save = shared, written  # type: ignore[method-assign, assignment]
    strategy = PipelineStrategy(
        stages=SIZE, microbatches=3, split=["blocks.1", "blocks.2"], timeout=timedelta(seconds=timeout),
        save_distributed_checkpoint=distributed,
    )  # fmt: skip
    loader = DataLoader(Samples(fault), batch_size=5, num_workers=int(fault.where == "dataset"))
    Trainer(
        accelerator="cpu", devices=SIZE, max_epochs=1, precision="64-true", strategy=strategy,
        callbacks=[Clock(fault), keeper, OnExceptionCheckpoint(folder)],
        **{**QUIET, "enable_checkpointing": True, **(trainer or {})},
    ).fit(Model(fault), loader)  # fmt: skip


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("planted")


def hang() -> None:
    while True:
        time.sleep(1)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 20 GiB (planted)")


def run_out_of_host_memory() -> None:
    raise MemoryError("planted")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def wait_for_the_terminal() -> None:
    time.sleep(0.5)  # the signal comes meanwhile, from outside


def fill_the_disk() -> None:
    disk.fill(Fault.folder.parent)


def limit_files() -> None:
    """No file gets larger than that, as where a quota is used up."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        text: What must be printed.
        where: Place of the fault.
        who: Rank.
        what: What happens there.
        kept: Checkpoints that are left.
        limit: Seconds after which all ranks must be gone.
        distributed: Whether each rank saves its own part, to a folder.
        full: Whether it happens on a small disk.
        advice: What must be printed, too.
    """

    text: str
    where: str
    who: int
    what: Callable[[], Any]
    tracebacks: int = 0
    kept: tuple[str, ...] = ("kept.ckpt",)
    limit: float = 15.0
    everywhere: Any = None
    timeout: float = 60.0
    trainer: tuple[tuple[str, Any], ...] = ()
    distributed: bool = False
    full: bool = False
    advice: str = ""


GONE = "No rank has said why"
STALL = "One rank waits for no other. rank 1: stalled in 1F0 at faults/cases.py"
CHANGED = "What crosses from stage 0 to 1 changed between micro-batches of the same shapes: first [2, 7] torch.float64"
INSIDE = "do such work inside a layer, and let what it returns keep its shape and dtype"
CASES = {
    "killed in a forward": Case(GONE, "forward", 1, kill),
    "killed in a backward": Case(GONE, "backward", 1, kill),
    "killed before the flush": Case(GONE, "flush", 2, kill),
    "rank 0 killed in a forward": Case(GONE, "forward", 0, kill),
    "killed while it saves": Case(
        "Rank 0 has ended while rank 1 waited for it", "save", 0, kill, kept=(".kept.ckpt.partial", "kept.ckpt")
    ),
    "raises in a layer": Case(
        "failed in 1F0 in layer 'blocks.1', micro-batch 0: ValueError: planted", "forward", 1, fail, 1
    ),
    "raises in a backward": Case(
        "(stage 0) failed in 0B0, micro-batch 0: ValueError: planted", "backward", 0, fail, 1
    ),
    "raises in the loss": Case(
        "Rank 2 (stage 2) failed in 2F0, micro-batch 0: ValueError: planted", "loss", 2, fail, 1
    ),
    "raises in a dataset's worker": Case("Caught ValueError in DataLoader worker process 0", "dataset", 1, fail, 1),
    "raises in a callback": Case("ValueError: planted", "callback", 0, fail, 1),
    "raises in the optimizer": Case("ValueError: planted", "optimizer", 2, fail, 1),
    "stalls in a layer": Case(STALL, "forward", 1, hang, limit=25, timeout=5),
    "stalls in a dataset": Case("rank 2: stalled in no op at", "callback", 2, hang, limit=25, timeout=5),
    "device out of memory": Case(
        "Rank 1 (stage 1) failed in 1F0 in layer 'blocks.1', micro-batch 0: OutOfMemoryError: tried to",
        "forward", 1, run_out_of_memory, 1,
    ),
    "host out of memory": Case(
        "failed in 2F0 in layer 'blocks.2', micro-batch 0: MemoryError", "forward", 2, run_out_of_host_memory, 1
    ),
    "not a number, looked for": Case(
        "returned nan values in its", "nan", 2, fail, 1, trainer=(("detect_anomaly", True),)
    ),
    "disk full": Case(
        "[rank 1] The pipeline was stopped by rank 0: OSError: [Errno 28] No space left on device",
        "callback", 0, fill_the_disk, 1, full=True,
    ),
    "disk full, folder": Case(
        "OSError: rank 0: OSError: [Errno 28] No space left on device",
        "callback", 0, fill_the_disk, 1, full=True, distributed=True,
    ),
    "file too large": Case(
        "[rank 1] The pipeline was stopped by rank 0: OSError: [Errno 27] File too large", "callback", 0, limit_files, 1
    ),
    "file too large, folder": Case(
        "OSError: rank 2: OSError: [Errno 27] File too large", "callback", 2, limit_files, 1, distributed=True
    ),
    "Ctrl-C for all ranks": Case(
        "Stopping after this batch", "callback", 0, wait_for_the_terminal, kept=("kept.ckpt", "on_exception.ckpt"),
        everywhere=signal.SIGINT,
    ),
    "Ctrl-C for one rank": Case(
        "Detected KeyboardInterrupt", "forward", 1, interrupt, kept=("kept.ckpt", "on_exception.ckpt")
    ),
    "a dtype that changes": Case(CHANGED, "dtype", 0, fail, 1, advice=INSIDE),
    "a shape that changes": Case(CHANGED, "shape", 0, fail, 1, advice=INSIDE),
}  # fmt: skip


def run_case(name: str, folder: str) -> None:
    """What each rank does."""
    case = CASES[name]
    train(Fault(case.where, case.who, case.what), folder, case.timeout, dict(case.trainer), case.distributed)


@contextmanager
def job_of(name: str, folder: Path) -> Iterator[tuple[Job, Path]]:
    """The case as a job, and the folder in which its checkpoints are, as seen from here."""
    case = CASES[name]
    with ExitStack() as stack:
        place = folder / "disk"
        holder = stack.enter_context(disk.small_disk(place)) if case.full else None
        found = (disk.seen_by(holder, place) if holder is not None else folder) / "saved"
        found.mkdir()
        args = name, str((place if case.full else folder) / "saved")
        yield Job(folder, run_case, SIZE, args, 100, case.everywhere, holder), found


def names_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))
