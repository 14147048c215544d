"""Shares of FLOPs and bytes against counts by hand and against PyTorch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from models.share import SplitShare, share_of_plan
from shardwise.costs.flops import FLOPS, flops_of
from shardwise.graph.capture import capture
from shardwise.graph.ir import Ref
from shardwise.rules.attention import ATTENTION
from shardwise.rules.convolution import CONVOLUTION
from shardwise.rules.experts import EXPERTS
from shardwise.rules.head import HEAD
from shardwise.rules.matmul import MATMUL
from shardwise.rules.recurrent import RECURRENT


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def normal(*shape):
    return torch.randn(shape)


CALLS = {
    "linear": (nn.functional.linear, normal(3, 5, 7), normal(11, 7), normal(11)),
    "matmul": (torch.matmul, normal(2, 3, 5, 7), normal(3, 7, 4)),
    "mm": (torch.mm, normal(5, 7), normal(7, 4)),
    "bmm": (torch.bmm, normal(3, 5, 7), normal(3, 7, 4)),
    "addmm": (torch.addmm, normal(4), normal(5, 7), normal(7, 4)),
    "baddbmm": (torch.baddbmm, normal(3, 5, 4), normal(3, 5, 7), normal(3, 7, 4)),
    "einsum": (lambda x, y: torch.einsum("...ik,...kj->...ij", x, y), normal(2, 3, 5, 7), normal(2, 3, 7, 4)),
    "conv2d": (
        lambda x, w: nn.functional.conv2d(x, w, stride=2, groups=2),
        normal(2, 4, 9, 9),
        normal(6, 2, 3, 3),
    ),
    "conv_transpose2d": (nn.functional.conv_transpose2d, normal(2, 4, 5, 5), normal(4, 6, 3, 3)),
    "attention": (
        nn.functional.scaled_dot_product_attention,
        normal(2, 3, 5, 8),
        normal(2, 3, 7, 8),
        normal(2, 3, 7, 8),  # values of another width are padded to that of the keys
    ),
}


def flops_of_graph(graph):
    shapes = {value.name: value.shape for value in graph.values}
    return sum(
        flops_of(op, tuple(shapes[n] for n in op.operands), tuple(shapes[n] for n in op.results)) for op in graph.ops
    )


@pytest.mark.parametrize("name", CALLS)
def test_flops_are_those_that_pytorch_counts(name):
    function, *tensors = CALLS[name]
    graph = capture(Call(function), tuple(tensors)).graph
    counted = flops_of_graph(graph)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        function(*(tensor.to("meta") for tensor in tensors))
    assert counted == counter.get_total_flops() > 0


def test_flops_of_products_that_are_added_up_are_those_of_the_products():
    graph = capture(Call(torch.addbmm), (normal(5, 4), normal(3, 5, 7), normal(3, 7, 4))).graph  # unknown to PyTorch
    assert flops_of_graph(graph) == 2 * 3 * 5 * 7 * 4


def test_every_contraction_convolution_and_attention_with_a_rule_is_counted():
    convolutions = {target for target in CONVOLUTION if "conv" in str(target)}
    backward = {torch.ops.shardwise.grouped_mm_of_x.default, torch.ops.shardwise.grouped_mm_of_weight.default}
    of_layers = ATTENTION.keys() | RECURRENT.keys() | EXPERTS.keys() | HEAD.keys()
    with_rules = MATMUL.keys() | convolutions | of_layers
    kernels = {torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}  # with a bias; in float8
    assert FLOPS.keys() == with_rules | backward | kernels


def test_flops_of_recurrent_layers_and_experts_are_those_of_their_products():
    layer = nn.LSTM(5, 2)
    graph = capture(layer, (normal(4, 3, 5),)).graph
    (op,) = (op for op in graph.ops if op.target in RECURRENT)
    shapes = tuple(graph.by_name[name].shape for name in op.operands)
    assert flops_of(op, shapes, ()) == 4 * 3 * 2 * (8 * 5 + 8 * 2)
    (target,) = EXPERTS
    experts = replace(op, target=target, args=(*map(Ref, "xwe"), (3,), (0,), (3,)))
    assert flops_of(experts, ((6, 4), (3, 4, 7), (6,)), ()) == 2 * 6 * 4 * 7
    assert flops_of(experts, ((3, 4), (3, 4, 7), (6,)), ()) == 2 * 6 * 4 * 7  # two experts of each token
    assert flops_of(experts, ((6, 4), (1, 4, 7), (6,)), ()) == 2 * 2 * 4 * 7  # one of three experts
    for part in ("of_x", "of_weight"):
        target = getattr(torch.ops.shardwise, f"grouped_mm_{part}").default
        backward = replace(op, target=target, args=(*map(Ref, "gxwe"), (3,), (0,), (3,)))
        assert flops_of(backward, ((6, 7), (3, 4), (1, 4, 7), (6,)), ()) == 2 * 2 * 4 * 7


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(12, 36, bias=False)
        self.narrow = nn.Linear(36, 12, bias=False)

    def forward(self, x, target):
        return nn.functional.mse_loss(self.narrow(torch.tanh(self.wide(x))), target)


def share_of_pair(mesh: sw.Mesh, **strategies: str) -> SplitShare:
    model, inputs = Pair(), (torch.randn(8, 12), torch.randn(8, 12))
    plan = sw.plan(model, inputs, mesh.num_devices, mesh=mesh, strategies=strategies, search="sharding_propagation")
    return share_of_plan(plan, capture(model, inputs).graph)


def test_a_plan_that_divides_everything_has_the_shares_one():
    share = share_of_pair(sw.Mesh(dp=2, tp=2), wide="n@tp", narrow="k@tp")
    assert share.data_axes == ("dp",)
    assert (share.flops, share.parameters) == (1.0, 1.0)
    assert share.operators_unsplit == share.parameters_unsplit == ()


def test_an_operator_that_every_device_repeats_takes_its_part_from_the_share():
    share = share_of_pair(sw.Mesh(dp=2, tp=2), wide="n@tp", narrow="I@tp")
    # half of the FLOPs over 4 devices, half over 2: the busiest does 3/8
    assert share.flops == pytest.approx((1 - 3 / 8) / (1 - 1 / 4))
    (item,) = share.operators_unsplit
    assert (item.name, item.of_total, item.reason) == ("narrow/linear", 0.5, "whole over tp")
    assert share.flops + item.lost == pytest.approx(1.0)


def test_sizes_that_do_not_divide_are_counted_on_the_busiest_device():
    share = share_of_pair(sw.Mesh(tp=5), wide="n@tp", narrow="k@tp")
    assert share.flops == pytest.approx((1 - 8 / 36) / (1 - 1 / 5))
    assert share.parameters == pytest.approx((1 - 8 / 36) / (1 - 1 / 5))
    assert [item.reason for item in share.operators_unsplit] == ["n: 36 over 5", "k: 36 over 5"]
    assert [item.reason for item in share.parameters_unsplit] == ["dim 0: 36 over 5", "dim 1: 36 over 5"]


def test_data_parallelism_is_not_asked_to_split_parameters():
    share = share_of_pair(sw.Mesh(dp=4))
    assert (share.flops, share.parameters) == (1.0, None)
    # forward: the loss, one float; backward: both weights; twice 3/4 of each is sent
    assert share.bytes_sent.backward == pytest.approx(2 * 3 / 4 * 2 * 12 * 36 * 4)
    assert share.bytes_sent.forward + share.bytes_sent.delivered == pytest.approx(2 * 3 / 4 * 4)


def test_one_device_has_nothing_to_split():
    share = share_of_pair(sw.Mesh(dp=1))
    assert (share.flops, share.parameters) == (None, None)
