"""Models of libraries, unchanged, in 2 and 4 stages: equal to the plain run, or refused with what to do."""

import pytest

from tests.zoo import libraries, page
from tests.zoo.results import Zoo
from tests.zoo.rows import ROWS

#: one test runs all rows for the others
pytestmark = pytest.mark.timeout(1000)

EQUAL = [name for name, row in ROWS.items() if row.refused is None]
REFUSED = [name for name, row in ROWS.items() if row.refused is not None]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    reason = libraries.absent("transformers")
    if reason is not None:
        pytest.skip(reason)
    return Zoo(tmp_path_factory.mktemp("zoo"))


def need(name: str) -> None:
    reason = libraries.absent(ROWS[name].library)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_losses_and_parameters_are_those_of_the_plain_run(zoo: Zoo, name: str, stages: int) -> None:
    """Two stages from the beginning; four from the checkpoint that two have saved."""
    need(name)
    assert zoo.verdict(name, stages) == "equal"


@pytest.mark.parametrize("name", EQUAL)
def test_the_plain_run_goes_on_from_the_checkpoint_of_two_stages(zoo: Zoo, name: str) -> None:
    need(name)
    assert zoo.checkpoint_verdict(name) == "equal"


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_says_why_and_what_to_do(zoo: Zoo, name: str, stages: int) -> None:
    need(name)
    assert not zoo.plain[name].whole.error
    assert zoo.verdict(name, stages) == "refused"
    for seen in zoo.of(name, stages):
        assert str(ROWS[name].refused) in seen.error
        assert not seen.losses


def test_batch_norm_warns_once_and_only_where_it_matters(zoo: Zoo) -> None:
    need("timm resnet")
    counts = {
        name: sum("is a BatchNorm2d" in text for text in zoo.of(name, 2)[0].warned)
        for name in ("timm resnet", "timm resnet fixed", "timm vit")
    }
    assert counts == {"timm resnet": 0, "timm resnet fixed": 1, "timm vit": 0}


def test_the_table_of_the_documentation_is_up_to_date(zoo: Zoo) -> None:
    for name in ROWS:
        need(name)
    written, new = page.table(page.PAGE.read_text(encoding="utf-8")), page.render(zoo)
    assert page.stable(written) == page.stable(new)
    if written.splitlines()[0] == new.splitlines()[0]:  # made with the same versions
        assert written == new
