"""The promise: a module trained in stages ends where it ends without them."""

import pytest

from tests.training import assert_same, piped, plain

UNMODIFIED = [
    "MLP", "GPT", "HeadInGlueGPT", "UNet", "EncoderDecoder", "RichBoundaries", "InPlaceGlue", "FrozenHalf",
    "FrozenLastHalf", "LateField", "TwiceCalled", "KeepsLogits", "SharedNormModel", "VaryingLengthGPT", "WeightedGPT",
    "DictOutput",
]  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", UNMODIFIED)
def test_unmodified_models_train_as_without_the_pipeline(name: str, stages: int) -> None:
    assert_same(plain(name), piped(name, stages, 3))
