"""The norm of gradients that lie on several stages: one number, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# these two themselves, whatever stands in their modules while a pipeline trains
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_pp.launch.collective import all_reduce
from lightning_pp.runtime.mesh import Mesh
from lightning_pp.weights.ownership import Ownership

__all__: list[str] = []


class StageNorms:
    """Takes norms over all stages of one pipeline.

    Args:
        ownership: Says which rank counts which parameter (a tied one lies on several).
        mesh: This process's position.
        group: All stages, for device memory; None for a single one.
        device: Where gradients live.
    """

    def __init__(self, ownership: Ownership, mesh: Mesh, group: Any, device: torch.device) -> None:
        self.ownership = ownership
        self.mesh = mesh
        self.device = device
        self._group = group
        #: of every norm: the one that holds those of all gradients, of other stages included
        self.dtype = _norm_dtype(ownership.model.parameters())

    def total(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of ``parameters``, as if they were one vector; the same bits on every stage.

        Args:
            parameters: The same ones on every stage, in any order, those of other stages included.
            norm_type: Order of the norm; positive, ``inf`` included.

        Raises:
            ValueError: ``norm_type`` is not positive.
        """
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type}: allowed is a positive number or inf.")
        counted = [p.grad for p in parameters if p.grad is not None and self.ownership.counts_here(p)]
        here = get_total_norm(counted, norm_type) if counted else torch.zeros((), dtype=self.dtype, device=self.device)
        if self._group is None:
            return here.to(self.dtype)
        # each stage fills its own place, so that the sum is exact, keeps nan, and is the same everywhere
        norms = torch.zeros(self.mesh.num_stages, dtype=torch.float64, device=self.device)
        norms[self.mesh.position] = here
        all_reduce(norms, self._group)
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total.to(self.dtype)

    def clip(self, parameters: Iterable[Tensor], clip_val: float) -> None:
        """Scale the gradients down to a 2-norm of at most ``clip_val``."""
        parameters = list(parameters)
        norm = self.total(parameters)
        here = [p for p in parameters if p.grad is not None]
        if here:
            clip_grads_with_norm_(here, clip_val, norm)


def _norm_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The real dtype that the gradients' dtypes add up to; whole numbers and single bytes have no gradients."""
    dtypes = {p.dtype.to_real() for p in parameters if (p.is_floating_point() or p.is_complex()) and p.itemsize > 1}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
