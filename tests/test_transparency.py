"""The promise: a module trained in stages ends where it ends without them.

Everything here runs in float64 over real Gloo processes, against the plain Trainer on one device: parameters, returned
losses, logged values and the batches seen, on every rank.
"""

from typing import Any

import pytest
import torch

from tests.training import Table, assert_same, piped, plain, whole

#: the first test of a table runs all of its rows
pytestmark = pytest.mark.timeout(360)

UNMODIFIED = [
    "MLP", "GPT", "HeadInGlueGPT", "UNet", "EncoderDecoder", "RichBoundaries", "InPlaceGlue", "FrozenHalf",
    "FrozenLastHalf", "LateField", "TwiceCalled", "KeepsLogits", "SharedNormModel", "VaryingLengthGPT", "WeightedGPT",
    "AuxiliaryLoss", "PopsAndHooks", "DemoTransformerWithoutDropout",
    "BuiltLate", "FusedOptimizer", "ForeachOptimizer", "CompiledLayers", "Parametrized", "Recurrent",
]  # fmt: skip
#: draw random numbers in layers, in the code between them, or both
DRAWING = [
    "DropoutMLP", "UntiedDropoutGPT", "DrawingUNet", "CheckpointedBlocks", "ReentrantBlocks", "SpanningCheckpoint",
    "DemoTransformer",
]  # fmt: skip


MODELS = Table({name: {"name": name} for name in UNMODIFIED})


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", UNMODIFIED)
def test_unmodified_models_train_as_without_the_pipeline(name: str, stages: int) -> None:
    assert_same(MODELS.plain(name), MODELS.piped(name, stages))


SIZES = Table(
    {
        (microbatches, accumulate): {
            "name": "MLP",
            "microbatches": microbatches,
            "trainer": {"accumulate_grad_batches": accumulate, "max_epochs": 3},
        }
        for microbatches in (1, 2, 4, 8, 64)
        for accumulate in (1, 3)
    }
)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_any_number_of_stages_and_micro_batches(stages: int, microbatches: int, accumulate: int) -> None:
    """21 samples in batches of 8: the last batch has 5, and with 3 accumulated batches the last window has one."""
    row = (microbatches, accumulate)
    assert_same(SIZES.plain(row), SIZES.piped(row, stages))


