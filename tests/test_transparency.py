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


RECOMPUTED: dict[str, Any] = {"all": True, "a class": ["tests.models.Block"], "two": ["blocks.1", "blocks.2"]}
PRECISIONS = {"32-true": 1e-6, "bf16-true": 0.02, "bf16-mixed": 2e-3, "16-true": 3e-3}

#: what runs in any number of stages
ANY = Table(
    {
        "batch statistics": {"name": "GlueBuffers", "microbatches": 2},
        "padded": {"name": "PaddedGPT", "microbatches": 64},
        "dropout": {"name": "DropoutGPT"},
    }
)
#: what runs in several
SEVERAL = Table(
    {
        **{
            (schedule, number): {"name": "GPT", "microbatches": number, "strategy": {"schedule": schedule}}
            for schedule in ("gpipe", "eager_1f1b")
            for number in (3, 5)
        },
        **{
            key: {"name": "DropoutGPT", "strategy": {"activation_checkpointing": which}}
            for key, which in RECOMPUTED.items()
        },
        **{
            (precision, number): {"name": "UntiedGPT", "microbatches": number, "trainer": {"precision": precision}}
            for precision in PRECISIONS
            for number in (1, 3)
        },
        "whole batches": {"name": "GlueBuffers", "microbatches": 1},
    }
)


@pytest.mark.parametrize("schedule", ["gpipe", "eager_1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [3, 5])
def test_any_schedule(schedule: str, stages: int, microbatches: int) -> None:
    assert_same(plain("GPT"), SEVERAL.piped((schedule, microbatches), stages))


def test_a_schedule_from_a_file(tmp_path: Any) -> None:
    from lightning_pp.schedule import gpipe, write_csv

    path = tmp_path / "mine.csv"
    write_csv(gpipe(2, 4), path)
    assert_same(plain("MLP"), piped("MLP", 2, 4, strategy={"schedule": str(path)}))


@pytest.mark.parametrize("stages", [2, 4])
def test_buffers_and_batch_statistics(stages: int) -> None:
    """Whole batches: the plain run. Micro-batches: their own statistics, bit for bit the same for any stages."""
    assert_same(plain("GlueBuffers"), SEVERAL.piped("whole batches", stages))
    one, other = (whole(ANY.piped("batch statistics", number)) for number in (1, stages))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("split", [["net.2"], ["net.1", "net.2"], ["net.2", "net.4", "net.6"]])
def test_hooks_and_writes_right_at_a_cut(split: list[str]) -> None:
    """The code between two layers runs on both sides of a cut between them."""
    for name in ("PopsAndHooks", "KeepsLogits"):
        assert_same(plain(name), piped(name, len(split) + 1, 3, strategy={"split": split}))


DRAWN = Table({name: {"name": name, "seed": 5} for name in DRAWING})
#: for one number of stages only
DRAWN_AGAIN = Table({(name, seed): {"name": name, "seed": seed} for name in DRAWING for seed in (5, 6)})
#: in two stages, with layers that the user recomputes recomputed once more
RECOMPUTED_TWICE = Table(
    {
        name: {"name": name, "strategy": {"activation_checkpointing": True}}
        for name in ("CheckpointedBlocks", "SpanningCheckpoint", "ReentrantBlocks")
    }
)


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
    kept = whole(ANY.piped("dropout", stages))
    for which in RECOMPUTED:
        recomputed = whole(SEVERAL.piped(which, stages))
        assert all(torch.equal(kept[key], recomputed[key]) for key in kept)


@pytest.mark.parametrize("name", RECOMPUTED_TWICE.keys)
def test_recomputed_activations_of_layers_that_the_user_recomputes_too(name: str) -> None:
    """A layer that was called again by the user's checkpoint built another graph than in the forward pass."""
    kept, recomputed = whole(DRAWN.piped(name, 2)), whole(RECOMPUTED_TWICE.piped(name, 2))
    assert all(torch.equal(kept[key], recomputed[key]) for key in kept)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_weights_a_masked_loss_is_the_mean_over_samples(stages: int) -> None:
    """Micro-batches of one sample each: the documented sample-weighted mean of their means."""
    reference = plain("PerSampleGPT")
    assert_same(reference, ANY.piped("padded", stages))


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
    one, other = (whole(ANY.piped("dropout", number)) for number in (1, stages))
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision(precision: str) -> None:
    """Bit for bit with one micro-batch; with more, up to the rounding that another order of summation brings."""
    reference = plain("UntiedGPT", trainer={"precision": precision})
    for stages in (2, 4):
        found = whole(SEVERAL.piped((precision, 1), stages))
        assert all(torch.equal(found[name], expected) for name, expected in reference.parameters.items())
        assert_same(reference, SEVERAL.piped((precision, 3), stages), PRECISIONS[precision])
