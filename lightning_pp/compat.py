"""The names of Lightning that have no public spelling, each used for one thing; a test tells when one moves."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

__all__: list[str] = []


def script_launcher(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> Any:
    """Checks the cluster's settings and starts the script again for this node's other ranks, unless others do."""
    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


def dead_child(launcher: Any) -> str | None:
    """Says which of the processes that ``launcher`` has started was killed, if any."""
    for local_rank, process in enumerate(getattr(launcher, "procs", ()), start=1):
        code = process.poll()
        if code is not None and code < 0:
            advice = " (the system does that where memory runs out)" if code == -9 else ""
            return f"local rank {local_rank}: its process was killed by signal {-code}{advice}"
    return None


def batches_begun(trainer: Trainer) -> tuple[int, ...]:
    """How many batches each loop has begun; differs as soon as the Trainer has got on."""
    fit = trainer.fit_loop
    loops: list[Any] = [fit.epoch_loop, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    return tuple(loop.batch_progress.total.ready for loop in [*loops, trainer.predict_loop])


class SignalActions:
    """What Lightning does on a signal, to be done at another time."""

    def __init__(self, trainer: Trainer) -> None:
        self._connector = trainer._signal_connector
        self._trainer = trainer

    def replace_handlers(self, on_stop: Callable[[int], None], on_requeue: Callable[[int], None]) -> None:
        """Call these in place of Lightning's handlers, from the run that is about to begin."""
        vars(self._connector).update(
            _sigterm_notifier_fn=lambda signum, _: on_stop(signum),
            _slurm_sigusr_handler_fn=lambda signum, _: on_requeue(signum),
        )
        # newer versions share rank 0's signals before each batch, for which a GPU must have finished the last one
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        epoch_loop._broadcast_sigterm_tensor = lambda: None

    def tell_children(self, signum: int) -> None:
        """Pass a signal on to the processes that this one has started."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)

    def stop(self) -> None:
        """End the run after the batch that has just been done."""
        self._connector.received_sigterm = True

    def requeue(self, signum: int) -> None:
        """Save a checkpoint and ask SLURM to run the job again."""
        handler: Any = type(self._connector)._slurm_sigusr_handler_fn
        handler(self._connector, signum, None)


def connect_processes(
    environment: ClusterEnvironment, backend: str, store: Any, timeout: timedelta, device: torch.device
) -> None:
    """Make the job's default process group by way of ``store``."""
    device_id = device if device.type != "cpu" else None
    _init_dist_connection(environment, backend, store=store, timeout=timeout, device_id=device_id)


def is_sequential(combined: Any) -> bool:
    """Whether a ``CombinedLoader`` gives the batches of one loader after those of another, and not together."""
    return bool(combined._mode == "sequential")


def combined_loader(loop: Any) -> Any:
    """The loop's loaders as one; None before they are set up."""
    return loop._combined_loader


def load_loader_states(trainer: Trainer) -> None:
    """Give loaders the states that a checkpoint has brought since they were set up."""
    trainer.fit_loop._load_combined_loader_states()


def takes_iterator(trainer: Trainer) -> bool:
    """Whether training_step wants the loader's iterator itself."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def prepare_batch(trainer: Trainer, module: LightningModule, batch: Any, to_device: Callable[..., Any]) -> Any:
    """Send a batch through the hooks that the loop sends it through before the step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return to_device(batch, dataloader_idx=0)


def step_and_loop(trainer: Trainer) -> tuple[str, Any]:
    """The step function that this run is about, and the loop that feeds it."""
    return {
        TrainerFn.FITTING: ("training_step", trainer.fit_loop),
        TrainerFn.VALIDATING: ("validation_step", trainer.validate_loop),
        TrainerFn.TESTING: ("test_step", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict_step", trainer.predict_loop),
    }[trainer.state.fn]  # type: ignore[index]


def step_arguments(module: LightningModule, name: str, batch: Any, num_loaders: int) -> list[Any]:
    """What Lightning will call step function ``name`` with for the first batch."""
    arguments = [batch]
    if is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2):
        arguments.append(0)
    if name != "training_step" and num_loaders > 1:
        arguments.append(0)
    return arguments


