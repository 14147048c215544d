"""What a model asks for and a plan does not do is refused by name, or announced."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.errors import CaptureError, CaptureWarning, LayoutError
from shardwise.graph.capture import capture


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.function(self, x).sum()


TRANSFORMED = {
    "linearize": lambda self, x: torch.func.linearize(lambda w: (x @ w).sin(), self.weight)[1](self.weight),
    "cond": lambda self, x: torch.cond(x.sum() > 0, lambda y: y @ self.weight, lambda y: y * 2, (x,)),
    "map": lambda self, x: torch._higher_order_ops.map(lambda row: row * 2, x @ self.weight),
    "scan": lambda self, x: torch._higher_order_ops.scan(lambda c, r: (c + r, c * 1), x[0] @ self.weight, x)[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_constructs_of_torch_are_refused_with_their_own_mend(name):
    mend = {"cond": "torch.where", "scan": "loop", "map": "loop"}.get(name, "torch.func.jvp")
    construct = {"cond": "torch.cond", "scan": "torch.scan", "map": "torch.map"}.get(name, "torch.func")
    with raises(CaptureError, construct, mend, source="test_announced.py") as refused:
        capture(Calls(TRANSFORMED[name]), (torch.ones(4, 4),))
    message = str(refused.value)
    assert ".data" not in message
    assert ".cuda()" not in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch.autocast warns of CUDA where there is none")
def test_autocast_of_a_device_that_is_not_here_is_named():
    def cast(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return x @ self.weight

    with raises(CaptureError, "torch.autocast", "x.device.type", source="test_announced.py") as refused:
        capture(Calls(cast), (torch.ones(4, 4),))
    assert ".cuda()" not in str(refused.value)


def test_arguments_that_forward_does_not_take_are_named():
    net, x, y = nn.Linear(4, 4), torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    for given, kwargs, mend in (
        ((x,), {"loss": F.cross_entropy}, ("missing a required argument: 'input'", "1 targets", "par.predict")),
        ((x, x, y), {"loss": F.cross_entropy}, ("par.predict", "too many positional arguments")),
        ((x, y), {}, ("1 positional argument, 2 were given", "loss=")),
        ((x, y), {"kwargs": {"scale": 2.0}}, "1 positional argument, 2 were given"),
        ((x,), {"kwargs": {"scale": 2.0}}, "'scale'"),
    ):
        with raises(CaptureError, "Linear.forward", mend) as refused:
            sw.plan(net, given, 2, **kwargs)
        assert ".cuda()" not in str(refused.value)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        h = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return sw.shard(F.scaled_dot_product_attention, "ring@cp")(h, h, h, dropout_p=0.1).sum()


def test_a_strategy_of_attention_that_drops_probabilities_is_refused_with_its_own_mend():
    with raises(LayoutError, 4, "/matmul", "dropout_p=0", op="/scaled_dot_product_attention"):
        sw.plan(Dropping(), torch.randn(2, 8, 8), 2, mesh=sw.Mesh(cp=2))


def test_sparse_gradients_are_dense_and_announced_under_a_priced_plan():
    net, ids = nn.Sequential(nn.Embedding(16, 4, sparse=True, padding_idx=1), nn.Linear(4, 4)), torch.arange(8)
    with pytest.warns(CaptureWarning, match="sparse=True"):
        plan = sw.plan(net, ids, 4, loss=lambda out: out.square().mean())
    with pytest.warns(CaptureWarning, match="sparse=True"):
        report = sw.verify(net, ids, plan, loss=lambda out: out.square().mean())
    assert report.ok, report


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_that_averages_over_all_batches(affine):
    net = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4, momentum=None, affine=affine), nn.Flatten())
    x = torch.randn(8, 2, 3, 3)
    for options in ({"mode": "data_parallel"}, {}):
        plan = sw.plan(net, x, 4, loss=lambda out: out.sin().mean(), **options)
        prove(net, x, plan, loss=lambda out: out.sin().mean())


@pytest.mark.parametrize("how", [{}, {"stages": 2}])
def test_so_does_it_over_micro_batches_each_of_which_is_a_batch(how):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    options = {"mode": "data_parallel", "global_batch": 8, "micro_batch": 4, **how}
    with pytest.warns(sw.errors.PlanWarning, match="running statistics"):
        plan = sw.plan(net, x, 2, loss=lambda out: out.sin().mean(), **options)
    prove(net, x, plan, loss=lambda out: out.sin().mean())


def test_a_loss_whose_backward_has_no_kernel_without_memory_is_planned():
    net, x, y = nn.Linear(4, 6), torch.randn(8, 4), torch.randint(6, (8,))
    plan = sw.plan(net, (x, y), 4, loss=F.multi_margin_loss)
    assert sw.verify(net, (x, y), plan, loss=F.multi_margin_loss).ok


READS_BITS = {
    "of a parameter": lambda self, x: x @ self.weight * (self.weight.detach().view(torch.int32) & 1),
    "of what is computed": lambda self, x: (y := x @ self.weight) * (y.detach().view(torch.int32) & 1),
    "as a float": lambda self, x: x @ self.weight * torch.ones(4, 4, dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("name", READS_BITS)
def test_bits_of_numbers_that_a_verification_widens_are_refused_by_it_and_planned(name):
    net, x = Calls(READS_BITS[name]), torch.ones(4, 4)
    plan = sw.plan(net, x, 2, mesh=sw.Mesh(dp=2))
    with raises(sw.ShardwiseError, "float64", op="/view", source="test_announced.py"):
        sw.verify(net, x, plan)


def test_a_pruned_model_is_planned_and_equal():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    prune.l1_unstructured(net[0], "weight", 0.5)
    net(x)
    plan = sw.plan(net, (x, torch.randn(4, 4)), 2, mesh=sw.Mesh(dp=2), loss=F.mse_loss)
    assert plan.collectives(backward=True)
    assert sw.verify(net, (x, torch.randn(4, 4)), plan, loss=F.mse_loss).ok


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.doubled = self.up.weight * 2

    def forward(self, x):
        return F.linear(self.up(x), self.doubled).square().mean()


def test_what_was_computed_from_a_parameter_once_is_not_taken_for_a_constant():
    with raises(CaptureError, "[4, 4]", source="test_announced.py"):
        sw.plan(Computed(), torch.randn(4, 4), 2, mesh=sw.Mesh(dp=2))


@pytest.mark.parametrize("options", [{}, {"micro_batch": 4}, {"momentum": None}], ids=["batch", "passes", "average"])
def test_a_synchronized_batch_norm_is_a_batch_norm_of_the_whole_batch(options):
    momentum, options = options.get("momentum", 0.1), {k: v for k, v in options.items() if k != "momentum"}
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.SyncBatchNorm(4, momentum=momentum), nn.Flatten(), nn.Linear(36, 2))
    x = torch.randn(8, 2, 3, 3)
    with warnings.catch_warnings(action="ignore", category=sw.errors.PlanWarning):
        plan = sw.plan(net, x, 2, mode="data_parallel", loss=lambda out: out.sin().mean(), **options)
    prove(net, x, plan, loss=lambda out: out.sin().mean())


class OfTable(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.weight = nn.Embedding(8, 4, **options), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("adjacency", torch.eye(4))

    def forward(self, x):
        return (self.table(x.long().abs() % 8) @ self.weight).sum()


def sparse_buffer():
    net = OfTable()
    net.adjacency = torch.eye(4).to_sparse()
    return net


WITH_A_FIX = {
    "max_norm": (lambda: OfTable(max_norm=1.0), ("max_norm scales rows of its table", "omit max_norm")),
    "sparse buffer": (sparse_buffer, ("sparse_coo", "adjacency.to_dense")),
    "sparse constant": (
        lambda: Calls(lambda self, x: torch.sparse.mm(torch.eye(4).to_sparse(), x @ self.weight)),
        ("to_sparse", "torch.matmul"),
    ),
    "places in a tensor": (
        lambda: Calls(lambda self, x: torch.tensor_split(x @ self.weight, torch.tensor([1, 2]))[1]),
        "tensor_split",
    ),
    "sections in a tensor": (
        lambda: Calls(lambda self, x: torch.tensor_split(x @ self.weight, torch.tensor(2))[1]),
        "tensor_split",
    ),
    "running statistics": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
        "track_running_stats=False",
    ),
}


@pytest.mark.parametrize("name", WITH_A_FIX)
def test_layers_that_are_not_captured_are_refused_with_a_fix(name):
    make, what = WITH_A_FIX[name]
    with raises(CaptureError, what):
        capture(make(), (torch.ones(4, 4),))


@pytest.mark.parametrize("given", [False, True])
def test_a_transformer_that_reads_its_mask_is_refused_with_the_argument(given):
    net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    x, mask = torch.randn(4, 6, 8), nn.Transformer.generate_square_subsequent_mask(6)
    if given:
        capture(net, (x, x), {"tgt_mask": mask, "tgt_is_causal": True})
        return
    with raises(CaptureError, "tgt_is_causal=True", source="transformer.py"):
        capture(net, (x, x), {"tgt_mask": mask})
