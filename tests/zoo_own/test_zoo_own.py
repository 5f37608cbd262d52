"""Models that know nothing of pipelines train as without one, or are refused with a message that says what to do."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.launch import Failed, try_ranks
from tests.training import Table, assert_same, fit, whole
from tests.zoo_own import graphs, sequences, towers, vision

#: the first test of a table runs all of its rows
pytestmark = pytest.mark.timeout(360)


def _rows(*rows: tuple[type[LightningModule], dict[str, Any]]) -> Mapping[str, dict[str, Any]]:
    return {cls.__name__: {"name": cls.__name__, "cls": cls, **options} for cls, options in rows}


#: the loss is a mean over samples (or over what the module says it weighs), so micro-batches change nothing
UNMODIFIED = _rows(
    (vision.FixedDiffusion, {}),
    (vision.FixedVAE, {}),
    (vision.TiedAutoencoder, {}),
    (vision.TiedLayersAutoencoder, {}),
    (vision.DeepSupervision, {}),
    (vision.FullDepth, {}),
    (sequences.Translator, {}),
    (sequences.Tagger, {}),
    (sequences.MixtureOfExperts, {"strategy": {"layers": ["tests.zoo_own.sequences.ExpertBlock"]}}),
    (graphs.GraphNet, {}),
    (graphs.GraphsThroughLayers, {}),
    (graphs.DeepSets, {}),
    (towers.MultiTask, {"validate": True, "trainer": {"gradient_clip_val": 0.5}}),
)
#: the loss or a buffer is of the whole batch at once: micro-batches would be another computation
WHOLE_BATCHES = _rows(
    (towers.SimCLR, {"microbatches": 1}),
    (towers.ConcatenatedSimCLR, {"microbatches": 1}),
    (towers.RunningBuffers, {"microbatches": 1}),
)
#: the numbers are not those of the plain Trainer, which draws all from one stream
DRAWING = _rows((vision.Diffusion, {}), (vision.VAE, {}), (vision.StochasticDepth, {}))

TABLE = Table({**UNMODIFIED, **WHOLE_BATCHES, **DRAWING})


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", [*UNMODIFIED, *WHOLE_BATCHES])
def test_trains_as_without_the_pipeline(name: str, stages: int) -> None:
    assert_same(TABLE.plain(name), TABLE.piped(name, stages))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", DRAWING)
def test_draws_the_same_for_any_number_of_stages(name: str, stages: int) -> None:
    """Bit for bit: what is drawn in the step, in layers, and by some layers only."""
    one, other = whole(TABLE.piped(name, 1)), whole(TABLE.piped(name, stages))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


REFUSED: Mapping[str, tuple[type[LightningModule], str]] = {
    "two optimizers": (vision.GAN, r"GAN sets `automatic_optimization = False`.*one optimizer, the loss returned"),
    "a momentum encoder that the step updates": (
        towers.MoCo,
        r"writes into parameter 'key\.0\.weight': .*towers.py:\d+: key\.mul_\(0\.9\).*Do it in a hook.*must lie on",
    ),
    "drawing which layers run": (
        vision.LayerDrop,
        r"calls other layers the second time it runs: first \['enter'.*let.*the layers themselves draw",
    ),
    "routing by values of a layer between layers": (
        sequences.RoutedInTheStep,
        r"reads a value that comes from layer 'router' while layer 'blocks\.0' is still to run: .*if mine\.any\(\).*"
        r"or into a layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_before_the_first_step(case: str) -> None:
    cls, text = REFUSED[case]
    results = try_ranks(fit, 2, cls.__name__, strategy={"stages": 2, "microbatches": 3}, devices=2, cls=cls)
    for result in results:
        assert isinstance(result, Failed)
        assert "MisconfigurationException" in result.text
        assert re.search(text, result.text, re.DOTALL), result.text
        assert "_call_strategy_hook" not in result.text, "a step has run"


def test_shapes_that_depend_on_values_of_the_batch_end_the_run_by_name() -> None:
    """Packed between the layers, what crosses is as long as the lengths say; :class:`sequences.Tagger` packs inside."""
    cls = sequences.PackingInTheStep
    results = try_ranks(fit, 2, cls.__name__, strategy={"stages": 2, "microbatches": 3}, devices=2, cls=cls)
    for result in results:
        assert isinstance(result, Failed)
        assert re.search(
            r"What crosses from stage 0 to 1 changed .*\[12, 10\].*now \[8, 10\].*not on its values", result.text
        )
