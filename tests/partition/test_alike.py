"""Layers that do the same: of those, a trace of a new shape runs one, and says the same as if it had run all."""

import random
import types
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pp.partition.alike import Alike
from lightning_pp.partition.calls import TraceError
from lightning_pp.partition.trace import trace_step
from tests.partition.tracing import CPU, Own, Row, switched

WIDTH = 4


class Block(Own):
    """A layer whose forward and further attributes are given."""

    def __init__(self, forward=lambda block, x, **kwargs: (x * block.weight).tanh(), **attributes):
        super().__init__(forward, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)


def blocks(forward=None, count=4, **attributes):
    """``count`` blocks with one forward; an attribute that is a function gives the value for each number."""
    given = () if forward is None else (forward,)
    values = [{name: make(number) for name, make in attributes.items()} for number in range(count)]
    return [Block(*given, **values[number]) for number in range(count)]


def batch(size):
    return torch.zeros(size, WIDTH, requires_grad=True) * 1.0


def not_run(model, before=(3,), new=5, same=True, make=batch):
    """The layers that a trace of a new shape has not run; it says what a trace that runs all of them says."""
    board, alike = switched(model), Alike()

    def traced(size, **options):
        return trace_step(lambda: model(make(size)), model, board, CPU, **options)

    try:
        for size in before:
            traced(size, alike=alike, twice=True)
        short, whole = (traced(new, measured=False, alike=with_or_without) for with_or_without in (alike, None))
    finally:
        board.remove()
    assert (short == whole) == same
    assert not whole.not_run
    return [short.calls[index].layer for index in short.not_run]


def names(*numbers):
    return [f"blocks.{number}" for number in numbers]


class Settings:
    """An object of the user's."""

    def __init__(self, place):
        self.place = place


class Chain(Row):
    """A row that calls its blocks in a way of its own."""

    def __init__(self, *blocks, forward):
        super().__init__(*blocks)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


# -- what is not run -----------------------------------------------------------------------------------------------


def test_one_of_the_blocks_is_run():
    """The first one is given the batch, which needs no gradient."""
    assert not_run(Row(*blocks())) == names(2, 3)


def test_the_other_shape_is_planned_as_if_all_were_run():
    seen = []

    def glue(net, x):
        seen.append((tuple(x.shape), x.dtype, x.requires_grad, x.is_leaf))
        return x

    assert not_run(Row(*blocks(), glue=glue)) == names(2, 3)
    short, whole = seen[-8:-4], seen[-4:]
    assert short == whole
    assert short[-1] == ((5, WIDTH), torch.float32, True, False)


def test_blocks_that_are_frozen_are_alike_too():
    row = Row(*blocks(count=5))
    for block in row.blocks[:3]:
        block.requires_grad_(False)
    assert not_run(row) == names(1, 2)


def nested(block, x, **kwargs):
    return {"hidden": (x["hidden"][0] * block.weight, None), "kept": x["kept"], "number": 3}


def test_nested_outputs_and_arguments_that_are_passed_on():
    def make(size):
        return {"hidden": (torch.zeros(size, WIDTH), None), "kept": torch.zeros(size), "number": 3}

    model = Chain(*blocks(nested), forward=lambda net, x: [x := block(x) for block in net.blocks][-1]["hidden"][0])
    assert not_run(model, make=make) == names(2, 3)


def test_layers_that_draw_are_known_to_draw():
    def dropping(block, x):
        return nn.functional.dropout(x * block.weight, 0.3, block.training)

    row = Row(*blocks(dropping))
    assert not_run(row) == names(2, 3)


def test_layers_in_gradient_checkpoints_of_the_users():
    def forward(net, x):
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    assert not_run(Chain(*blocks(), forward=forward)) == names(1, 2, 3)


def test_attributes_that_nobody_looks_at_may_differ():
    row = Row(*blocks(number=lambda number: number, settings=lambda number: {"name": [number, "x"]}))
    assert not_run(row) == names(2, 3)


