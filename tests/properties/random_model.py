"""A LightningModule made from a description in plain data: blocks of many kinds, wired at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.properties.random_blocks import KINDS, WIDTH, Parcel


@dataclass(frozen=True)
class BlockSpec:
    """A module: what it is, where it hangs, whether it is frozen, and whose weight it shares."""

    kind: str
    place: str = "list"
    frozen: bool = False
    tied_to: int | None = None


@dataclass(frozen=True)
class NodeSpec:
    """One call: of which block, on which earlier values, and what the code around it does.

    Attributes:
        around: Which gradient checkpoint of the user's runs the call: none, of either kind, of the block or of all.
        by_name: Whether the block gets its arguments as keywords.
    """

    block: int
    first: int
    second: int
    before: str = "nothing"
    after: str = "nothing"
    no_grad: bool = False
    around: str = "nothing"
    by_name: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """The whole model.

    Attributes:
        turns: The block that is frozen, or trained again, from the second epoch on.
    """

    blocks: tuple[BlockSpec, ...]
    nodes: tuple[NodeSpec, ...]
    supervised: tuple[int, ...] = ()
    logged: tuple[int, ...] = ()
    returns: str = "tensor"
    as_dict: bool = False
    keeps: bool = False
    optimizer: str = "sgd"
    samples: int = 7
    batch_size: int = 4
    turns: int | None = None

    @property
    def draws(self) -> bool:
        """Whether the numbers differ from those of the plain Trainer, which draws all from one stream."""
        used = {node.block for node in self.nodes}
        return any(self.blocks[block].kind == "dropout" for block in used) or any(
            node.after == "dropout" for node in self.nodes
        )


#: gradient checkpoints of the user's, round a whole call, and round blocks that give one tensor
CHECKPOINTS = ("checkpoint", "reentrant")
BLOCK_CHECKPOINTS = ("checkpointed block", "reentrant block")
NO_TENSOR = frozenset({"pair", "dict", "parcel"})

#: what the code in front of a call does with its first value
BEFORE: dict[str, Callable[[RandomModel, Tensor, Tensor], Tensor]] = {
    "nothing": lambda model, x, other: x,
    "flip": lambda model, x, other: x.flip(-1),
    "parameter": lambda model, x, other: x + model.offset,
    "buffer": lambda model, x, other: x * model.factors,
    "sum": lambda model, x, other: x + 0.5 * other,
    "chunk": lambda model, x, other: torch.cat(x.chunk(2, dim=1)[::-1], 1),
    "permute": lambda model, x, other: x.t().contiguous().t(),
    "copy": lambda model, x, other: x.clone(),
}
#: what it does with the result; writes go into a value that nothing has been computed from yet
AFTER: dict[str, Callable[[RandomModel, Tensor, Tensor], Tensor]] = {
    "nothing": lambda model, h, x: h,
    "residual": lambda model, h, x: h + x,
    "detach": lambda model, h, x: h.detach() + x,
    "tanh": lambda model, h, x: torch.tanh(h),
    "dropout": lambda model, h, x: F.dropout(h, 0.2, model.training),
    "written": lambda model, h, x: (h * 1.0).add_(x).clamp_(-3, 3),
    "added in place": lambda model, h, x: h.add_(x.detach()),
    "where": lambda model, h, x: torch.where(x > 0, h, 0.5 * h),
    "hook": lambda model, h, x: _hooked(h),
}
#: kinds whose result may be written into: their backward does not need it
WRITABLE = frozenset({"linear", "slice", "normed"})


def _hooked(h: Tensor) -> Tensor:
    """A reentrant checkpoint gives an argument that it does not use None for a gradient, and hooks see that."""
    if h.requires_grad:
        h.register_hook(lambda gradient: None if gradient is None else gradient * 0.5)
    return h


class RandomModel(LightningModule):
    """The model that ``spec`` describes, as its user would have written it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList()
        self.by_name = nn.ModuleDict()
        self._paths: list[Callable[[], nn.Module]] = []
        self.offset = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.register_buffer("factors", torch.linspace(0.5, 1.5, WIDTH))
        for number, block in enumerate(spec.blocks):
            self._place(number, block)
        self.head = nn.Linear(WIDTH, 3)

    def _place(self, number: int, block: BlockSpec) -> None:
        module = KINDS[block.kind]()
        if block.tied_to is not None:
            module.linear.weight = self.block(block.tied_to).linear.weight  # type: ignore[union-attr]
        if block.frozen:
            module.requires_grad_(False)
        if block.place == "list":
            self.blocks.append(module)
            place, key = "blocks", len(self.blocks) - 1
            self._paths.append(lambda: getattr(self, place)[key])
        elif block.place == "dict":
            self.by_name[f"b{number}"] = module
            self._paths.append(lambda: self.by_name[f"b{number}"])
        else:
            setattr(self, f"block{number}", module)
            self._paths.append(lambda: getattr(self, f"block{number}"))

    def block(self, number: int) -> Any:
        return self._paths[number]()

    def step(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, ids = (batch[key] for key in ("x", "y", "ids")) if self.spec.as_dict else batch[:3]
        values = [x]
        for number, node in enumerate(self.spec.nodes):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not node.no_grad):
                values.append(self._checkpointed(node, values[node.first], values[node.second], ids))
            if number in self.spec.logged:
                self.log(f"node{number}", values[-1].mean(), on_step=False, on_epoch=True)
        loss = F.mse_loss(self.head(values[-1]), y)
        for number in self.spec.supervised:
            loss = loss + 0.1 * (values[number + 1] ** 2).mean()
        if self.spec.keeps:
            self.last_hidden = values[-1].detach()
        return loss, values[-1]

    def _checkpointed(self, node: NodeSpec, first: Tensor, other: Tensor, ids: Tensor) -> Tensor:
        if node.around not in ("checkpoint", "reentrant"):
            return self._call(node, first, other, ids)
        return checkpoint(  # type: ignore[no-any-return]
            partial(self._call, node), first, other, ids, use_reentrant=node.around == "reentrant"
        )

    def _call(self, node: NodeSpec, first: Tensor, other: Tensor, ids: Tensor) -> Tensor:
        x = BEFORE[node.before](self, first, other)
        block = self.block(node.block)
        if node.around in ("checkpointed block", "reentrant block"):
            block = partial(checkpoint, block, use_reentrant=node.around == "reentrant block")
            h = block(x, other, ids, True)
        elif node.by_name:
            h = block(other=other, flag=True, x=x, ids=ids)
        else:
            h = block(x, other, ids, flag=True)
        if isinstance(h, Parcel):
            h = h.hidden + 0.1 * h.extra["count"][:, None]
        elif isinstance(h, dict):
            h = torch.where(h["positive"], h["hidden"], 0.3 * h["hidden"])
        elif isinstance(h, tuple):
            h = h[0] + 0.1 * h[1][0][:, None]
        return AFTER[node.after](self, h, first)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.spec.turns is not None:
            self.block(self.spec.turns).requires_grad_(self.spec.blocks[self.spec.turns].frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, hidden = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if self.spec.returns == "tensor":
            return loss
        return {"loss": loss, "hidden": hidden.detach(), "scale": 2.0, "name": "step"}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch)[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad or self.spec.turns is not None]
        if self.spec.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        # a gradient that is nothing but rounding must not become a whole step
        return torch.optim.AdamW(trained, lr=0.02, eps=1e-2, weight_decay=0.01)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.spec), batch_size=self.spec.batch_size)


class Samples(Dataset[Any]):
    """Inputs in float32, targets in float64, whole numbers and truth values."""

    def __init__(self, spec: ModelSpec) -> None:
        source = torch.Generator().manual_seed(11)
        number = spec.samples
        self.x = torch.randn(number, WIDTH, generator=source, dtype=torch.float32)
        self.y = torch.randn(number, 3, generator=source, dtype=torch.float64)
        self.ids = torch.randint(0, 5, (number,), generator=source)
        self.as_dict = spec.as_dict

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        mask = self.x[index] > 0
        if self.as_dict:
            return {"x": self.x[index], "y": self.y[index], "ids": self.ids[index], "mask": mask}
        return self.x[index], self.y[index], self.ids[index], mask
