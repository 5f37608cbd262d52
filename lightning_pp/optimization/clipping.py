"""``torch.nn.utils.clip_grad_norm_`` in the user's hooks: it takes the norm of all stages' gradients.

(``clip_grad_value_`` looks at each gradient alone; what it does not bear is a stage that has none at all.)

A hook that clips by hand would scale each stage by the norm of its own gradients, and nobody would be told. So while a
pipeline trains, the two functions that ``clip_grad_norm_`` is made of stand aside: first comes the norm of what is
here, then, where the parameters turn out to be those of the cut model, the norm over all stages takes its place.

Every rank must make the same calls. What each has been given is compared first, through host memory: a hook that asks
``if p.grad is not None`` around the call would otherwise leave some ranks waiting, or clip by a mixture of norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_pp.launch.collective import all_reduce
from lightning_pp.optimization.norms import StageNorms

__all__: list[str] = []

_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"
_PUBLIC_NORM, _VALUE = "get_total_norm", "clip_grad_value_"

#: what a rank can tell the others: it has made no further call; it was given some parameters; or all that have a
#: gradient here, and nothing of other stages
_NO_CALL, _SOME, _ALL_HERE = range(3)

_MISMATCH = (
    "Gradients are clipped, or their norm is taken, by other parameters on one stage than on the others. In a pipeline"
    " every rank must call clip_grad_norm_ equally often and with the same parameters, those of other stages included:"
    " write `clip_grad_norm_(self.parameters(), 1.0)`, or choose parameters by name, and neither choose parameters by"
    " `p.grad is not None` nor call it under such a condition. `trainer.strategy.grad_norm()` gives the norm alone."
)


@dataclass(slots=True)
class _Pending:
    """The norm of what is here, until it is known whose gradients those are."""

    norm: Tensor
    norm_type: float
    error_if_nonfinite: bool


class StageClipping:
    """Stands in for the parts of ``clip_grad_norm_`` while a pipeline of several stages trains.

    Args:
        norms: Takes norms over all stages.
        host_group: All stages, for host memory.
    """

    def __init__(self, norms: StageNorms, host_group: Any) -> None:
        self._norms = norms
        self._host_group = host_group
        self._pending: _Pending | None = None
        self._plain_norm = getattr(clip_grad, _NORM)
        self._plain_scale = getattr(clip_grad, _SCALE)
        self._plain_public_norm = getattr(torch.nn.utils, _PUBLIC_NORM)
        setattr(clip_grad, _NORM, self._norm_here)
        setattr(clip_grad, _SCALE, self._scale)
        setattr(torch.nn.utils, _PUBLIC_NORM, self._norm_of_tensors)
        self._plain_value = getattr(torch.nn.utils, _VALUE)
        for module in (clip_grad, torch.nn.utils):
            setattr(module, _VALUE, self._clip_values)

    def remove(self) -> None:
        """Give torch its functions back."""
        setattr(clip_grad, _NORM, self._plain_norm)
        setattr(clip_grad, _SCALE, self._plain_scale)
        setattr(torch.nn.utils, _PUBLIC_NORM, self._plain_public_norm)
        for module in (clip_grad, torch.nn.utils):
            setattr(module, _VALUE, self._plain_value)

    def check(self) -> None:
        """Find out whether another rank waits for this one in a call that this one has not made.

        Raises:
            MisconfigurationException: One does.
        """
        if any(kind != _NO_CALL for kind, _ in self._compare(_NO_CALL, 0)):
            raise MisconfigurationException(_MISMATCH)

    def _norm_here(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm: Tensor = torch.zeros((), dtype=self._norms.dtype, device=self._norms.device)
        if tensors:
            norm = self._plain_norm(tensors, norm_type, False, foreach)
        self._pending = _Pending(norm, float(norm_type), error_if_nonfinite)
        return norm

    def _scale(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        pending, self._pending = self._pending, None
        if pending is not None and pending.norm is total_norm:
            own = {id(parameter) for parameter in self._norms.ownership.model.parameters()}
            if not parameters or any(id(parameter) in own for parameter in parameters):
                total_norm.copy_(self._total(parameters, pending.norm_type))
            if pending.error_if_nonfinite:
                self._plain_norm([total_norm], pending.norm_type, True, foreach)
        self._plain_scale(parameters, max_norm, total_norm, foreach)

    def _clip_values(
        self, parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(parameter.grad is not None for parameter in parameters):
            self._plain_value(parameters, clip_value, foreach)

    def _norm_of_tensors(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = {id(p.grad): p for p in self._norms.ownership.model.parameters() if p.grad is not None}
        found = [owners[id(tensor)] for tensor in tensors if id(tensor) in owners]
        if len(found) < len(tensors):
            return self._plain_norm(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        norm = self._total(found, norm_type)
        return self._plain_norm([norm], norm_type, error_if_nonfinite)  # type: ignore[no-any-return]

    def _total(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm over all stages, once it is sure that all of them ask for the same one."""
        model = self._norms.ownership.model
        asked = {id(parameter) for parameter in parameters}
        indices = [number for number, parameter in enumerate(model.parameters()) if id(parameter) in asked]
        here = [number for number, parameter in enumerate(model.parameters()) if parameter.grad is not None]
        digest = hash((norm_type, *indices))
        said = self._compare(_ALL_HERE if indices == here else _SOME, digest)
        is_same = all(kind != _NO_CALL and other == digest for kind, other in said)
        if not is_same and any(kind != _ALL_HERE for kind, _ in said):
            raise MisconfigurationException(_MISMATCH)
        return self._norms.total(parameters, norm_type)

    def _compare(self, kind: int, digest: int) -> list[list[int]]:
        """What each stage says."""
        said = torch.zeros(self._norms.mesh.num_stages, 2, dtype=torch.int64)
        said[self._norms.mesh.position] = torch.tensor([kind, digest])
        all_reduce(said, self._host_group)
        return said.tolist()
