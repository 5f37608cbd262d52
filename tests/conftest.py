"""What every test can rely on: a fixed seed, one thread, and a process left as it was found."""

import os
import random
from collections.abc import Iterator

import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel import pytest_cmdline_main, pytest_collection_modifyitems, pytest_runtest_protocol

__all__ = ["pytest_cmdline_main", "pytest_collection_modifyitems", "pytest_runtest_protocol"]
SEED = 1234
# Written by Lightning's own seed_everything: put back without a word.
QUIETLY_RESTORED = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
# Written by torch.compile on some versions of torch.
QUIETLY_RESTORED |= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
# Written by pytest itself while a test runs.
NOT_OURS = {"PYTEST_CURRENT_TEST"}


def pytest_report_header() -> str:
    gpus = torch.cuda.device_count()
    return f"torch {torch.__version__}, lightning {lightning.__version__}, {gpus} CUDA device(s)"


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


def leaked(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of the variables that differ, but for those that are put back quietly."""
    names = (before.keys() | after.keys()) - QUIETLY_RESTORED - NOT_OURS
    return sorted(name for name in names if before.get(name) != after.get(name))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Put the environment back, end a process group left behind, and fail the test that leaked a variable."""
    before = dict(os.environ)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    after = dict(os.environ)
    for name in (before.keys() | after.keys()) - NOT_OURS:
        if name not in before:
            del os.environ[name]
        elif before[name] != after.get(name):
            os.environ[name] = before[name]
    names = leaked(before, after)
    if names:
        pytest.fail(f"the test changed environment variables and did not put them back: {', '.join(names)}")
