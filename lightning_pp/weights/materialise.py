"""Models that start without memory: built on the meta device, cut there, and filled where each stage owns them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.partition.operators import storage_key
from lightning_pp.partition.plan import held_by_layers
from lightning_pp.partition.untouched import reachable
from lightning_pp.runtime.deferred import deferring, recorded
from lightning_pp.runtime.recording import Recording, on_meta
from lightning_pp.runtime.rng import stream_seed
from lightning_pp.weights.exchange import exchange, named_tensors, swap

__all__: list[str] = []


class Construction:
    """How the models of one strategy come to their initial weights.

    What a module's code does to its tensors on meta is recorded, and done again for those that a stage owns: the values
    are those of the plain run. Where a module was built on meta before anybody could look, its ``reset_parameters``
    says what the values are, drawing from a stream that is the module's own, so that they are the same for any number
    of stages.
    """

    def __init__(self) -> None:
        self._recording = Recording()
        self._unset: frozenset[str] = frozenset()
        self._taken: set[int] = set()

    @contextmanager
    def building(self, device: torch.device) -> Iterator[None]:
        """Let modules that are built inside the block start on meta; ``device`` is where they would be."""
        try:
            with deferring(self._recording, device):
                yield
        except Exception as error:
            if "meta" not in str(error):
                raise
            raise MisconfigurationException(
                f"Building the model failed: {error}. PipelineStrategy builds it on the meta device, without memory,"
                " so that each process needs memory for its own stage only. Build what needs true numbers there under"
                " `with torch.device('cpu'):`."
            ) from error

    def following(self) -> AbstractContextManager[None]:
        """Record what the block does to tensors that are on meta already."""
        return recorded(self._recording)

    def complete(self, model: nn.Module, seed: int) -> None:
        """Ask the modules that were built unseen what their values are.

        Args:
            model: The LightningModule.
            seed: Of the run, the same on all ranks.
        """
        # what is inside comes first: nn.MultiheadAttention sets what its output projection has set before
        for name, module in sorted(model.named_modules(), key=lambda item: -len(item[0].split("."))):
            if all(map(self._recording.knows, filter(on_meta, _own_tensors(module)))):
                continue
            with recorded(self._recording, stream_seed(seed, *name.encode())), _kept(module):
                for reset in _resetters(model, name, module):
                    reset()
        self._unset = frozenset(
            name for name, tensor in named_tensors(model) if on_meta(tensor) and not self._recording.knows(tensor)
        )
        if self._unset:
            self._watch_loading(model)

    def refuse_unset(self, model: nn.Module) -> None:
        """Complain of what has no values.

        Raises:
            MisconfigurationException: It names the module that should define them.
        """
        for name in sorted(self._unset):
            path, _, key = name.rpartition(".")
            module = type(model.get_submodule(path)).__name__
            raise MisconfigurationException(
                f"{name} is on the meta device, and nothing says what its values are: {module} does not set {key!r} in"
                " a `reset_parameters` method of its own, and no checkpoint has brought it. Build the model in"
                " `configure_model` or under `trainer.init_module(empty_init=True)`, which keep what the constructor"
                f" does, or define `{module}.reset_parameters`, or build the module off meta."
            )

    def show_to_glue(self, model: nn.Module, layers: Mapping[str, nn.Module], device: torch.device) -> None:
        """Fill what code between the layers may look at while the model is planned: all that no layer holds."""
        inside = {name for names in held_by_layers(model, layers).values() for name in names}
        self.fill(model, (), lambda name: name not in inside, device)
        tensors = {id(tensor) for _, tensor in named_tensors(model)}
        for _, value in reachable(model):
            is_loose = isinstance(value, Tensor) and id(value) not in tensors
            if is_loose and on_meta(value) and self._recording.knows(value):
                swap(value, self._recording.value(value, device).requires_grad_(value.requires_grad))

    def fill(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        is_wanted: Callable[[str], bool],
        device: torch.device,
    ) -> None:
        """Give the parameters and buffers on meta that ``is_wanted`` names their memory and values, on ``device``."""

        def value(name: str, tensor: Tensor) -> Tensor | None:
            return self._recording.value(tensor, device) if on_meta(tensor) and is_wanted(name) else None

        self._taken.update(storage_key(tensor) for _, tensor in named_tensors(model) if on_meta(tensor))
        exchange(model, optimizers, value)
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                for key, held in state.items():
                    if isinstance(held, Tensor) and on_meta(held):
                        self._taken.add(storage_key(held))
                        state[key] = held if on_meta(parameter) else self._recording.value(held, device)

    def finish(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        is_owned: Callable[[str], bool],
        device: torch.device,
    ) -> None:
        """Fill what this process owns, and drop what was recorded of the model: the rest stays on meta."""
        self.fill(model, optimizers, is_owned, device)
        self._recording.forget(self._taken)
        self._taken.clear()

    def _watch_loading(self, model: nn.Module) -> None:
        def loaded(_: nn.Module, incompatible: Any) -> None:
            self._unset &= frozenset(incompatible.missing_keys)
            handle.remove()

        handle = model.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Keep the values that ``module`` has while those that it lacks are set."""
    values = [(tensor, tensor.detach().clone()) for tensor in _own_tensors(module) if not on_meta(tensor)]
    yield
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)


def _resetters(model: nn.Module, name: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    """What sets the tensors that ``module`` itself holds.

    Its own method comes first. Then that of the model around it that takes a module and sets it, as
    ``self.apply(self._init_weights)`` would have called it.
    """
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(own):
        yield own
    path = name.split(".") if name else []
    for length in range(len(path), -1, -1):
        around = getattr(model.get_submodule(".".join(path[:length])), "_init_weights", None)
        if callable(around) and _takes_module(around):
            yield partial(around, module)
            return


def _takes_module(method: Callable[..., Any]) -> bool:
    required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    return len(required) == 1 and required[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
