"""One trace out of two runs of a step in a row: it holds for the first step, and for those after it."""

from __future__ import annotations

from dataclasses import replace

from lightning_pp.partition.calls import Call, Trace, TraceError

__all__: list[str] = []


def merged(first: Trace, second: Trace, kept: frozenset[tuple[int, int]]) -> Trace:
    """The trace of both.

    Args:
        first: Of the first run.
        second: Of the second run.
        kept: Layer outputs of the first run that the end of the second one needs.
    """
    return replace(
        second,
        calls=tuple(_both(one, two) for one, two in zip(first.calls, second.calls, strict=True)),
        end_needs=first.end_needs | second.end_needs | kept,
        end_parameters=first.end_parameters | second.end_parameters,
        touched=first.touched | second.touched,
        draws=first.draws or second.draws,
        draws_python=first.draws_python or second.draws_python,
        updated=first.updated | second.updated,
    )


def refuse_other_calls(first: Trace, second: Trace) -> None:
    """Complain where the second run has not called what the first one has.

    Raises:
        TraceError: It has not.
    """
    if [call.layer for call in first.calls] != [call.layer for call in second.calls]:
        raise TraceError(
            "The step calls other layers the second time it runs: first"
            f" {[call.layer for call in first.calls]}, then {[call.layer for call in second.calls]}. The order of layer"
            " calls is the order of the pipeline and has to stay the same. Where chance decides, call every layer and"
            " let the layers themselves draw (and return what they were given)."
        )
    for one, two in zip(first.calls, second.calls, strict=True):
        if len(one.leaves) != len(two.leaves):
            raise TraceError(
                f"Layer {one.layer!r} returns {len(one.leaves)} tensors the first time the step runs, and then"
                f" {len(two.leaves)}. What layers return has to stay the same."
            )


def _both(one: Call, two: Call) -> Call:
    leaves = tuple(replace(a, written=a.written or b.written) for a, b in zip(one.leaves, two.leaves, strict=True))
    return replace(
        one,
        leaves=leaves,
        needs=one.needs | two.needs,
        parameters=one.parameters | two.parameters,
        draws=one.draws or two.draws,
        resumes=one.resumes | two.resumes,
        inner=one.inner | two.inner,
    )
