"""Names that Lightning and torch do not promise: each test says which one has moved."""

import inspect
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pp import compat
from lightning_pp.optimization.precision import step_context
from lightning_pp.partition import modes
from lightning_pp.runtime import profiling
from lightning_pp.runtime.reruns import running_checkpoints


def test_loops_and_their_loaders() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    loops = (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        assert compat.combined_loader(loop) is None
        assert callable(loop.setup_data)
    assert hasattr(trainer.fit_loop, "_data_fetcher")
    compat.load_loader_states(trainer)
    assert not compat.takes_iterator(trainer)
    assert trainer.fit_loop.batch_idx == -1
    assert trainer.fit_loop.total_batch_idx == -1


def test_zero_grad_follows_the_first_batch_of_a_window() -> None:
    source = inspect.getsource(_AutomaticOptimization._make_zero_grad_fn)
    assert "batch_idx % self.trainer.accumulate_grad_batches == 0" in source


def test_batch_hooks_and_overrides() -> None:
    assert "dataloader_idx" in inspect.signature(LightningModule._on_before_batch_transfer).parameters

    class Own(LightningModule):
        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    assert compat.is_overridden("backward", Own())
    assert not compat.is_overridden("backward", LightningModule())
    assert hasattr(Callback, "on_before_zero_grad")


def test_the_job_store_and_the_backends() -> None:
    assert callable(dist.distributed_c10d._get_default_store)
    assert hasattr(dist, "ProcessGroupGloo")
    assert hasattr(dist, "PrefixStore")


def test_the_end_of_an_accumulation_window() -> None:
    assert callable(Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit_loop._should_accumulate)


def test_a_batch_is_left_out_where_lightning_would_refuse() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    compat.let_batches_be_left_out(trainer)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    left_out = loop.output_result_cls.from_training_step_output(compat.LEFT_OUT)
    assert left_out.closure_loss is left_out.loss is None
    assert loop.output_result_cls.from_training_step_output(torch.ones(()), 2).closure_loss == 0.5
    assert "output_result_cls.from_training_step_output" in inspect.getsource(type(loop)._training_step)


def test_signal_handlers_are_looked_up_when_they_are_registered() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    connector = trainer._signal_connector
    noted: list[int] = []
    compat.SignalActions(trainer).replace_handlers(noted.append, noted.append)
    before = signal.getsignal(signal.SIGTERM)
    connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        connector.teardown()
    assert noted == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
    assert not trainer.received_sigterm
    compat.SignalActions(trainer).stop()
    assert trainer.received_sigterm
    assert callable(type(connector)._slurm_sigusr_handler_fn)
    source = inspect.getsource(type(trainer.fit_loop.epoch_loop).advance)
    assert "torch.distributed" not in source or "self._broadcast_sigterm_tensor()" in source


def test_the_launcher_checks_and_starts() -> None:
    launcher = compat.script_launcher(LightningEnvironment(), 1, 1)
    assert launcher.procs == []
    assert compat.dead_child(launcher) is None
    launcher.procs = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])]
    launcher.procs[0].kill()
    launcher.procs[0].wait()
    assert "local rank 1: its process was killed by signal 9" in str(compat.dead_child(launcher))
    assert not launcher.is_interactive_compatible
    assert "validate_settings" in inspect.getsource(launcher.launch)


def test_loops_count_the_batches_that_have_begun() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert compat.batches_begun(trainer) == (0, 0, 0, 0, 0)


def test_the_two_halves_of_clip_grad_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    clip_grad = torch.nn.utils.clip_grad
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    given = []
    norm = torch.tensor(8.0)

    def scale(parameters: list[torch.Tensor], max_norm: float, total_norm: torch.Tensor, foreach: object) -> None:
        given.append((parameters, max_norm, total_norm, foreach))

    monkeypatch.setattr(clip_grad, "_get_total_norm", lambda tensors, norm_type, error, foreach: norm)
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", scale)
    assert torch.nn.utils.clip_grad_norm_(parameter, 0.5) is norm
    assert given == [([parameter], 0.5, norm, None)]
    assert torch.nn.utils.get_total_norm is not clip_grad._get_total_norm
    assert callable(torch.nn.utils.clip_grads_with_norm_)


