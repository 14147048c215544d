"""Outputs and buffers share memory on ranks where they do on one device, and nowhere else."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from proving import prove
from shardwise.errors import CaptureWarning
from shardwise.proof import ranks as proof
from shardwise.runtime import lazy_gather


class Keeps(nn.Module):
    """Updates buffers, and returns what the function (of itself and x) gives beside the loss."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self.register_buffer("ema", torch.arange(4.0))
        self.register_buffer("other", -torch.arange(4.0))
        self.function = function

    def forward(self, x):
        y = self.fc(x)
        return (y + self.ema).square().mean(), self.function(self, y)


def copied_first(copied):
    def function(net, y):
        before = copied(net.ema)
        net.ema.add_(1)
        return before

    return function


def exchanged(net, y):
    held = net.ema.clone()
    net.ema.copy_(net.other)
    net.other.copy_(held)
    return held


def rotated(net, y):
    with torch.no_grad():
        a, b = net.ema.clone(), net.other.clone()
        net.ema.copy_(b), net.other.copy_(a)
    return net.ema, net.other


def updated(result):
    def function(net, y):
        net.ema.mul_(0.5).add_(y.detach().mean(0))
        return result(net, y)

    return function


FUNCTIONS = {
    "clone": copied_first(lambda t: t.clone()),
    "reshape, clone": copied_first(lambda t: t.reshape(2, 2).clone()),
    "expand, clone": copied_first(lambda t: t.expand(3, 4).clone()),
    "to, copied": copied_first(lambda t: t.to(torch.float64, copy=True)),
    "copy_": copied_first(lambda t: torch.empty_like(t).copy_(t)),
    "contiguous of a view": copied_first(lambda t: t.view(2, 2).t().contiguous()),
    "stack": copied_first(lambda t: torch.stack([t])),
    "index": copied_first(lambda t: t[torch.tensor([1, 0])]),
    "dropout of nothing": copied_first(lambda t: nn.functional.dropout(t, 0.0, True)),
    "dropout in evaluation": copied_first(lambda t: nn.functional.dropout(t, 0.5, False)),
    "alpha dropout of nothing": copied_first(lambda t: nn.functional.alpha_dropout(t, 0.0, True)),
    "dropped channels of a view": copied_first(lambda t: nn.functional.dropout1d(t.view(1, 2, 2), 0.0, True)),
    "einsum of one operand": copied_first(lambda t: torch.einsum("i->i", t)),
    "positive": copied_first(lambda t: t.positive()),
    "real": copied_first(lambda t: t.real),
    "resolved": copied_first(lambda t: t.resolve_conj()),
    "at least one dim": copied_first(torch.atleast_1d),
    "at least two dims": copied_first(torch.atleast_2d),
    "a write through dropout": lambda net, y: (nn.functional.dropout(net.ema, 0.0, True).add_(1), net.ema)[1],
    "a write through two dims": lambda net, y: (torch.atleast_2d(net.ema).add_(1), net.ema.clone())[1],
    "double, float": copied_first(lambda t: t.double().float()),
    "half, float": copied_first(lambda t: t.half().float()),
    "to float64": copied_first(lambda t: t.to(torch.float64)),
    "to float64 by its name": copied_first(lambda t: t.to(dtype=torch.double)),
    "type float64": copied_first(lambda t: t.type(torch.float64)),
    "to float64 and back": copied_first(lambda t: t.to(torch.float64).to(torch.float32)),
    "double": copied_first(lambda t: t.double()),
    "float": copied_first(lambda t: t.float()),
    "a cast result": lambda net, y: (c := (h := y.detach() * 1).double(), h.add_(1), c)[2],
    "what no cast is": lambda net, y: (c := (h := y.detach() * 1).to(y.dtype), h.add_(1), c)[2],
    "the buffer, as it was": lambda net, y: net.ema,
    "the buffer, changed": updated(lambda net, y: net.ema),
    "a view of the buffer, changed": updated(lambda net, y: net.ema.view(2, 2)[:, 1]),
    "both": updated(lambda net, y: (net.ema, net.ema.clone(), net.ema.detach())),
    "a view taken before": lambda net, y: (net.ema[1:], net.ema.add_(1))[0],
    "the weight": lambda net, y: net.fc.weight.detach(),
    "a copy of the weight": lambda net, y: net.fc.weight.detach().clone(),
    "a transposed weight": lambda net, y: (net.fc.weight.t(), net.fc.weight.t().clone()),
    "exchanged": exchanged,
    "rotated": rotated,
    "the result and a copy": lambda net, y: (y, y.clone(), y.reshape(-1)),
}
MESH = sw.Mesh(dp=2, tp=2)


