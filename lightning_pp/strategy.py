"""The Lightning side: processes, hooks and state.

What runs when is decided in ``schedule``, what is cut in ``partition``, and both are carried out by ``runtime``; this
file says at which of Lightning's hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pp import checks, compat, data
from lightning_pp.adapters import trainer as adapters
from lightning_pp.arguments import Arguments
from lightning_pp.depth import DepthChooser
from lightning_pp.launch import failure, signals
from lightning_pp.optimization import precision
from lightning_pp.optimization.optimizing import OptimizingProcesses
from lightning_pp.pipeline import Pipeline
from lightning_pp.runtime.comm import job_store
from lightning_pp.runtime.rng import run_seed
from lightning_pp.schedule import AUTO
from lightning_pp.steps import kept
from lightning_pp.steps.jobs import Prepared
from lightning_pp.weights.materialise import Construction
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []


class PipelineStrategy(OptimizingProcesses):
    """Trains a LightningModule, as it is, in pipeline stages over several processes.

    Every process runs the module's own ``training_step`` with the layers of other stages switched off, on one
    micro-batch after the other in the order of a schedule (1F1B: PipeDream-Flush, Narayanan et al. 2021,
    arXiv:2006.09503, section 3). The result equals the run on one device.

    Args:
        stages: Pipeline depth in processes; ``"auto"`` takes all of them.
        microbatches: Most micro-batches that a batch is cut into along dim 0; None means ``4 * stages``. A batch with
            fewer samples gives one per sample.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"eager_1f1b"``; ``"1f1b+1"`` or ``"1f1b+2,1,0"`` for extra micro-batches in
            flight, on every rank or by rank; ``"auto_1f1b"``, which chooses them by measured times; or the path of a
            CSV file (one row of ops per rank).
        interleave: Model chunks per rank; this version has 1 only.
        layers: What is never cut inside: classes, their import paths, or module names. None finds the blocks of
            ``ModuleList`` and ``Sequential`` and the modules with parameters beside them.
        split: Names of the layers that begin stages 1, 2, ...; None balances the stages.
        balance: What stages are balanced by: ``"flops"``, ``"params"``, ``"time"`` (measured on the device) or
            ``"memory"`` (weights, gradients, optimizer and activations in flight).
        activation_checkpointing: True, or the classes (or their import paths or names) of the layers whose activations
            are recomputed in the backward pass.
        save_distributed_checkpoint: Let every rank save its own part to a folder rather than rank 0 one ordinary file.
        process_group_backend: ``"gloo"`` or ``"nccl"``; None takes NCCL for CUDA devices and Gloo for others.
        timeout: How long a rank waits for another.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is of the wrong type.

    Example:
        >>> strategy = PipelineStrategy(stages=2, microbatches=8)
        >>> strategy = PipelineStrategy(microbatches=0)
        Traceback (most recent call last):
        ...
        ValueError: microbatches=0: allowed is None or an int of at least 1.
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        stages: int | Literal["auto"] = "auto",
        microbatches: int | None = None,
        schedule: str = "1f1b",
        interleave: int = 1,
        layers: Sequence[str | type[nn.Module]] | None = None,
        split: Sequence[str] | None = None,
        balance: Literal["flops", "params", "time", "memory"] = "flops",
        activation_checkpointing: bool | Sequence[str | type[nn.Module]] = False,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if interleave != 1:
            raise ValueError(f"interleave={interleave}: this version has schedules with one chunk per rank; use 1.")
        super().__init__(
            Arguments(
                stages, microbatches, schedule, layers, split, balance, activation_checkpointing,
                process_group_backend, timeout,
            ),
            save_distributed_checkpoint,
        )  # fmt: skip
        self._pipeline: Pipeline | None = None
        self._depth: DepthChooser | None = None
        self._is_cutting = False
        self._construction = Construction()

    # -- start-up ---------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The cut model and what runs it; raises before ``setup``."""
        if self._pipeline is None:
            raise RuntimeError("The model is cut into stages when the Trainer starts to fit, validate or test.")
        return self._pipeline

    @property
    @override
    def is_planning(self) -> bool:
        return self._pipeline is not None and self._pipeline.is_planning

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules without their memory, in ``configure_model`` and under ``init_module(empty_init=True)``."""
        in_hook = empty_init is None and compat.is_running(self.lightning_module)
        if in_hook:
            data.share_random_state(self._host_group, 0)
        if not (in_hook or empty_init):
            with super().tensor_init_context(empty_init):
                yield
            return
        with self._construction.building(self.root_device), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self._module()
        checks.check_copies(module.trainer, module)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._prepare_checkpoints()
        module = self._module()
        fitting = trainer.state.fn == TrainerFn.FITTING
        checks.check_run(trainer, module, self.num_stages, self.data_parallel_size)
        with self._construction.following():
            self.model = self.precision_plugin.convert_module(module)
        data.share_random_state(self._host_group, 0)
        if self.world_size > 1:
            signals.install(trainer, self._host_group)
        if Ownership.of(module) is None:
            self._construction.complete(module, self.broadcast(run_seed()))
        if fitting:
            with self._construction.following():
                self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, self.num_stages)
        self._cut(trainer, module)
        self._load_waiting_state()
        self._construction.refuse_unset(module)
        self.setup_precision_plugin()

    def _cut(self, trainer: Trainer, module: LightningModule) -> None:
        """Cut the model by the first batch that the loop will see."""
        self._pipeline = pipeline = Pipeline(module, self.arguments, self.mesh, self.root_device, self.groups)
        name, loop = compat.step_and_loop(trainer)
        self._is_cutting = True
        loop.setup_data()
        self._is_cutting = False
        if name == "training_step":
            checks.check_takes_batches(trainer, module)
        combined = compat.combined_loader(loop)

        def first_arguments() -> list[Any]:
            batch = compat.prepare_batch(trainer, module, data.first_batch(combined), self.batch_to_device)
            return compat.step_arguments(module, name, batch, len(combined.flattened))

        has_data = combined is not None and bool(combined.flattened)
        first = first_arguments if has_data else None
        pipeline.cut(name, first, precision.step_context(self.precision_plugin), self.optimizers, self._construction)
        if name == "training_step":
            self._depth = None
            if self.arguments.schedule == AUTO:
                self._depth = DepthChooser(pipeline, self.num_stages, self.root_device)
            checks.warn_about_batch_norm(module, self.arguments.num_microbatches(self.num_stages), rank_zero_warn)
            self._agree_on_steps(pipeline)
        callbacks = compat.callbacks(trainer)
        callbacks[:] = [c for c in callbacks if not isinstance(c, (data.SameRandomState, kept.SharesKeptValues))]
        if self.num_stages > 1:
            callbacks.insert(0, data.SameRandomState(pipeline.host_group, self.mesh.global_rank(0)))
            callbacks.insert(0, kept.SharesKeptValues(self._share_kept_values))
        adapters.install(trainer, module, self.mesh, lambda: self.pipeline, self.whole_state_dict)

    def _share_kept_values(self) -> None:
        pipeline = self.pipeline
        last = self.mesh.global_rank(self.num_stages - 1)
        with self._explaining():
            pipeline.runner.kept.share(pipeline.host_group, last, self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        processes = self if self.world_size > 1 else None
        return data.StageLoader(dataloader, self.data_parallel_rank, self._is_cutting, processes)

    @override
    def model_to_device(self) -> None:
        self.pipeline.ownership.to_device(self.root_device)

    # -- steps ------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explaining():
            return self._train((*args, *kwargs.values()))

    def _train(self, args: tuple[Any, ...]) -> Any:
        module, pipeline = self._module(), self.pipeline
        trainer = module.trainer
        window_start = compat.is_window_start(trainer)
        # what this batch makes must not be in .grad yet where zero_grad follows, or where a hook looks at it
        skips = compat.skips_backward(trainer)
        held_back = skips or window_start or compat.watches(trainer, module, "on_before_backward")
        keeps_old = not window_start or compat.watches(trainer, module, "on_before_zero_grad", "optimizer_zero_grad")
        if self._depth is not None:
            self._depth.before_step()
        pipeline.begin_step(trainer.fit_loop.total_batch_idx)
        step = pipeline.runner.prepare(
            "training_step",
            args,
            precision.step_context(self.precision_plugin),
            trainer.fit_loop.total_batch_idx,
            trainer.accumulate_grad_batches,
        )
        if step.is_left_out:
            pipeline.forget_step()
            self._run(step)
            return compat.LEFT_OUT
        if self._depth is not None:
            self._depth.job = step.job
        step.job.backward_done = pipeline.gradients.backward_done
        step.job.loss_scaling = precision.loss_scaling(self.precision_plugin)
        pipeline.gradients.start(
            held_back,
            keep_old=keeps_old or skips,
            averages=self.data_parallel_size > 1 and compat.is_window_end(trainer) and not skips,
            is_whole=window_start or not held_back,
        )
        pipeline.mark("prepare")
        with pipeline.runner.running(step):
            results = pipeline.engine.run(step.job)
        pipeline.gradients.finish(held_back, keep=not skips)
        pipeline.mark("reduce")
        output = pipeline.runner.finish(step, results)
        pipeline.mark("share")
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runner = self.pipeline.runner
        number = compat.evaluation_batch(self._module().trainer)
        with self._explaining():
            context = precision.step_context(self.precision_plugin)
            return self._run(runner.prepare(name, (*args, *kwargs.values()), context, number))

    def _run(self, step: Prepared) -> Any:
        """Run a step that trains nothing."""
        with self.pipeline.runner.running(step):
            results = self.pipeline.engine.run(step.job)
        return self.pipeline.runner.finish(step, results)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradients that the pipeline has made, between the hooks that surround a backward pass."""
        module = self._module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.pipeline.gradients.hand_over()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._check_hooks("on_before_backward", "on_after_backward")
        self.pipeline.mark("hooks")
        return closure_loss

    # -- the end ----------------------------------------------------------------------------------------------------

    def _explaining(self) -> AbstractContextManager[None]:
        return failure.explained(job_store())

    @override
    def on_train_start(self) -> None:
        compat.load_loader_states(self._module().trainer)  # Lightning restores a checkpoint after ``setup``

    @override
    def on_validation_start(self) -> None:
        self.pipeline.copies.share_buffers()

    @override
    def on_train_end(self) -> None:
        self.pipeline.copies.share_buffers()
        self.pipeline.flush.check()

    @override
    def teardown(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        if self._has_failed:
            self._pipeline = None
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        description = "Pipeline parallelism for an unchanged module"
        # LightningCLI passes a class without arguments on as text, and the Trainer makes it lower case
        for name in (cls.strategy_name, "pipelinestrategy", "lightning_pp.pipelinestrategy"):
            strategy_registry.register(name, cls, description=description)

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