@pytest.mark.parametrize("fused", [False, True])
def test_where_a_grad_scaler_looks_for_overflows(fused: bool) -> None:
    """An optimizer that unscales by itself goes the same way."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.SGD([parameter], 0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    found = {parameter.device: torch.ones(())}
    scaler._unscale_grads_ = lambda optimizer, inv_scale, found_inf, allow_fp16: found
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, torch.ones(4))
    assert scaler.get_scale() == 2.0


def test_a_module_knows_its_trainer_and_whether_it_is_at_work() -> None:
    module, trainer = LightningModule(), Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert not compat.is_running(None)
    assert not compat.is_running(module)
    module._trainer = trainer
    assert not compat.is_running(module)
    trainer.state.status = TrainerStatus.RUNNING
    assert compat.is_running(module)


def test_whether_a_run_has_failed() -> None:
    module, trainer = LightningModule(), Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module._trainer = trainer
    assert not compat.is_interrupted(module)
    assert not compat.is_interrupted(None)
    trainer.state.status = TrainerStatus.INTERRUPTED
    assert compat.is_interrupted(module)


def test_plugins_that_wrap_another_and_what_is_loaded_by_default() -> None:
    base, given = TorchCheckpointIO(), TorchCheckpointIO()
    empty, full = AsyncCheckpointIO(), AsyncCheckpointIO(given)
    for plugin in (empty, full, given):
        compat.give_base_io(plugin, base)
    assert empty.checkpoint_io is base
    assert full.checkpoint_io is given
    knows = "weights_only" in inspect.signature(Trainer.fit).parameters
    assert compat.loads_weights_only_by_default() is (None if knows else False)


def test_plans_of_distributed_checkpoints() -> None:
    planner, tensor = DefaultSavePlanner(), torch.ones(2)
    planner.set_up_planner({"model": {"weight": tensor}}, None, True)
    assert planner.state_dict == {"model.weight": tensor}
    assert planner.mappings == {"model.weight": ("model", "weight")}
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    assert list(metadata.planner_data) == list(metadata.state_dict_metadata) == ["model.weight"]
    assert plan.items[0].index.fqn == "model.weight"


def test_what_a_tensor_carries_when_it_is_exchanged() -> None:
    layer, parameter = torch.nn.LSTM(2, 3), torch.nn.Parameter(torch.ones(2))
    assert len(layer._flat_weight_refs) == 4
    layer._flat_weight_refs = []
    layer._init_flat_weights()
    assert layer._flat_weight_refs[0]() is layer.weight_ih_l0
    parameter.register_hook(lambda grad: None)
    parameter.register_post_accumulate_grad_hook(lambda tensor: None)
    assert len(parameter._backward_hooks) == len(parameter._post_accumulate_grad_hooks) == 1


def test_whether_a_profiler_runs() -> None:
    assert not profiling.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiling.is_profiling()
    with torch.autograd.profiler.profile():
        assert profiling.is_profiling()
    assert not profiling.is_profiling()


def test_initialisers_that_look_for_meta_ask_the_property() -> None:
    asked = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func == torch.Tensor.is_meta.__get__)
            return func(*args, **(kwargs or {}))

    with Mode():
        assert not torch.ones(1).is_meta
    assert asked[-1]


def test_subclasses_of_tensors_see_operators_on_lists_too() -> None:
    seen = []

    class Seeing(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            seen.append(func)
            with no_dispatch():
                result = func(*args, **(kwargs or {}))
            return torch.Tensor._make_subclass(Seeing, result) if type(result) is torch.Tensor else result

    def seeing() -> torch.Tensor:
        return torch.Tensor._make_subclass(Seeing, torch.empty(2, device="meta"))

    torch._foreach_add_([torch.ones(2), seeing()], [torch.ones(2), torch.ones(2)])
    assert seen[-1] is torch.ops.aten._foreach_add_.List
    parameter = torch.nn.Parameter(seeing())
    assert type(parameter) is Seeing
    assert isinstance(parameter, torch.nn.Parameter)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # an absent one is not assigned in silence
        torch.nn.Parameter(torch.ones(2)).data = seeing()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_gradient_checkpoint_keeps_from_its_first_run_to_its_second(reentrant: bool) -> None:
    found = []

    def part(x: torch.Tensor) -> torch.Tensor:
        found.append([(kept, again) for _, kept, again in running_checkpoints()])
        return x.sin().exp()

    assert list(running_checkpoints()) == []
    x = torch.ones(2, requires_grad=True)
    checkpoint(part, checkpoint(part, x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
    (one, other), (again_other, again_one) = found[:2], found[2:]
    assert [run[0][1] for run in found] == [False, False, True, True]
    assert again_one[0][0] is one[0][0]
    assert again_other[0][0] is other[0][0]
    assert one[0][0] is not other[0][0]


class Forward(Precision):
    """Notes its context."""

    def __init__(self) -> None:
        self.entered = 0

    def forward_context(self) -> AbstractContextManager[None]:
        self.entered += 1
        return nullcontext()


@pytest.mark.parametrize(
    "name", ["train_step_context", "val_step_context", "test_step_context", "predict_step_context"]
)
def test_the_context_of_a_step_is_that_of_the_forward(name: str) -> None:
    """`step_context` enters the inner one alone."""
    for cls in (DoublePrecision, HalfPrecision, MixedPrecision):
        assert getattr(cls, name) is getattr(Precision, name)
    plugin = Forward()
    with getattr(plugin, name)():
        assert plugin.entered == 1
    with step_context(plugin)():
        assert plugin.entered == 2
    assert "with self.forward_context():" in inspect.getsource(getattr(Precision, name))


def test_what_sees_all_that_a_layer_does() -> None:
    """Hooks on all modules, and the user's modes: under them layers are run, not answered."""
    assert not modes.is_watched()
    hooks = torch.nn.modules.module
    for register in (
        hooks.register_module_forward_pre_hook,
        hooks.register_module_forward_hook,
        hooks.register_module_full_backward_pre_hook,
        hooks.register_module_full_backward_hook,
    ):
        handle = register(lambda *_: None)
        assert modes.is_watched()
        handle.remove()
    for mode in (TorchFunctionMode(), TorchDispatchMode()):
        with mode:
            assert modes.is_watched()
    assert not modes.is_watched()
