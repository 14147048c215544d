"""Messages on real ranks: buckets change no bit, gathers leave before they are needed, compilation changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from proving import prove
from runtime.small_gpt import TENSOR_PARALLEL, batch, make_gpt
from runtime.training import Trained, check_close, train
from search.small_models import Chain
from shardwise.programs import moves
from shardwise.runtime.transit import Departing

Record = list[tuple[str, str, int]]


def gpt_plan(mesh: sw.Mesh, bucket_bytes: int) -> sw.Plan:
    strategies = TENSOR_PARALLEL if "tp" in dict(mesh.axes) else None
    return sw.plan(
        make_gpt(),
        batch(8, 0),
        mesh.num_devices,
        mesh=mesh,
        strategies=strategies,
        bucket_bytes=bucket_bytes,
        search="sharding_propagation",
    )


def recorded(par: sw.Parallel) -> Record:
    assert par._ranks.record is not None
    found = [(c.kind, par.plan.mesh.format_axes(c.axes), c.num_bytes) for c in par._ranks.record]
    par._ranks.record.clear()
    return found


def accumulate(par: sw.Parallel) -> tuple[list[float], dict[str, torch.Tensor], Record]:
    """Two losses, the gradients accumulated over both batches, and the collectives of the second backward."""
    par._ranks.record = []
    losses = [par.step(*batch(8, 1)).item()]
    loss = par(*batch(8, 2))
    recorded(par)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in par.named_parameters() if p.grad is not None}
    return [*losses, loss.item()], gradients, recorded(par)


def with_and_without_buckets(mesh: sw.Mesh) -> list[Any]:
    """On a rank: buckets of the default size, of a few tensors, and none."""
    return [accumulate(sw.parallelize(make_gpt(), gpt_plan(mesh, size))) for size in (2**25, 5000, 0)]


LARGER = pytest.param(sw.Mesh(dp=2, tp=2), marks=pytest.mark.long)


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=2), LARGER], ids=str)
def test_buckets_change_the_number_of_messages_and_no_gradient(mesh: sw.Mesh, run_ranks: RunRanks) -> None:
    """A sum of two numbers does not depend on where in a message they stand: over an axis of two not a bit differs. The
    last norm is reduced over both axes: four summands, whose order does."""
    for big, small, none in run_ranks(with_and_without_buckets, mesh.num_devices, mesh):
        for losses, gradients, _ in (big, small):
            assert losses == none[0]
            assert gradients.keys() == none[1].keys()
            for name, gradient in gradients.items():
                if name.startswith("norm.") and mesh.num_devices == 4:
                    assert_close_as_sums(gradient, none[1][name], name)
                else:
                    assert torch.equal(gradient, none[1][name]), name
        counts = [len([c for c in record if c[2] > 8 and "dp" in c[1]]) for _, _, record in (big, small, none)]
        assert counts[0] == (2 if mesh.num_devices == 2 else 4)  # one of them is that of the positions, an activation
        assert counts[0] < counts[1] < counts[2]
        assert counts[2] == 28


def assert_close_as_sums(gradient: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Four summands in another order: at most 3 roundings of the largest partial sum, in either, and two batches."""
    scale = max(float(other.abs().max()), 1e-6)
    assert float((gradient - other).abs().max()) <= 2 * 6 * 4 * 2**-53 * scale, name


def over_four() -> list[Any]:
    return [accumulate(sw.parallelize(make_gpt(), gpt_plan(sw.Mesh(dp=4), size))) for size in (2**25, 0)]


@pytest.mark.long
def test_over_more_ranks_only_the_order_of_additions_differs(run_ranks: RunRanks) -> None:
    for big, none in run_ranks(over_four, 4):
        assert big[0] == pytest.approx(none[0], rel=1e-15)
        for name, gradient in big[1].items():
            assert_close_as_sums(gradient, none[1][name], name)


def make_mlp(layers: int = 4) -> Chain:
    torch.manual_seed(0)
    return Chain(layers, 8, bias=True, act=torch.tanh).double()


X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stored_in_shards() -> sw.Plan:
    """Data parallelism with parameters kept in shards, which are gathered when they are needed: edited by hand. Buckets
    hold two layers; one weight is split along the dim that does not come first."""
    plan = sw.plan(make_mlp(), X, 2, bucket_bytes=2 * 72 * 8, search="sharding_propagation")
    entries = tuple(
        replace(e, layout=e.layout.replace("[8, 8]", STORED.get(e.name, "[8@dp, 8]")).replace("[8]", "[8@dp]"))
        for e in plan.parameters
    )
    return plan.revised(parameters=entries, conversions=None)


