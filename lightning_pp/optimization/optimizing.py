"""The part of the strategy between backward pass and optimizer step: one norm and one decision for all stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pp import compat
from lightning_pp.launch.collective import all_reduce
from lightning_pp.optimization import precision
from lightning_pp.optimization.norms import StageNorms
from lightning_pp.pipeline import Pipeline
from lightning_pp.saving.state import CheckpointedProcesses

__all__: list[str] = []


#: where the user's code can clip by hand
_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)


class OptimizingProcesses(CheckpointedProcesses):
    """Processes that agree on clipping, norms and skipped steps."""

    _agreement: precision.StepAgreement | None = None
    _watched: frozenset[str] = frozenset()

    def _agree_on_steps(self, pipeline: Pipeline) -> None:
        """Begin to agree, as ``pipeline`` is going to train."""
        norms = StageNorms(pipeline.ownership, self.mesh, pipeline.group, self.root_device)
        self._agreement = precision.StepAgreement(self.precision_plugin, norms, pipeline.group, pipeline.host_group)
        module = self._module()
        watched = torch.tensor([compat.watches(module.trainer, module, hook) for hook in _HOOKS], dtype=torch.int64)
        if pipeline.group is not None:  # a callback may be there on one rank only
            all_reduce(watched, pipeline.host_group, dist.ReduceOp.MAX)
        compat.let_batches_be_left_out(module.trainer)
        self._watched = frozenset(hook for hook, count in zip(_HOOKS, watched.tolist(), strict=True) if count)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._check_hooks("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
        assert self._pipeline is not None
        self._pipeline.mark("optimizer")
        return result

    def grad_norm(self, norm_type: float = 2.0, optimizer: Optimizer | None = None) -> Tensor:
        """The norm of the gradients of all stages, as if they were one vector; equal on all ranks.

        Call it on every rank, in hooks between the backward pass and the optimizer's step: in
        ``on_before_optimizer_step`` gradients have not been clipped yet.

        Args:
            norm_type: Order of the norm; positive, ``float("inf")`` included.
            optimizer: Whose parameters count; None takes all of the module's.

        Returns:
            A tensor with one number.

        Raises:
            ValueError: ``norm_type`` is not positive.
            RuntimeError: No training is under way.
        """
        if self._agreement is None:
            raise RuntimeError("There are gradients to take the norm of only while the Trainer fits.")
        plugin = self.precision_plugin
        parameters = self._module().parameters() if optimizer is None else plugin.main_params(optimizer)
        return self._agreement.norms.total(parameters, norm_type)

    def _check_hooks(self, *hooks: str) -> None:
        """Where the user's code may have clipped, see whether it did so on all stages."""
        if self._agreement is not None and not self._watched.isdisjoint(hooks):
            self._agreement.check()

    @override
    def teardown(self) -> None:
        if self._agreement is not None:
            self._agreement.release()
            self._agreement = None
        super().teardown()
