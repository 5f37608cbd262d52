"""The benchmarks run: what they measure is for people to judge, that they can is for tests."""

import pytest

from benchmarks import gpu, sleeping
from benchmarks.__main__ import BENCHMARKS


def test_the_gpu_script_runs_the_same_code_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--device", "cpu", "--parts", "numerics", "memory", "host"])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = captured.out.splitlines()
    assert sum(line.startswith("numerics 32-true: loss") for line in lines) == 1
    held = {line.split(":")[0]: line.split("holds ")[1].split(" B")[0] for line in lines if line.startswith("memory 1")}
    assert len(set(held.values())) == 1  # 1F1B holds the same for every number of micro-batches
    assert len(held) == 2


def test_contestants_take_turns() -> None:
    found = sleeping.measure(sleeping.Case(2, 4, 5, 10), rounds=1, steps=1)
    assert list(found) == list(sleeping.NAMES)
    assert all(len(values) == 1 and values[0] > 0 for values in found.values())


def test_every_benchmark_has_a_name() -> None:
    assert list(BENCHMARKS) == ["sleeping", "gpt", "overhead", "monitors", "memory", "bubble", "delay", "glue"]
