"""The plain data of a traced step: its layer calls, and what has to cross a cut in front of each of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.partition import tree

__all__: list[str] = []

#: ``(layer, args, kwargs, device) -> seconds``
TimeCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], torch.device], float]

#: what a layer may return besides tensors: it is the same on every stage
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum, tree.Slot)

#: what to do about a training step that returns None at times
LEFT_OUT = (
    "A step that returns None leaves its batch out. In a pipeline all stages must know that beforehand, from shapes or"
    " plain values of the batch and for all of its micro-batches alike: decide it in the dataset or in collate_fn, and"
    " let the batch carry a bool (`if batch['is_left_out']: return None`)."
)


class TraceError(ValueError):
    """A step cannot be cut into stages as it stands; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Argument(tree.Marker):
    """In the structure of a layer's output: the same object that was leaf number ``index`` of its arguments."""

    index: int
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a layer's output.

    Attributes:
        written: Whether the step writes into it in place later on, or hooks its gradient: what the user's code gets
            must not be what is handed on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    written: bool = False

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: The layer's name.
        structure: Its output, with :class:`tree.Slot` or :class:`Argument` in place of tensors.
        leaves: The output's tensors, then those arguments that the layer wrote into, as they are afterwards.
        writes: Which leaves of its arguments those are.
        needs: Layer outputs that its arguments were computed from by glue.
        parameters: Parameters that its arguments were computed from by glue (not its own).
        draws: Whether the layer draws random numbers.
        flops: Floating-point operations of its forward.
        saved_bytes: Bytes it keeps for its backward, parameters excluded.
        seconds: What the trace's ``time_call`` said; 0 without one.
        region: The reentrant gradient checkpoint that it runs in, numbered; None outside of one.
        inner: Leaves that do not leave this checkpoint as they are, though it trains: only in there they get a
            gradient.
        resumes: Other calls of the layer that have left it values (in a cache of keys and values) which it uses.
    """

    layer: str
    structure: object
    leaves: tuple[Leaf, ...]
    writes: tuple[int, ...]
    needs: frozenset[tuple[int, int]]
    parameters: frozenset[str]
    draws: bool
    flops: int
    saved_bytes: int
    seconds: float = 0.0
    region: int | None = None
    inner: frozenset[int] = frozenset()
    resumes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Trace:
    """The layer calls of one step, and what its end (loss, logging, return value) needs.

    Attributes:
        calls: In the order of the step.
        end_needs: Layer outputs that the end needs.
        end_parameters: Parameters that the end needs.
        touched: Parameters and buffers that glue uses in any way.
        draws: Whether glue draws from torch's generators.
        draws_python: Whether the step draws from :mod:`random` or numpy.
        updated: Buffers that hold values of layers after the step: only the last stage's copy is right.
        returns_none: Whether the step itself returned None, whatever it has logged.
        not_run: Calls whose layer was not run in the trace, and the layer that does the same and was.
    """

    calls: tuple[Call, ...]
    end_needs: frozenset[tuple[int, int]]
    end_parameters: frozenset[str]
    touched: frozenset[str]
    draws: bool
    draws_python: bool
    updated: frozenset[str] = frozenset()
    returns_none: bool = False
    not_run: Mapping[int, str] = field(default_factory=dict, compare=False)
    _last_use: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        last_use = {output: index for index, call in enumerate(self.calls) for output in call.needs}
        last_use |= dict.fromkeys(self.end_needs, len(self.calls))
        object.__setattr__(self, "_last_use", dict(sorted(last_use.items())))

    def live(self, call: int) -> tuple[tuple[int, int], ...]:
        """The layer outputs ``(call, leaf)`` that cross a cut in front of call number ``call``, in order."""
        return tuple(output for output, last in self._last_use.items() if output[0] < call <= last)

    def bytes_at(self, call: int) -> int:
        """Bytes that cross a cut in front of call number ``call``."""
        return sum(self.calls[index].leaves[leaf].num_bytes for index, leaf in self.live(call))

    def starts(self) -> list[int]:
        """The calls in front of which the step may be cut, and the number of calls.

        A cut that would divide a gradient checkpoint is among them: whoever asks for it has a better way.
        """
        divided = {
            bound
            for index, call in enumerate(self.calls)
            for other in call.resumes  # a later one too, where a layer keeps its state for the next step
            for bound in range(min(index, other) + 1, max(index, other) + 1)
        }
        return [bound for bound in range(len(self.calls) + 1) if bound not in divided]

    def refuse_divided(self, bounds: Sequence[int]) -> None:
        """Complain where calls that belong together would lie on two stages.

        Raises:
            TraceError: One of ``bounds`` lies between them.
        """
        stage_of = [bisect_right(bounds[1:-1], index) for index in range(len(self.calls))]
        for first, last, why in self._together():
            if stage_of[first] != stage_of[last]:
                raise TraceError(why)
        for bound in set(bounds[1:-1]):
            for index, leaf in self.live(bound) if bound < len(self.calls) else ():
                if leaf in self.calls[index].inner:
                    raise TraceError(_goes_on(self.calls[index].layer, self.calls[bound].layer))

    def _together(self) -> Iterator[tuple[int, int, str]]:
        """Pairs of calls that one stage has to run, and why."""
        first: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            for other in call.resumes:
                yield other, index, _resumed(call.layer)
            if call.region is None:
                continue
            # A reentrant checkpoint runs without gradients and builds its graph when it returns, which it would do on
            # neither of two stages.
            other = first.setdefault(call.region, index)
            yield other, index, _checkpointed(self.calls[other].layer, call.layer)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are called, each once."""
        return tuple(dict.fromkeys(call.layer for call in self.calls))


