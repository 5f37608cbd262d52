"""A switched layer is still the user's layer."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_pp.partition.switch import Switchboard

X = torch.ones(2, 3)


class Doubling(nn.Linear):
    """Has a call of its own."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


class Rebuilt(nn.Linear):
    def __reduce__(self):
        return Rebuilt, (self.in_features, self.out_features)


@pytest.fixture
def layer():
    return nn.Linear(3, 3)


@pytest.fixture
def board(layer):
    board = Switchboard({"layer": layer})
    board.install()
    yield board
    board.remove()


def test_looks_like_before(layer, board):
    keys = list(nn.Linear(3, 3).state_dict())
    assert isinstance(layer, nn.Linear)
    assert type(layer).__name__ == "Linear"
    assert type(layer).__module__ == nn.Linear.__module__
    assert list(layer.state_dict()) == keys
    assert repr(layer) == repr(nn.Linear(3, 3))
    assert layer(X).shape == (2, 3)


def test_remove_gives_the_class_back(layer, board):
    board.remove()
    assert type(layer) is nn.Linear
    assert not [key for key in vars(layer) if "pipeline" in key]
    board.remove()  # once is enough


def test_the_handler_answers(layer, board):
    def handler(name, compute, args, kwargs):
        return name, args, kwargs, compute(*args, **kwargs)

    with board.answered_by(handler):
        name, args, kwargs, out = layer(X)
        with board.answered_by(None):
            assert isinstance(layer(X), torch.Tensor)
    assert (name, args, kwargs) == ("layer", (X,), {})
    assert torch.equal(out, layer(X))


def test_the_handler_is_gone_after_an_error(layer, board):
    def fail(name, compute, args, kwargs):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), board.answered_by(fail):
        layer(X)
    assert layer(X).shape == (2, 3)


def test_calls_outside_of_a_step(layer, board):
    board.outside = lambda name, compute, args, kwargs: f"{name} outside"
    assert layer(X) == "layer outside"


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_plain(layer, board, clone):
    cloned = clone(layer)
    assert type(cloned) is nn.Linear
    assert not [key for key in vars(cloned) if "pipeline" in key]
    assert torch.equal(cloned(X), layer(X))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_plain_in_every_protocol(layer, board, protocol):
    assert type(pickle.loads(pickle.dumps(layer, protocol))) is nn.Linear


def test_torch_save_of_a_whole_model(layer, board):
    file = io.BytesIO()
    torch.save(nn.Sequential(layer), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)[0]) is nn.Linear


def test_a_call_and_hooks_of_the_user():
    layer = Doubling(3, 3)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    layer.register_forward_hook(lambda module, args, out: seen.append("post"))
    before = layer(X)
    board = Switchboard({"layer": layer})
    board.install()
    assert torch.equal(layer(X), before)
    with board.answered_by(lambda name, compute, args, kwargs: compute(*args, **kwargs)):
        assert torch.equal(layer(X), before)
    assert seen == ["pre", "post"] * 3
    assert type(copy.deepcopy(layer)) is Doubling


def test_compiled_layers_still_run(layer, board):
    layer.compile(backend="eager")
    assert torch.allclose(layer(X), nn.functional.linear(X, layer.weight, layer.bias))
    with board.answered_by(lambda name, compute, args, kwargs: 5):
        assert layer(X) == 5
