"""Plans of a new shape are the same whether all layers are run or one of those that do the same."""

from contextlib import nullcontext

import pytest

from tests.replanned import replanned
from tests.zoo import libraries
from tests.zoo.rows import ROWS
from tests.zoo.running import in_double, make

#: libraries warn of what they will change
pytestmark = pytest.mark.filterwarnings("ignore")

#: rows of which at least one layer has to be run less; others share weights, pass caches, or have too few layers
LESS = {"llama right", "bert", "vit", "timm vit", "t5", "bart", "clip", "mamba", "lora reentrant", "gpt2 reentrant"}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.refused is None])
def test_a_new_shape_is_planned_as_if_all_layers_were_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as loading a library sets it, which is put back afterwards
    row = ROWS[name]
    reason = libraries.absent(row.library)
    if reason is not None:
        pytest.skip(reason)
    libraries.load()
    with in_double() if row.precision == "64-true" else nullcontext():
        module = make(row)
        short, whole = replanned(module, next(iter(module.loader())), row.strategy.get("layers"))
    assert short == whole
    assert not whole.not_run
    if name in LESS:
        assert short.not_run