def _checkpointed(first: str, last: str) -> str:
    return (
        f"A cut between layers {first!r} and {last!r} divides what runs in"
        " torch.utils.checkpoint.checkpoint(..., use_reentrant=True). Use use_reentrant=False, checkpoint the layers"
        " one by one, or set activation_checkpointing=True instead."
    )


def _goes_on(layer: str, following: str) -> str:
    return (
        f"A cut in front of layer {following!r} lies behind torch.utils.checkpoint.checkpoint(..., use_reentrant=True)"
        f" around layer {layer!r}. What that layer returns is computed with, changed or hooked before it leaves the"
        " checkpoint, or changed in place or hooked behind it. Use use_reentrant=False, or set"
        " activation_checkpointing=True instead."
    )


def _resumed(layer: str) -> str:
    return (
        f"The step calls layer {layer!r} more than once, and a later call uses what an earlier one has put aside (in an"
        " attribute, a list, or another object such as a cache of keys and values). All that runs between the two calls"
        " has to lie on one stage, which leaves no place for so many cuts. Call the layers once, on the whole input, or"
        " use fewer stages."
    )


def rebuild(structure: object, tensors: list[Tensor], inputs: list[Any]) -> Any:
    """A layer's output from its structure, its tensors and the leaves of the arguments it was called with."""
    if isinstance(structure, tree.Slot):
        return tensors[structure.index]

    def put(leaf: Any) -> Any:
        if isinstance(leaf, tree.Slot):
            return tensors[leaf.index]
        return inputs[leaf.index] if isinstance(leaf, Argument) else leaf

    return tree.map_leaves(put, structure)


def stand_in_for(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in the shape of ``tensor`` that takes one element of memory (see :func:`plain_value`)."""
    return torch.full((), plain_value(tensor.dtype), dtype=tensor.dtype, device=device).expand(tensor.shape)


def plain_value(dtype: torch.dtype) -> float | int:
    """What stands where nobody needs the true value: one that scales, probabilities and divisors bear too."""
    return 0.5 if dtype.is_floating_point or dtype.is_complex else 0
