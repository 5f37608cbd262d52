"""A module that is built without memory gets, when it is asked, the very values of the one that is built as always."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_pp.partition.operators import storage_key
from lightning_pp.runtime.deferred import deferring, recorded
from lightning_pp.runtime.recording import Recording, on_meta

CPU = torch.device("cpu")


class Tables(nn.Module):
    """Buffers and parameters that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        table, position = torch.zeros(9, 6), torch.arange(9)[:, None]
        angle = position * torch.exp(torch.arange(0, 6, 2) * (-math.log(1e4) / 6))
        table[:, 0::2], table[:, 1::2] = torch.sin(angle), torch.cos(angle)
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.register_buffer("listed", torch.tensor([1.0, 2.0]))
        self.position = nn.Parameter(torch.randn(1, 7, 5) * 0.02)
        self.drawn = nn.Parameter(torch.bernoulli(torch.full((5, 5), 0.3)))
        self.own_stream = nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(3)))
        left, right = torch.randn(10).chunk(2)
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)


class Initialisers(nn.Module):
    """What ``torch.nn.init`` does, some of it by looking at numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated, self.truncated_far = nn.Linear(50, 70), nn.Linear(5, 7)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        nn.init.trunc_normal_(self.truncated_far.weight, a=1.0, b=2.0)
        self.orthogonal, self.sparse, self.eye = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(5, 5)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.sparse_(self.sparse.weight, 0.3)
        nn.init.eye_(self.eye.weight)
        self.dirac = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.dirac.weight)
        self.tokens, self.head = nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 11)
        self.head.weight = self.tokens.weight
        self.apply(self.set)

    @staticmethod
    def set(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.data[2].zero_()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.constant_(module.bias, 0.1)


class Library(nn.Module):
    """Modules of torch that set themselves in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 16)
        self.norm, self.lstm = nn.BatchNorm1d(4), nn.LSTM(3, 4, 2)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(5, 6))
        self.blocks = nn.ModuleList(copy.deepcopy(self.weight_norm) for _ in range(2))
        self.half = nn.Linear(20, 30).double().half()


class LooksAtNumbers(nn.Module):
    """A constructor that asks tensors for numbers, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)]
        self.alpha = float(torch.rand(()))
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.numbers = [
            *self.first.weight[0].tolist(),
            float(self.first.bias.detach().sum()),
            len(torch.rand(9).nonzero()),
        ]
        with torch.no_grad():
            if self.first.weight[0, 0] > 0:
                self.first.bias += 1
            else:
                self.second.bias += 1
            self.first.weight *= 2
            self.first.weight.data[1:].mul_(3)
            self.second.weight[0] = self.first.weight[0]
            while self.second.weight.max() < 10:
                self.second.weight.mul_(1.5).add_(torch.rand(5, 5))
            self.second.load_state_dict({"weight": torch.ones(5, 5), "bias": self.second.bias * 2})
        self.array = self.first.weight.detach().numpy().sum()


KINDS = [Tables, Initialisers, Library, LooksAtNumbers]


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@pytest.mark.filterwarnings("ignore:copying from a non-meta parameter", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_stream_are_those_of_the_plain_constructor(kind: type[nn.Module], dtype: torch.dtype) -> None:
    recording, before = Recording(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(4)
        plain = kind()
        following = torch.rand(3)
        torch.manual_seed(4)
        with deferring(recording, CPU):
            module = kind()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.rand(3, dtype=dtype), following)
    expected = dict(tensors(plain))
    for name, tensor in tensors(module):
        assert on_meta(tensor) or tensor.numel() < 3, f"{name} has memory"
        value = recording.value(tensor, CPU) if on_meta(tensor) else tensor
        assert torch.equal(value, expected[name]), name
    for key in ("rates", "alpha", "numbers", "array"):
        assert getattr(module, key, None) == getattr(plain, key, None)


def test_asking_again_gives_the_same_and_leaves_the_stream_alone() -> None:
    recording = Recording()
    with deferring(recording, CPU):
        layer = nn.Linear(30, 40)
    state = torch.get_rng_state()
    assert torch.equal(recording.value(layer.weight, CPU), recording.value(layer.weight, CPU))
    assert torch.equal(state, torch.get_rng_state())


def test_what_the_user_places_elsewhere_is_left_there() -> None:
    with deferring(Recording(), CPU):
        given = torch.zeros(3, device="cpu")
        with torch.device("cpu"):
            layer = nn.Linear(2, 3)
        with torch.device("meta"):
            away = nn.Linear(2, 3)
    assert not given.is_meta
    assert not layer.weight.is_meta
    assert away.weight.is_meta


def test_streams_of_their_own_do_not_touch_the_global_one() -> None:
    values = []
    for seed in (1, 1, 2):
        recording = Recording()
        with torch.device("meta"):
            layer = nn.Linear(5, 6)
        with recorded(recording):
            layer.double()
        assert not recording.knows(layer.weight), "a copy of what nobody knows"
        state = torch.get_rng_state()
        with recorded(recording, seed):
            layer.reset_parameters()
        assert recording.knows(layer.weight)
        values.append(recording.value(layer.weight, CPU))
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert 0 < values[0].abs().max() <= 1 / math.sqrt(5)


def test_nothing_is_kept_of_what_has_been_taken() -> None:
    recording = Recording()
    with deferring(recording, CPU):
        first, second = nn.Linear(5, 6), nn.Linear(6, 7)
    recording.forget([storage_key(tensor) for _, tensor in tensors(first)])
    assert not recording.knows(first.weight)
    assert recording.value(second.weight, CPU).abs().sum() > 0
    recording.forget([storage_key(tensor) for _, tensor in tensors(second)])
    assert not recording._entries
    assert not recording._storages