def evaluation_batch(trainer: Trainer) -> int:
    """The number of the evaluation batch under way, for its random stream."""
    loop = trainer._active_loop
    return int(loop.batch_progress.total.ready) if loop is not None and hasattr(loop, "batch_progress") else 0


def logged_metrics(trainer: Trainer) -> list[Metric]:
    """The metric objects whose values Lightning will ask for at the end of this epoch, in its order."""
    results = trainer._results
    if results is None:
        return []
    logged = [result for _, result in results.valid_items() if not result.is_tensor and result.meta.on_epoch]
    return [result.value for result in logged if result._computed is None]


def averaged_model(callback: Callback) -> nn.Module | None:
    """The copy of the module that a callback averages; None where it keeps none."""
    average = vars(callback).get("_average_model")
    if isinstance(average, AveragedModel):
        return average.module
    return average if isinstance(average, nn.Module) else None


def throughputs(monitor: ThroughputMonitor) -> list[Any]:
    """What a monitor computes throughput with."""
    return list(monitor._throughputs.values())


def replace_summary(callback: ModelSummary, make: Callable[[Trainer, LightningModule], Any]) -> None:
    """Let ``callback`` show the summary that ``make`` gives."""
    vars(callback)["_summary"] = make


def summary_depth(callback: ModelSummary) -> int:
    """Down to which depth layers are shown."""
    return callback._max_depth


def example_input(module: LightningModule) -> Any:
    """The module's ``example_input_array``, on the device."""
    example = module._on_before_batch_transfer(module.example_input_array)
    return module._apply_batch_transfer_handler(example)


def watches(trainer: Trainer, module: LightningModule, *hooks: str) -> bool:
    """Whether the module or a callback defines one of ``hooks``."""
    return any(
        is_overridden(hook, module)
        or any(getattr(type(c), hook, None) is not getattr(Callback, hook, None) for c in callbacks(trainer))
        for hook in hooks
    )


def callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's list of callbacks itself."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def is_window_start(trainer: Trainer) -> bool:
    """Whether zero_grad follows this training step (see ``_AutomaticOptimization._make_zero_grad_fn``)."""
    return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0


#: what a strategy returns for a training step that has returned None
LEFT_OUT = object()


class _Result(ClosureResult):
    """Lets a batch be left out where Lightning refuses to, since the processes of one pipeline agree on it."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if training_step_output is LEFT_OUT:
            return cls(closure_loss=None)
        return super().from_training_step_output(training_step_output, normalize)


def let_batches_be_left_out(trainer: Trainer) -> None:
    """Take ``LEFT_OUT`` from the strategy for None, which Lightning does not take from one of several processes."""
    trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls = _Result


def skips_backward(trainer: Trainer) -> bool:
    """Whether the gradients of this training step are not wanted (a callback looks at the batches once more)."""
    return bool(trainer.fit_loop._skip_backward)


def is_window_end(trainer: Trainer) -> bool:
    """Whether the optimizer steps after this training step."""
    return not trainer.fit_loop._should_accumulate()


def silence_sync_dist_advice() -> None:
    """Logged values are equal on all stages already, so Lightning's advice to synchronise them would mislead."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")


def is_running(module: LightningModule | None) -> bool:
    """Whether a Trainer is at work on ``module``."""
    trainer = module._trainer if module is not None else None
    return trainer is not None and trainer.state.status == TrainerStatus.RUNNING


def is_overridden(name: str, module: LightningModule) -> bool:
    """Whether the user's class (or instance) defines ``name`` itself."""
    return getattr(type(module), name, None) is not getattr(LightningModule, name) or name in vars(module)


def is_interrupted(module: LightningModule | None) -> bool:
    """Whether the run of ``module`` has failed, and the hooks that follow from it are under way."""
    trainer = module._trainer if module is not None else None
    return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED


def give_base_io(io: CheckpointIO, base: CheckpointIO) -> None:
    """Let a plugin that wraps another one (``AsyncCheckpointIO``) wrap ``base``, unless it has been given one."""
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = base


def loads_weights_only_by_default() -> bool | None:
    """What Lightning hands to ``torch.load`` where the user says nothing; newer versions leave it to torch."""
    return None if "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters else False
