"""One test per fault that was found and fixed, with its story, for its whole kind."""

from typing import Any

import pytest
import torch

from tests.training import Outcome, assert_same, fit, piped, plain


@pytest.mark.parametrize("name", ["OtherNames", "BatchOnly", "AnyArguments"])
def test_step_functions_take_what_lightning_gives_them(name: str) -> None:
    """Planning looked for a parameter named ``batch_idx``; Lightning passes it by position to any second one."""
    validate = name != "AnyArguments"
    assert_same(plain(name, validate=validate), piped(name, 2, 3, validate=validate))


def test_another_default_dtype() -> None:
    """The first exchange on a channel was made in the default dtype on one end and in float32 on the other."""
    from tests.launch import run_ranks

    reference = run_ranks(fit_in_double, 1, None)[0]
    for outcome in run_ranks(fit_in_double, 2, {"stages": 2, "microbatches": 3}):
        for name, parameter in outcome.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], atol=1e-9, rtol=0)


def fit_in_double(strategy: Any) -> Outcome:
    torch.set_default_dtype(torch.float64)
    return fit("MLP", strategy, trainer={"precision": "32-true"}, devices=2 if strategy else 1)