def test_attributes_that_are_looked_at_have_to_be_the_same():
    """As in models whose even layers look at a window."""

    def windowed(block, x):
        return (x[:, : block.window] * block.weight[: block.window]).repeat(1, WIDTH // block.window)

    assert not_run(Row(*blocks(windowed, count=6, window=lambda number: 1 + number % 2))) == names(3, 4, 5)


def test_a_limit_by_number_is_noticed_in_planning():
    """Beyond some length, later blocks leave something out, which no earlier shape has shown."""

    def pruning(block, x):
        y = x * block.weight
        return y[: 2 * block.limit] if len(x) > 2 * block.limit else y

    assert not_run(Row(*blocks(pruning, limit=lambda number: 4 - number)), before=(2,), new=9) == []


def test_what_one_trace_has_run_the_next_need_not():
    """Blocks that one shape leaves out are compared when they are first called."""

    def forward(net, x):
        for block in net.blocks[: 3 if len(x) == 3 else 5]:
            x = block(x)
        return x

    model = Chain(*blocks(count=5), forward=forward)
    assert not_run(model) == names(2)
    assert not_run(model, before=(3, 4)) == names(2, 3, 4)


# -- what is run all the same --------------------------------------------------------------------------------------


def keeping(block, x):
    block.last = x * block.weight
    return block.last


def counting(block, x):
    block.number += 1
    return x * block.weight


def writing(block, x):
    return x.mul_(block.weight)


def noting(block, x):
    block.seen.append(len(x))
    return x * block.weight


def drawing(block, x):
    return x * block.weight * random.random()


def from_its_own(block, x):
    return x * block.weight + torch.rand(WIDTH, generator=block.generator)


def from_one_of_all(block, x):
    return x * block.weight + torch.rand(WIDTH, generator=GENERATOR)


def counted(block, x):
    block.counts += 1
    return x * block.weight


def rebound(block, x):
    block.counts = block.counts + 1
    return x * block.weight


def by_values(block, x):
    return x * block.weight * (1.0 if (x > 0).any() else 2.0)


def placed(block, x):
    return x * block.weight * (block.place + 1)


def by_dict(block, x):
    return x * block.weight * (vars(block)["settings"].place + 1)


def with_buffer(block):
    block.register_buffer("counts", torch.zeros(WIDTH))
    return block


def hooked(kind):
    found = blocks()
    for block in found:
        getattr(block, f"register_{kind}")(lambda *args: None)
    return found


def sharing(what):
    found = blocks()
    shared = nn.Linear(WIDTH, WIDTH)
    for block in found:
        if what == "module":
            block.inner = shared
        elif what == "parameter":
            block.other = shared.weight
        else:
            block.register_buffer("table", found[0].weight.detach())
    return found


def own_classes():
    return [type(f"Block{number}", (Block,), {})() for number in range(4)]


def own_objects():
    return blocks(by_dict, settings=lambda number: Settings(place=number))


GENERATOR = torch.Generator()
SHOWS = {
    "keeps a value in an attribute": lambda: blocks(keeping, last=lambda number: None),
    "counts its calls": lambda: blocks(counting, number=lambda number: 0),
    "writes into its argument": lambda: blocks(writing),
    "appends to a list of its own": lambda: blocks(noting, seen=lambda number: []),
    "appends to a list of all": lambda: blocks(noting, seen=lambda number, seen=[]: seen),
    "draws Python's random numbers": lambda: blocks(drawing),
    "draws from a generator": lambda: blocks(from_its_own, generator=lambda number: GENERATOR),
    "draws from a generator that it does not hold": lambda: blocks(from_one_of_all),
    "updates a buffer": lambda: [with_buffer(block) for block in blocks(counted)],
    "binds a buffer anew": lambda: [with_buffer(block) for block in blocks(rebound)],
    "is run for real": lambda: blocks(by_values),
    "looks at a number of its own": lambda: blocks(placed, place=lambda number: number),
    "holds objects of its own": own_objects,
    "has a class of its own": own_classes,
    "has a forward hook": lambda: hooked("forward_hook"),
    "has a forward pre-hook": lambda: hooked("forward_pre_hook"),
    "has a backward hook": lambda: hooked("full_backward_hook"),
    "shares a module": lambda: sharing("module"),
    "shares a parameter": lambda: sharing("parameter"),
}


@pytest.mark.parametrize("what", SHOWS)
def test_a_layer_is_run_that(what):
    assert not_run(Row(*SHOWS[what]())) == []


def twice(net, x):
    for block in [*net.blocks, *net.blocks]:
        x = block(x)
    return x


def with_cache(net, x):
    cache = []
    for block in net.blocks:
        x = block(x, cache=cache)
    return x


def with_number(net, x):
    for number, block in enumerate(net.blocks):
        x = block(x, number=number)
    return x


def with_object(net, x):
    for block in net.blocks:
        x = block(x, way=object())
    return x


def with_lists(net, x):
    for number, block in enumerate(net.blocks):
        x = block(x, sizes=[1] * number)
    return x


def in_other_shapes(net, x):
    for number, block in enumerate(net.blocks):
        x = block(x[number:])
    return x


def in_other_strides(net, x):
    for number, block in enumerate(net.blocks):
        x = block(x.repeat(1 + number, 1)[:: 1 + number])
    return x


def in_other_kinds(net, x):
    for block, dtype in zip(net.blocks, (torch.float64, torch.float32, torch.bfloat16, torch.float16), strict=True):
        x = block(x.to(dtype))
    return x


def with_and_without_gradient(net, x):
    for number, block in enumerate(net.blocks):
        x = block(torch.zeros_like(x) if number % 2 else x)
    return x


def in_other_modes(net, x):
    for number, block in enumerate(net.blocks):
        with torch.set_grad_enabled(number < 2), torch.autocast("cpu", enabled=number % 2 == 0):
            x = block(x)
    return x


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(net, x):
    with Looking():
        for block in net.blocks:
            x = block(x)
    return x


def under_a_function_mode(net, x):
    with torch.device("cpu"):
        for block in net.blocks:
            x = block(x)
    return x


def with_a_global_hook(net, x):
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    for block in net.blocks:
        x = block(x)
    handle.remove()
    return x


def changing_them(net, x):
    for number, block in enumerate(net.blocks):
        block.place = number
        x = block(x)
    return x


def freezing_them(net, x):
    for number, block in enumerate(net.blocks):
        block.requires_grad_(number % 2 == 0)
        x = block(x.detach())
    return x


def changing_what_they_share(net, x):
    for number, block in enumerate(net.blocks):
        net.shared.place = number
        x = block(x)
    return x


def appending(block, x, cache):
    cache.append(x * block.weight)
    return cache[-1]


def looking(block, x, **kwargs):
    return x * block.weight


def by_shared(block, x):
    return x * block.weight * (block.shared.place + 1)


CALLS = {
    "twice": (twice, looking),
    "with a cache": (with_cache, appending),
    "with a number of its own": (with_number, looking),
    "with an object": (with_object, looking),
    "with other lists": (with_lists, looking),
    "with other shapes": (in_other_shapes, looking),
    "with other strides": (in_other_strides, looking),
    "with other dtypes": (in_other_kinds, looking),
    "in other modes": (in_other_modes, looking),
    "under a mode of the user's": (under_a_mode, looking),
    "under a function mode of the user's": (under_a_function_mode, looking),
    "with a hook on all modules": (with_a_global_hook, looking),
    "after the step has changed it": (changing_them, looking),
    "after the step has changed what they share": (changing_what_they_share, by_shared),
    "after the step may have changed what they share": (changing_what_they_share, by_shared),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_layer_is_run_that_is_called(how):
    forward, of_blocks = CALLS[how]
    model = Chain(*blocks(of_blocks, place=lambda number: 0), forward=forward)
    if forward is changing_what_they_share:
        model.shared = (types.SimpleNamespace if "may" in how else Settings)(place=0)
        for block in model.blocks:
            block.shared = model.shared
    assert not_run(model) == []


def test_gradients_that_a_layer_is_given_are_told_apart():
    """Two kinds of block: those whose argument needs a gradient, and those whose argument does not."""
    assert not_run(Chain(*blocks(count=6), forward=with_and_without_gradient)) == names(1, 3, 4, 5)


def test_layers_that_the_step_freezes():
    """What a block returns needs a gradient or not, and the glue may ask for it."""
    assert not_run(Chain(*blocks(), forward=freezing_them)) in ([], names(2))


def test_whether_arguments_are_one_tensor():
    def forward(net, x):
        for number, block in enumerate(net.blocks):
            x = block(x, other=x if number % 2 else x.clone())
        return x

    def passing(block, x, other):
        return (x * block.weight) if x is other else (x * block.weight).view(-1).view(-1, WIDTH)

    assert not_run(Chain(*blocks(passing, count=6), forward=forward)) == names(3, 4, 5)


def test_what_uses_a_parameter_of_another_module():
    class Tied(Row):
        def __init__(self, *given):
            super().__init__(*given)
            self.scale = nn.Parameter(torch.ones(WIDTH))

    row = Tied(*blocks(lambda block, x: x * block.weight * row.scale))
    assert not_run(row) == []


# -- what could not be seen ----------------------------------------------------------------------------------------


def hidden(limit):
    """Blocks whose place in the model decides, as from a list outside, beyond a length."""
    places = {}

    def forward(block, x):
        place = places.setdefault(id(block), len(places))
        return (x * block.weight)[: -1 if place == 3 and len(x) > limit else None]

    return Row(*blocks(forward))


def test_what_an_earlier_shape_has_shown_counts():
    """Nothing says why the blocks differ, so that none of them is trusted for any shape."""
    state = Counter()

    def forward(block, x):
        state["calls"] += 1
        y = x * block.weight
        return y.neg().neg() if state["calls"] % 2 else y

    assert not_run(Row(*blocks(forward)), new=9) == []


def test_what_no_shape_has_shown_is_left_to_the_first_run():
    """Here a plan is wrong, and tests/test_unseen.py tells what becomes of it."""
    assert not_run(hidden(4), before=(3,), new=6, same=False) == names(2, 3)


def test_a_layer_that_is_called_again_for_a_new_shape_only():
    def forward(net, x):
        for block in net.blocks:
            x = block(x)
        return net.blocks[3](x) if len(x) > 4 else x

    assert not_run(Chain(*blocks(), forward=forward)) == []


def test_a_failure_is_that_of_the_whole_trace():
    """It names the layer, and a trace that was given up is no part of it."""

    def forward(net, x):
        for block in net.blocks:
            x = block(x)
            if block is net.blocks[2] and len(x) > 4:
                assert x.sum() > 0
        return x

    with pytest.raises(TraceError, match=r"from layer 'blocks.2' while layer 'blocks.3' is still to run") as found:
        not_run(Chain(*blocks(), forward=forward))
    assert found.value.__context__ is None


def test_classes_are_left_as_they_were():
    row = Row(*blocks(number=lambda number: number))
    before = dict(vars(Block))
    not_run(row)
    assert dict(vars(Block)) == before
    assert [block.number for block in row.blocks] == [0, 1, 2, 3]
