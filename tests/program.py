"""A training script as a user would start it, told what to do by one JSON argument; each rank prints what it saw.

``python tests/program.py '{"trainer": {"devices": 2}, "strategy": {"stages": 2}}'``
"""

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = "RESULT "


def train(options: dict[str, Any]) -> dict[str, Any]:
    """One Trainer and one fit: where this process stood, each batch's loss, and the parameters it holds.

    Args:
        options: ``strategy`` (arguments, a registered name, or nothing for the plain run), ``trainer`` (arguments),
            ``pause`` (seconds between batches), ``fits`` (how often to fit the same Trainer, with one epoch more
            each time), ``checkpoint`` (to resume from), ``replicas`` (pipelines side by side; the plain run takes their
            batches together), ``rescue`` (a folder to save in when training ends early),
            ``save`` (a file to save in at the end).
    """
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from lightning_pp import PipelineStrategy
    from tests.models import MLP
    from tests.test_replicas import UnionLoader

    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(outputs["loss"].item())
            if options.get("pause"):
                say(f"batch {trainer.global_step} pid {os.getpid()} rank {trainer.global_rank}")
                time.sleep(options["pause"])

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(options.get("seed", 0))
    strategy = options.get("strategy", "auto")
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=PipelineStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        callbacks=[Losses(), *([OnExceptionCheckpoint(options["rescue"])] if "rescue" in options else [])],
        **{"devices": 1, "max_epochs": 2, "enable_checkpointing": "rescue" in options, **options.get("trainer", {})},
    )
    module = MLP()
    replicas = options.get("replicas")
    loader = UnionLoader("MLP", replicas, 4, 22, strategy == "auto")() if replicas else MLP.loader()
    for more in range(options.get("fits", 1)):
        trainer.fit_loop.max_epochs += 1 if more else 0
        trainer.fit(module, loader, ckpt_path=options.get("checkpoint"))
    if "save" in options:
        trainer.save_checkpoint(options["save"])
    place = trainer.strategy
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "node": trainer.node_rank,
        "stage": getattr(place, "stage_index", 0),
        "replica": getattr(place, "data_parallel_rank", 0),
        "losses": losses,
        "parameters": {n: p.detach().sum().item() for n, p in module.named_parameters() if not p.is_meta},
    }


def say(line: str) -> None:
    """Write one whole line: the processes share a pipe."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    runs = json.loads(sys.argv[1])
    for options in runs if isinstance(runs, list) else [runs]:
        say(MARK + json.dumps(train(options)))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
