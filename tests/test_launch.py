"""How users start it on one machine: a plain script, torchrun, by name, twice in one script, and from no script."""

import re
import sys
from types import ModuleType
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pp.launch import launching
from tests.commands import assert_same, plain, program, results, run, torchrun
from tests.launch import run_ranks
from tests.program import ROOT, train

#: a page that lists mistakes by their messages
PAGE = (ROOT / "docs" / "multi_node.md").read_text(encoding="utf-8")
TWO = {"trainer": {"devices": 2}, "strategy": {"stages": 2, "microbatches": 3}}


def places(found: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(one[key] for key in ("rank", "world_size", "stage", "replica")) for one in found]


def test_a_plain_script_with_two_trainers_one_of_which_fits_twice() -> None:
    by_name = {"trainer": {"devices": 2, "max_epochs": 1}, "strategy": "pipeline", "fits": 2, "seed": 1}
    found = results(run(program([TWO, by_name])))
    assert places(found) == [(0, 2, 0, 0)] * 2 + [(1, 2, 1, 0)] * 2
    assert_same(found[::2], plain())
    assert_same(found[1::2], plain(trainer={"max_epochs": 1}, fits=2, seed=1))


def test_torchrun() -> None:
    launcher = torchrun("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    found = results(run(program(TWO, *launcher)))
    assert places(found) == [(0, 2, 0, 0), (1, 2, 1, 0)]
    assert_same(found, plain())


class OtherWayRound(LightningEnvironment):
    """A cluster of somebody's own, whose ranks are not those that Lightning would count."""

    def global_rank(self) -> int:
        return 1 - self.local_rank()

    def set_global_rank(self, rank: int) -> None:
        pass


def on_a_cluster_of_ones_own() -> dict[str, Any]:
    return train({**TWO, "trainer": {"devices": 2, "plugins": [OtherWayRound()]}})


def test_ranks_are_those_of_the_cluster_environment() -> None:
    found = run_ranks(on_a_cluster_of_ones_own, 2)
    assert places(found) == [(1, 2, 1, 0), (0, 2, 0, 0)]
    assert_same(found, plain())


def of_two_sizes() -> str:
    train(TWO)
    try:
        train({"trainer": {"devices": 1}, "strategy": {}})
    except MisconfigurationException as error:
        return str(error)
    return "not refused"


def test_two_trainers_of_different_sizes_are_refused_at_once() -> None:
    words = "connected as a job of 2, and this Trainer asks for devices x num_nodes = 1"
    assert words in PAGE
    for text in run_ranks(of_two_sizes, 2):
        assert words in text


def test_devices_that_are_no_multiple_of_the_stages_are_refused_before_a_process_is_started() -> None:
    words = "PipelineStrategy(stages=3) needs a multiple of 3 processes, but devices x num_nodes = 2"
    assert words in PAGE
    with pytest.raises(MisconfigurationException, match=re.escape(words)):
        train({"trainer": {"devices": 2}, "strategy": {"stages": 3}})


def test_devices_that_do_not_fit_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own words, before anybody waits for a process that does not exist."""
    variables = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = "the product (1 * 1) does not match the world size (2)"
    assert words in PAGE
    with pytest.raises(ValueError, match=re.escape(words)):
        train({"trainer": {"devices": 1}, "strategy": {}})


AT_A_PROMPT = """
from lightning.pytorch import Trainer
import lightning_pp
from tests.models import MLP

def train(devices):
    Trainer(devices=devices, strategy="pipeline", accelerator="cpu", max_epochs=1, barebones=True).fit(
        MLP(), MLP.loader())

try:
    train(devices=2)
except Exception as error:
    print(type(error).__name__, error)
train(devices=1)
print("trained")
"""


def test_at_a_prompt_one_process_trains_and_several_are_refused() -> None:
    """Python's own; IPython and Jupyter kernels set the same sys.ps1."""
    ((code, output),) = run(([sys.executable, "-i", "-c", AT_A_PROMPT], {}))
    assert code == 0, output
    assert "MisconfigurationException PipelineStrategy cannot start 2 processes from here" in output
    assert "python train.py" in output
    assert "trained" in output.splitlines(), output


def test_a_command_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are standard input and a notebook: their main module has no file, or one that is not there."""
    assert launching.has_script()
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert not launching.has_script()
    words = "cannot start 2 processes from here"
    assert words in PAGE
    with pytest.raises(MisconfigurationException, match=words):
        train({"trainer": {"devices": 2}, "strategy": {"stages": 2}})
