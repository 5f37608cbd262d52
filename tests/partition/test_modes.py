"""The modes that look on: lifted from the stack where they can be, and never in the user's way."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pp.partition.modes import Watching, asks_for_device, lifted
from tests.partition.tracing import Net, lives, trace


class Counting(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Looking(Watching):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_the_private_names_of_torch():
    assert callable(_python_dispatch._get_current_dispatch_mode)
    assert callable(_python_dispatch._pop_mode_temporarily)
    assert torch.ops.prim.device.default


def test_a_lifted_mode_sees_nothing_and_comes_back():
    mode = Looking()
    with mode:
        torch.ones(2) + 1
        before = mode.seen
        with lifted(mode) as could:
            torch.ones(2) + 1
        assert could
        assert mode.seen == before
        torch.ones(2) + 1
    assert mode.seen > before


def test_a_mode_below_one_of_the_users_stays():
    mode, own = Looking(), Counting()
    with mode, own, lifted(mode) as could:
        torch.ones(2) + 1
    assert not could
    assert own.seen == mode.seen > 0


def test_a_mode_comes_back_after_an_error():
    mode = Looking()
    with mode:
        try:
            with lifted(mode):
                raise KeyError
        except KeyError:
            pass
        torch.ones(2) + 1
    assert mode.seen > 0


def test_a_question_for_the_device_is_no_operator():
    with FakeTensorMode():
        fake = torch.ones(2)
    assert asks_for_device(torch.ops.prim.device.default, (fake,))
    assert not asks_for_device(torch.ops.prim.device.default, (torch.ones(2),))
    assert not asks_for_device(torch.ops.aten.add.Tensor, (fake,))


def skips(net, x):
    first = net.layers[0](x)
    second = net.layers[1](first) * 2
    return net.layers[2](second + first).sum()


def skips_in_own_mode(net, x):
    with Counting() as own:
        result = skips(net, x)
    assert own.seen > 0
    return result


def test_layers_under_a_mode_of_the_users_are_traced_like_others():
    x = torch.ones(3, 4)
    assert lives(trace(Net(3, skips_in_own_mode), x)) == lives(trace(Net(3, skips), x))


def test_costs_are_counted_where_they_are_wanted():
    x = torch.ones(3, 4)
    plain, quick = trace(Net(3), x), trace(Net(3), x, measured=False)
    assert all(call.flops == 2 * 3 * 4 * 4 and call.saved_bytes > 0 for call in plain.calls)
    assert all(call.flops == call.saved_bytes == 0 for call in quick.calls)
    assert [(call.layer, call.needs, call.leaves) for call in plain.calls] == [
        (call.layer, call.needs, call.leaves) for call in quick.calls
    ]


def test_the_second_of_two_runs_keeps_the_costs_of_the_first():
    found = trace(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.ones(3, 4), twice=True)
    assert [call.flops for call in found.calls] == [2 * 3 * 4 * 5, 2 * 3 * 5 * 3]


@pytest.mark.parametrize("measured", [True, False])
def test_hooks_of_the_users_on_what_is_saved_see_no_fake_tensor(measured):
    saved = []

    def pack(tensor):
        saved.append(type(tensor))
        return tensor

    def step(net, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = net.layers[0](x) * 2
            return (net.layers[1](x) ** 2).sum()

    trace(Net(2, step), torch.ones(3, 4), measured=measured)
    assert saved, "the code between the layers saves"
    assert FakeTensor not in saved