STORED = {"layers.1.weight": "[8, 8@dp]"}


def gather_parameters() -> list[tuple[Any, ...]]:
    """On a rank, with tensors that share buffers and with all weights by themselves: ``gathered``."""
    shared = gathered()
    with mock.patch.object(moves, "LARGE", 64):
        return [shared, gathered()]


def gathered() -> tuple[Any, ...]:
    """On a rank: loss, gradients and collectives of a step, the steps of the program that belong to buckets, and how
    many buffers each of their messages has."""
    par = sw.parallelize(make_mlp(), stored_in_shards())
    loss = par(X)
    par._ranks.record = []
    loss = par(X)
    forward = recorded(par)
    loss.backward()
    backward = recorded(par)
    transit = [n.target for n in par.program().graph.nodes if n.op == "call_module" and "linear" not in str(n.target)]
    gradients = {name: p.grad for name, p in par.named_parameters()}
    buffers = [len(m.message.parcels) for m in par.program().modules() if isinstance(m, Departing)]
    return loss.item(), gradients, forward, backward, [str(name).split("_")[0] for name in transit], buffers


def test_parameters_stored_in_shards_are_gathered_in_buckets_before_they_are_needed(run_ranks: RunRanks) -> None:
    model = make_mlp()
    loss = model(X)
    loss.backward()
    prove(make_mlp(), X, stored_in_shards())
    for rank, (shared, alone) in enumerate(run_ranks(gather_parameters, 2)):
        for own, gradients, forward, backward, transit, _ in (shared, alone):
            assert own == pytest.approx(loss.item(), rel=1e-14)
            for name, parameter in model.named_parameters():
                want = parameter.grad.chunk(2, dim=int(name in STORED))[rank]
                torch.testing.assert_close(gradients[name], want, rtol=1e-12, atol=1e-15)
            assert [kind for kind, _, _ in forward] == ["all_gather", "all_gather", "all_reduce"]
            assert [kind for kind, _, _ in backward] == ["reduce_scatter", "reduce_scatter"]
            # The second bucket leaves before the first one is waited for.
            assert transit[:3] == ["depart", "depart", "arrive"], transit
        # Whether tensors share buffers changes no bit, and not what is recorded: two weights, and two biases together.
        assert (shared[5], alone[5]) == ([1, 1], [3, 3])
        assert shared[2:4] == alone[2:4]
        for name, gradient in shared[1].items():
            assert torch.equal(gradient, alone[1][name]), name


def compiled_and_not(mesh: sw.Mesh) -> list[Trained]:
    strategies = {"layers.0": "n@tp"} if "tp" in dict(mesh.axes) else None
    model = make_mlp(2)  # Inductor compiles code for a second or more per section
    plan = sw.plan(model, X, 2, mesh=mesh, search="sharding_propagation", strategies=strategies)
    pars = [sw.parallelize(copy.deepcopy(model), plan, compile=choice) for choice in (False, True)]
    return [train(par, [(X,)] * 3, torch.optim.SGD(par.parameters(), lr=0.1)) for par in pars]


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=2), sw.Mesh(tp=2)], ids=str)
@pytest.mark.sampled(1)
def test_torch_compile_computes_the_same(mesh: sw.Mesh, run_ranks: RunRanks) -> None:
    """Fused kernels round a tanh and a sum differently: 1e-12 of float64 after three steps."""
    for eager, compiled in run_ranks(compiled_and_not, 2, mesh):
        assert compiled.losses == pytest.approx(eager.losses, rel=1e-12)
        check_close(compiled.state, eager.state, rtol=1e-12, atol=1e-14, what="compiled")


def frozen_and_unused() -> list[str]:
    """On a rank: a frozen parameter and one that the loss does not need."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (nn.Linear(8, 8) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.frozen(self.used(x)).square().mean(), self.unused(x)

    torch.manual_seed(0)
    par = sw.parallelize(
        Partly().double(), sw.plan(Partly().double(), X, dist.get_world_size(), search="sharding_propagation")
    )
    par.step(X)
    return [name for name, p in par.named_parameters() if p.grad is not None]


def test_parameters_without_gradient_get_none(run_ranks: RunRanks) -> None:
    assert run_ranks(frozen_and_unused, 2) == [["used.weight", "used.bias"]] * 2