def plan_of(net, x, split=False):
    strategies = {"fc": "n@tp"} if split else {}
    return sw.plan(net, x, 4, mesh=MESH, strategies=strategies, mode="auto" if split else "data_parallel")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(6)
def test_a_plan_is_equal_whatever_is_done_to_memory_after_the_call(name):
    net, x = Keeps(FUNCTIONS[name]), torch.randn(8, 4)
    prove(net, x, plan_of(net, x, split=[*FUNCTIONS].index(name) % 2 == 0))


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("clone", "separate_memory"),
        ("expand, clone", "separate_memory"),
        ("a copy of the weight", "separate_memory"),
        ("the buffer, changed", "alias_buffers"),
        ("a view of the buffer, changed", "alias_buffers"),
        ("exchanged", "write_buffers"),
    ],
)
@pytest.mark.sampled(3)
def test_verify_sees_outputs_and_buffers_that_share_memory_where_one_device_does_not(name, without):
    def one_after_the_other(buffers, values):
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    broken = {
        "separate_memory": lambda outputs, memories, sources: list(outputs),
        "alias_buffers": lambda outputs, memories, whole: list(outputs),
        "write_buffers": one_after_the_other,
    }
    net, x = Keeps(FUNCTIONS[name]), torch.randn(8, 4)
    plan = plan_of(net, x)
    with mock.patch.object(proof, without, broken[without]):
        assert not sw.verify(net, x, plan).ok
    assert getattr(lazy_gather, without) is getattr(proof, without)


def steps(net, x, optimizer):
    """Loss and outputs of three steps, looked at when all are done."""
    found = []
    for _ in range(3):
        loss, rest = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, rest))
    return [[t.detach().clone() for t in torch.utils._pytree.tree_leaves(both)] for both in found]


def on_ranks(names):
    results = {}
    for name in names:
        torch.manual_seed(0)
        net, x = Keeps(FUNCTIONS[name]).double(), torch.randn(8, 4, dtype=torch.float64)
        alone = copy.deepcopy(net)
        expected = steps(alone, x, torch.optim.SGD(alone.parameters(), lr=0.1))
        par = sw.parallelize(net, plan_of(net, x) if dist.get_rank() == 0 else None)
        found = steps(par, x, torch.optim.SGD(par.parameters(), lr=0.1))
        worst = max(
            float((a - b).abs().max())
            for want, have in zip(expected, found, strict=True)
            for a, b in zip(want, have, strict=True)
        )
        buffers = max(float((par.get_buffer(n) - b).abs().max()) for n, b in alone.named_buffers())
        results[name] = worst, buffers
    return results


OF_EVERY_KIND = (
    *("expand, clone", "copy_", "dropout in evaluation", "a write through two dims", "to float64 and back"),
    *("a cast result", "the buffer, as it was", "a view of the buffer, changed", "both", "a view taken before"),
    *("a transposed weight", "exchanged", "the result and a copy"),
)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_EVERY_KIND, id="of every kind"),
        pytest.param(
            tuple(name for name in FUNCTIONS if name not in OF_EVERY_KIND), id="the others", marks=pytest.mark.long
        ),
    ],
)
def test_on_ranks_memory_is_that_of_one_device(names, run_ranks):
    for results in run_ranks(on_ranks, 4, names):
        # Means over 8 rows and sums over 4 ranks in another order: a few units in the last place of numbers up to 10.
        assert {name: errors for name, errors in results.items() if max(errors) > 1e-13} == {}


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.register_buffer("last", torch.zeros(8, 8))

    def forward(self, x):
        y = self.fc(x)
        self.last.copy_(y.detach())
        return y.sum(), self.last


def announced():
    net, x = Queue(), torch.randn(8, 4)
    plan = sw.plan(net, x, 2, mesh=sw.Mesh(tp=2), strategies={"fc": "n@tp"}, layouts={"last": "[8, 8@tp]"})
    par = sw.parallelize(net, plan)
    with warnings.catch_warnings(record=True, action="always") as caught:
        par(x)
    return [str(w.message) for w in caught if issubclass(w.category, CaptureWarning)]


def test_an_output_that_is_a_split_buffer_is_announced_as_a_copy(run_ranks):
    for messages in run_ranks(announced, 2):
        assert len(messages) == 1
        assert "the buffer last" in messages[0]
