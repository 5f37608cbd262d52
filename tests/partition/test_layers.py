"""Which modules are layers."""

from __future__ import annotations

import pytest
from torch import nn
from torchmetrics import MeanMetric, Metric

from lightning_pp.partition.layers import chosen_layers, find_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x):
        return self.inner(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(5, 2), "drop": nn.Dropout(), "h": nn.ModuleList([Block(), Block()])}
        )
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 5)


def holder(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def names(model: nn.Module, *args, **kwargs) -> list[str]:
    return list(find_layers(model, *args, **kwargs))


def test_blocks_of_a_sequential():
    assert names(holder(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["net.0", "net.1", "net.2"]


def test_blocks_embedding_norm_and_head():
    assert names(GPT()) == ["transformer.wte", "transformer.h.0", "transformer.h.1", "norm", "head"]


def test_nested_lists_are_opened():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.ModuleList([nn.Linear(2, 2)]))
    assert names(holder(net=net)) == ["net.0.0", "net.0.1", "net.1.0"]


def test_encoder_and_decoder_of_a_transformer():
    found = names(holder(model=nn.Transformer(8, 2, 2, 2, 8, batch_first=True)))
    assert found == [
        "model.encoder.layers.0",
        "model.encoder.layers.1",
        "model.encoder.norm",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
        "model.decoder.norm",
    ]


def test_a_shared_module_counts_once():
    shared = nn.Linear(2, 2)
    assert names(holder(a=shared, b=shared, net=nn.Sequential(shared, nn.Tanh()))) == ["a", "net.1"]


def test_without_parameters_beside_the_blocks_is_glue():
    assert names(holder(drop=nn.Dropout(), loss=nn.CrossEntropyLoss(), head=nn.Linear(2, 2))) == ["head"]


def test_metrics_are_ignored():
    model = holder(metric=MeanMetric(), metrics=nn.ModuleList([MeanMetric()]), head=nn.Linear(2, 2))
    assert names(model, ignored=(Metric,)) == ["head"]


def test_no_layer_for_what_has_no_forward():
    heads = nn.ModuleDict({"a": nn.Linear(2, 2), "act": nn.ReLU()})
    parameters = nn.ParameterList([nn.Parameter(nn.Linear(2, 2).weight)])
    assert names(holder(heads=heads, parameters_=parameters)) == ["heads.a"]


@pytest.mark.parametrize("wanted", [Block, f"{__name__}.Block"], ids=["class", "import path"])
def test_wanted_by_class(wanted, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(Block=Block))
    assert names(GPT(), [wanted]) == ["transformer.wte", "transformer.h.0", "transformer.h.1", "norm", "head"]


def test_wanted_by_name_and_smaller_than_found():
    found = names(GPT(), ["transformer.h.0.inner.0", nn.LayerNorm, "torch.nn.Embedding"])
    assert found == ["transformer.wte", "transformer.h.0.inner.0", "transformer.h.1", "norm", "head"]


def test_wanted_that_is_not_there():
    with pytest.raises(ValueError, match="matches no module") as error:
        names(GPT(), ["transformer.x"])
    assert str(error.value) == (
        "layers=['transformer.x']: 'transformer.x' matches no module of GPT. Give a class, the import path of a class"
        " or a module's name. Its classes are Block, Dropout, Embedding, LayerNorm, Linear, ModuleDict, ModuleList,"
        " ReLU, Sequential; its modules transformer, norm, head and what they hold."
    )


@pytest.mark.parametrize("wanted", ["no.such.module", "torch.nn.functional", nn.Conv2d, "x", ""])
def test_wanted_of_other_kinds_that_are_not_there(wanted):
    with pytest.raises(ValueError, match="matches no module"):
        names(GPT(), [wanted])


def test_wanted_that_is_never_called():
    with pytest.raises(ValueError, match=r"'transformer.h' is a ModuleList, which is never called itself") as error:
        names(GPT(), ["transformer.h"])
    assert str(error.value).endswith("Name what it holds: transformer.h.0, transformer.h.1.")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (True, {"embedding", "blocks.0", "blocks.1", "head"}),
        (False, set()),
        ([nn.Bilinear], {"blocks.1"}),
        (["torch.nn.Bilinear", "head"], {"blocks.1", "head"}),
        (["blocks"], {"blocks.0", "blocks.1"}),
        ([nn.Linear], {"blocks.0", "head"}),
    ],
)
def test_chosen_are_those_named_and_no_others(wanted, expected):
    model = nn.Module()
    model.embedding = nn.Embedding(3, 4)
    model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(4, 4, 4)])
    model.head = nn.Linear(4, 1)
    assert chosen_layers(model, find_layers(model), wanted) == expected


@pytest.mark.parametrize("wanted", [nn.Conv1d, "nowhere", "torch.nn.Nowhere", "", "head.0"])
def test_what_is_no_layer_cannot_be_chosen(wanted):
    model = nn.Module()
    model.head = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
    layers = {"head": model.head}  # one that holds what is named is another thing
    with pytest.raises(ValueError, match="is no layer of Module. Give True, or classes or names of layers: its layers"):
        chosen_layers(model, layers, [nn.Linear, wanted] if wanted == "head.0" else [wanted])