@pytest.mark.parametrize("schedule", ["gpipe", "eager_1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 3)])
def test_any_schedule(schedule: str, stages: int, microbatches: int) -> None:
    assert_same(plain("GPT"), piped("GPT", stages, microbatches, strategy={"schedule": schedule}))


def test_a_schedule_from_a_file(tmp_path: Any) -> None:
    from lightning_pp.schedule import gpipe, write_csv

    path = tmp_path / "mine.csv"
    write_csv(gpipe(2, 4), path)
    assert_same(plain("MLP"), piped("MLP", 2, 4, strategy={"schedule": str(path)}))


@pytest.mark.parametrize("stages", [2, 4])
def test_buffers_and_batch_statistics(stages: int) -> None:
    """Whole batches: the plain run. Micro-batches: their own statistics, bit for bit the same for any stages."""
    assert_same(plain("GlueBuffers"), piped("GlueBuffers", stages, 1))
    one, other = whole(piped("GlueBuffers", 1, 2)), whole(piped("GlueBuffers", stages, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("split", [["net.2"], ["net.1", "net.2"], ["net.2", "net.4", "net.6"]])
def test_hooks_and_writes_right_at_a_cut(split: list[str]) -> None:
    """The code between two layers runs on both sides of a cut between them."""
    for name in ("PopsAndHooks", "KeepsLogits"):
        assert_same(plain(name), piped(name, len(split) + 1, 3, strategy={"split": split}))


DRAWN = Table({name: {"name": name, "seed": 5} for name in DRAWING})
#: for one number of stages only
DRAWN_AGAIN = Table({(name, seed): {"name": name, "seed": seed} for name in DRAWING for seed in (5, 6)})


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_do_not_depend_on_the_number_of_stages(name: str) -> None:
    """Bit for bit: dropout masks, and noise that is both input and target."""
    runs = {stages: DRAWN.piped(name, stages) for stages in (1, 2, 4)}
    one = whole(runs[1])
    for stages in (2, 4):
        other = whole(runs[stages])
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert [o["loss"] for o in runs[stages][0].outputs] == [o["loss"] for o in runs[1][0].outputs]
    again = whole(DRAWN_AGAIN.piped((name, 5), 2))
    assert all(torch.equal(one[key], again[key]) for key in one)
    without = whole(DRAWN_AGAIN.piped((name, 6), 2))
    assert any(not torch.equal(one[key], without[key]) for key in one)


def test_sparse_gradients() -> None:
    """They are held, handed over and accumulated as any."""
    trainer = {"accumulate_grad_batches": 2}
    assert_same(plain("SparseGPT", trainer=trainer), piped("SparseGPT", 2, 3, trainer=trainer))


@pytest.mark.parametrize("stages", [2, 4])
def test_recomputed_activations_change_nothing(stages: int) -> None:
    """Bit for bit, dropout included."""
    kept = whole(piped("DropoutGPT", stages, 3))
    for which in (True, ["tests.models.Block"], ["blocks.1", "blocks.2"]):
        recomputed = whole(piped("DropoutGPT", stages, 3, strategy={"activation_checkpointing": which}))
        assert all(torch.equal(kept[key], recomputed[key]) for key in kept)


@pytest.mark.parametrize("name", ["CheckpointedBlocks", "SpanningCheckpoint", "ReentrantBlocks"])
def test_recomputed_activations_of_layers_that_the_user_recomputes_too(name: str) -> None:
    """A layer that was called again by the user's checkpoint built another graph than in the forward pass."""
    kept = whole(piped(name, 2, 3))
    recomputed = whole(piped(name, 2, 3, strategy={"activation_checkpointing": True}))
    assert all(torch.equal(kept[key], recomputed[key]) for key in kept)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_weights_a_masked_loss_is_the_mean_over_samples(stages: int) -> None:
    """Micro-batches of one sample each: the documented sample-weighted mean of their means."""
    reference = plain("PerSampleGPT")
    assert_same(reference, piped("PaddedGPT", stages, 64))


@pytest.mark.parametrize("stages", [2, 3])
def test_everything_that_a_step_returns_reaches_every_rank(stages: int) -> None:
    reference, outcomes = plain("DictOutput"), piped("DictOutput", stages, 3)
    assert_same(reference, outcomes)
    for outcome in outcomes:
        for ours, theirs in zip(outcome.outputs, reference.outputs, strict=True):
            assert ours.keys() == theirs.keys()
            torch.testing.assert_close(ours["predictions"], theirs["predictions"], atol=1e-9, rtol=0)
            torch.testing.assert_close(ours["bias"], theirs["bias"], atol=1e-9, rtol=0)


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "clip by norm": {"gradient_clip_val": 0.05},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "max_steps in the middle of an epoch": {"max_epochs": -1, "max_steps": 5},
    "limit_train_batches": {"limit_train_batches": 2},
}


OPTIONS = Table({option: {"name": "GPT", "trainer": trainer} for option, trainer in TRAINER_OPTIONS.items()})


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("option", TRAINER_OPTIONS)
def test_trainer_options(option: str, stages: int) -> None:
    assert_same(OPTIONS.plain(option), OPTIONS.piped(option, stages))


VALIDATED = ["GPT", "FrozenHalf", "VaryingLengthGPT", "UNet"]
VALIDATION = Table(
    {
        name: {"name": name, "validate": True, "trainer": {"accumulate_grad_batches": 2, "val_check_interval": 1}}
        for name in VALIDATED
    }
)


@pytest.mark.parametrize("name", VALIDATED)
@pytest.mark.parametrize("stages", [2, 4])
def test_validation_inside_fit(name: str, stages: int) -> None:
    assert_same(VALIDATION.plain(name), VALIDATION.piped(name, stages))


@pytest.mark.parametrize("stages", [2, 4])
def test_dropout_with_tied_weights(stages: int) -> None:
    """A tied gradient is the sum of the stages' sums, so only the order of summation differs."""
    one, other = whole(piped("DropoutGPT", 1, 3)), whole(piped("DropoutGPT", stages, 3))
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("32-true", 1e-6), ("bf16-true", 0.02), ("bf16-mixed", 2e-3), ("16-true", 3e-3)]
)
def test_precision(precision: str, tolerance: float) -> None:
    """Bit for bit with one micro-batch; with more, up to the rounding that another order of summation brings."""
    trainer = {"precision": precision}
    reference = plain("UntiedGPT", trainer=trainer)
    for stages in (2, 4):
        found = whole(piped("UntiedGPT", stages, 1, trainer=trainer))
        assert all(torch.equal(found[name], expected) for name, expected in reference.parameters.items())
        assert_same(reference, piped("UntiedGPT", stages, 3, trainer=trainer), tolerance)
