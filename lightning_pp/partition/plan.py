"""Which stage runs which layer calls, owns which parameters, and hands which tensors on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from lightning_pp.partition.balance import balanced_cut
from lightning_pp.partition.calls import Trace, TraceError

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Segment:
    """One stage's part of a step.

    Attributes:
        start: Its first layer call.
        stop: The first call after it; a stage that is not the last one ends its run there.
        takes: Layer outputs ``(call, leaf)`` it receives, in the order of the message.
        gives: Layer outputs it hands on, in the order of the message.
    """

    start: int
    stop: int
    takes: tuple[tuple[int, int], ...]
    gives: tuple[tuple[int, int], ...]


def segments(trace: Trace, bounds: Sequence[int]) -> tuple[Segment, ...]:
    """The stages that ``bounds`` (``num_stages + 1`` call numbers) cut out of ``trace``."""
    live = {bound: trace.live(bound) for bound in set(bounds)}
    last = len(bounds) - 2
    return tuple(
        Segment(start, stop, live[start] if stage else (), live[stop] if stage < last else ())
        for stage, (start, stop) in enumerate(pairwise(bounds))
    )


def owners(trace: Trace, bounds: Sequence[int], held: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """The stages that need each parameter or buffer.

    Args:
        trace: The training step.
        bounds: Its cut.
        held: ``{layer: names of its parameters and buffers}``.

    Returns:
        ``{name: stages in order}``; a name that nobody needs is missing.
    """
    stages: dict[str, set[int]] = {}
    last = len(bounds) - 2

    def need(names: Iterable[str], stage: int) -> None:
        for name in names:
            stages.setdefault(name, set()).add(stage)

    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for call in trace.calls[start:stop]:
            need(held[call.layer], stage)
            need(call.parameters, stage)
    need(trace.end_parameters, last)
    return {name: tuple(sorted(found)) for name, found in stages.items()}


def cut_by_names(trace: Trace, split: Sequence[str], layers: Iterable[str]) -> tuple[int, ...]:
    """The bounds of an explicit ``split``: the names of the layers that begin stages 1, 2, ...

    Raises:
        ValueError: A name is unknown, is not called, or stands out of order.
    """
    known = tuple(layers)
    bounds = [0]
    for stage, name in enumerate(split, start=1):
        if name not in known:
            raise ValueError(f"split={list(split)}: there is no layer {name!r}. The layers are {_listed(known)}.")
        calls = [index for index, call in enumerate(trace.calls) if call.layer == name]
        later = [index for index in calls if index > bounds[-1]]
        if not later:
            order = _listed(call.layer for call in trace.calls)
            why = "is never called" if not calls else f"does not come after the layer that begins stage {stage - 1}"
            raise ValueError(f"split={list(split)}: {name!r} {why}. The step calls, in this order: {order}.")
        bounds.append(later[0])
    return (*bounds, len(trace.calls))


def cut_by_balance(
    trace: Trace, num_stages: int, costs: Sequence[float], memory: tuple[Sequence[float], int] | None = None
) -> tuple[int, ...]:
    """The bounds that make the costliest stage cheapest.

    Args:
        trace: The training step.
        num_stages: Number of stages, at most the number of layer calls.
        costs: Cost of each call.
        memory: ``(bytes saved for backward by each call, number of micro-batches)``: adds what stage k of P holds in
            flight, ``min(M, P - k)`` times its saved bytes.
    """
    sums = (0.0, *accumulate(costs))
    saved, num_microbatches = memory or ([0.0] * len(costs), 1)
    saved_sums = (0.0, *accumulate(saved))

    def stage_cost(stage: int, start: int, stop: int) -> float:
        in_flight = min(num_microbatches, num_stages - stage)
        return sums[stop] - sums[start] + in_flight * (saved_sums[stop] - saved_sums[start])

    starts = trace.starts()
    if len(starts) <= num_stages:  # too few: whoever looks at the cut will say why
        starts = list(range(len(trace.calls) + 1))
    crossing = [float(trace.bytes_at(call)) for call in starts[:-1]]
    cut = balanced_cut(
        len(crossing), num_stages, lambda stage, start, stop: stage_cost(stage, starts[start], starts[stop]), crossing
    )
    return tuple(starts[bound] for bound in cut)


def follow(
    trace: Trace, ownership: Mapping[str, tuple[int, ...]], held: Mapping[str, Sequence[str]], num_stages: int
) -> tuple[int, ...]:
    """The bounds of another step function (validation) under the ownership that ``training_step`` decided.

    Each call goes to the earliest stage that owns the layer and does not lie before the stage of the call before it.

    Raises:
        TraceError: A call needs a layer or parameter that only an earlier stage has.
    """
    bounds = [0]
    stage = 0
    for index, call in enumerate(trace.calls):
        able = _able([*held[call.layer], *call.parameters], ownership, num_stages)
        later = [other for other in able if other >= stage]
        if not later:
            before = f"after {trace.calls[index - 1].layer!r} of stage {stage}" if index else "first of all"
            raise TraceError(
                f"Layer {call.layer!r} runs on stage(s) {able or 'none together'} in training, but this step calls it"
                f" {before}. Call the layers in the order in which training_step calls them for the first batch; those"
                " that this one does not need lie on the last stage."
            )
        bounds += [index] * (later[0] - stage)
        stage = later[0]
    bounds += [len(trace.calls)] * (num_stages - stage)
    missing = [name for name in trace.end_parameters if num_stages - 1 not in ownership.get(name, (num_stages - 1,))]
    if missing:
        raise TraceError(
            f"The end of this step uses {_listed(missing)}, which training_step does not use at its end, so that the"
            " last stage does not have it. Use it inside a layer, or in training_step's loss too."
        )
    return tuple(bounds)


def _able(names: Sequence[str], ownership: Mapping[str, tuple[int, ...]], num_stages: int) -> list[int]:
    stages = set(range(num_stages))
    for name in names:
        stages &= set(ownership.get(name, range(num_stages)))
    return sorted(stages)


def held_by_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """``{layer: names of its parameters and buffers}``, each tensor under its first name in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    names |= {id(b): name for name, b in model.named_buffers()}
    return {
        name: tuple(names[id(tensor)] for tensor in (*layer.parameters(), *layer.buffers()))
        for name, layer in layers.items()
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
