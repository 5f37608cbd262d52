"""Layers that do the same: of those, a new shape runs one under fake tensors, and the others get its answer.

Running all layers under fake tensors is most of what a plan takes, and a model of 48 blocks runs one code 48 times. A
layer gets the answer of another one where nothing that its code can see differs: the two consist of the same
(:mod:`lightning_pp.partition.forms`), the other has not looked at plain attributes that differ
(:mod:`lightning_pp.partition.reads`), both are given the same but for the values of tensors
(:mod:`lightning_pp.partition.request`), and neither does anything that shows besides returning. None of that is taken
on trust: in an earlier trace of the same step, in which both were run, both must have come to the same. Where in doubt
a layer is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_pp.partition.calls import TraceError
from lightning_pp.partition.forms import Form, Place, form_of, forms_of
from lightning_pp.partition.infer import Inference, Inferred
from lightning_pp.partition.random_state import capture_python
from lightning_pp.partition.reads import noted_reads
from lightning_pp.partition.request import is_known, request_key

__all__: list[str] = []


class Alike:
    """Which layers have done the same in all traces of one step so far.

    Attributes:
        kinds: By layer, one that stands for all that do the same; None for one that has to be run each time.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str | None] = {}

    def join(self, name: str, kind: str) -> None:
        """Say that ``name`` has done what those of ``kind`` do."""
        if self.kinds.get(name, name) is not None:
            self.kinds[name] = kind

    def distrust(self, *names: str) -> None:
        """Let these layers, and all that are said to do the same, be run each time."""
        kinds = {self.kinds.get(name, name) for name in names}
        members = [name for name, kind in self.kinds.items() if kind in kinds]
        self.kinds.update(dict.fromkeys((*members, *names)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one layer has come to.

    Attributes:
        layer: Its name.
        inferred: All of it.
        structure: Of the output.
        tensors: Of the output.
    """

    layer: str
    inferred: Inferred
    structure: object
    tensors: list[Tensor]

    def is_same(self, other: Answer) -> bool:
        """Whether another layer has come to the same, as far as a trace says and by the same way."""
        one, two = self.inferred, other.inferred
        return (
            self.structure == other.structure
            and [_spec(tensor) for tensor in self.tensors] == [_spec(tensor) for tensor in other.tensors]
            and one.watch.draws == two.watch.draws
            and one.watch.operators == two.watch.operators
            and (one.cost.flops, one.cost.saved_bytes) == (two.cost.flops, two.cost.saved_bytes)
        )


@dataclass(slots=True)
class Asked:
    """One call of a layer that others may be like.

    Attributes:
        layer: Its name.
        form: What it consists of.
        key: Equal for calls that come to the same, but for what ``reads`` says.
        reads: Plain attributes that it has looked at.
        is_calm: Whether it has drawn nothing from Python's random state.
    """

    layer: str
    form: Form
    key: object
    reads: set[Place] = field(default_factory=set)
    is_calm: bool = False


class Answers:
    """The answers of one trace.

    Args:
        alike: What is known from earlier ones; learns from this one.
        layers: All layers, with their parameters as they are outside of a trace.
        inference: Of the trace.
        may_take: Whether layers are to get answers of others; else all are run, and compared.
    """

    def __init__(
        self, alike: Alike, layers: Mapping[str, nn.Module], inference: Inference, may_take: bool = False
    ) -> None:
        self._alike = alike
        self._inference = inference
        self._layers = layers
        self._may_take = may_take
        self._forms = forms_of(layers)
        self._differing = _differing(self._forms.values())
        self._known: dict[object, list[tuple[Asked, Answer]]] = {}
        self._called: set[str] = set()
        self._answered: set[str] = set()

    def asked(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked | None:
        """The call of ``layer`` that comes now; None where it cannot be like another.

        Raises:
            TraceError: The layer was called before and not run, so that nobody knows what it has left for this call.
        """
        if layer in self._answered:
            self._alike.kinds[layer] = None
            raise TraceError(f"Layer {layer!r} is called a second time, and the first time it was not run.")
        if layer in self._called:
            self._alike.kinds[layer] = None
        self._called.add(layer)
        form = self._forms.get(layer)
        if form is None or form.key not in self._differing or self._alike.kinds.get(layer, layer) is None:
            return None
        if form_of(self._layers[layer], self._inference.origin) != form:
            return None  # the step has changed it
        request = request_key(args, kwargs, self._inference.needs_gradient)
        return None if request is None else Asked(layer, form, (form.key, request))

    def find(self, asked: Asked | None) -> Answer | None:
        """The answer of a layer of which it is known that this one does the same."""
        if asked is None or not self._may_take or self._alike.kinds.get(asked.layer) is None:
            return None
        kind = self._alike.kinds[asked.layer]
        for other, answer in self._like(asked):
            if (
                self._alike.kinds[other.layer] == kind and answer.inferred.is_pure()
            ):  # still: what both hold is as it was
                self._answered.add(asked.layer)
                return answer
        return None

    def start(self) -> None:
        """Say that the step begins."""
        self._known.clear()
        self._called.clear()
        self._answered.clear()

    @contextmanager
    def watching(self, asked: Asked | None) -> Iterator[None]:
        """The block in which the layer is run."""
        if asked is None:
            yield
            return
        before = capture_python()
        with noted_reads(self._layers[asked.layer], self._differing[asked.form.key]) as reads:
            yield
        asked.reads = reads
        asked.is_calm = before == capture_python()

    def learn(self, asked: Asked | None, answer: Answer) -> None:
        """Compare what a layer that was run has come to with those like it, and keep it for those that come.

        Raises:
            TraceError: It has come to something else, so that answers given before may be wrong.
        """
        if asked is None or not asked.is_calm or not answer.inferred.is_pure() or not is_known(answer.structure):
            return
        likes = list(self._like(asked))
        for other, known in likes:
            if not known.is_same(answer):  # nothing that can be seen says why, so that none of them can be trusted
                self._alike.distrust(asked.layer, other.layer)
                if self._answered:
                    raise TraceError(f"Layer {asked.layer!r} has done something else than {other.layer!r}.")
                return
        kind = self._alike.kinds[likes[0][0].layer] if likes else None
        self._alike.join(asked.layer, kind or asked.layer)
        if not likes:
            self._known.setdefault(asked.key, []).append((asked, answer))

    def _like(self, asked: Asked) -> Iterator[tuple[Asked, Answer]]:
        """The calls made so far that differ from this one in nothing that has mattered to them."""
        for other, answer in self._known.get(asked.key, ()):
            is_trusted = self._alike.kinds[other.layer] is not None
            if is_trusted and other.form.is_same(asked.form, other.reads):
                yield other, answer


def _differing(forms: Iterable[Form]) -> dict[object, frozenset[Place]]:
    """By the key of each form that several layers have, where their plain attributes differ."""
    members: dict[object, list[Form]] = {}
    for form in forms:
        members.setdefault(form.key, []).append(form)
    return {
        key: frozenset().union(*(first.differs(form) for form in others))
        for key, (first, *others) in members.items()
        if others
    }


def _spec(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.requires_grad
