"""Work that depends on no parameter and ends in a few numbers: split and priced as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from proving import prove
from search.cost_graphs import cluster_of
from shardwise.search import domains


class Weighted(nn.Module):
    """A loss times a number that is made of the inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.kind = nn.Linear(8, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        loss = self.head(x).square().mean()
        if self.kind == "products":
            return loss * (x @ x.T).square().sum()
        if self.kind == "distances":
            return loss / (1 + (x[:, None] - x[None]).square().sum(-1).sqrt().max())
        if self.kind == "counts":
            return loss * (x[:, :, None] * x[:, None, :] > 0).sum()
        if self.kind == "logarithms":
            return loss * (x @ x.T).exp().logsumexp((0, 1))
        similar = x @ x.T  # read by what has parameters, too
        return loss * similar.sum() + (similar.softmax(-1) @ self.head(x)).square().mean()


# The operators that do most of the work.
KINDS = {
    "products": ("/matmul", "/square_1", "/sum_1"),
    "distances": ("/sub", "/square_1", "/sum_1"),
    "counts": ("/mul", "/gt", "/sum_1"),
    "logarithms": ("/matmul", "/exp", "/logsumexp"),
    "both": ("/matmul", "/sum_1"),
}
MESHES = (sw.Mesh(dp=4), sw.Mesh(a=2, b=2))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_work_of_inputs_is_split_and_in_the_price_and_its_bound(kind: str, mesh: sw.Mesh) -> None:
    with torch.device("meta"):
        model, x = Weighted(kind), torch.randn(4096 if kind != "counts" else 2**18, 8)
    plan = sw.plan(model, x, 4, mesh=mesh)
    strategies = {entry.name: entry.strategy for entry in plan.operators}
    assert all(strategies[name] for name in KINDS[kind]), strategies
    prediction = plan.prediction
    assert prediction is not None
    assert prediction.additive_price == pytest.approx(prediction.simulated_seconds, rel=0.1)
    assert prediction.bound > 0.9 * prediction.additive_price


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_work_of_inputs_that_is_split_equals_one_device(
    kind: str, mesh: sw.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domains, "HEAVY_INPUT_WORK", 2)
    model, x = Weighted(kind), torch.randn(30, 8)
    plan = sw.plan(model, x, cluster_of(2, 4), mesh=mesh)
    assert any({e.name: e.strategy for e in plan.operators}[name] for name in KINDS[kind])
    prove(model, x, plan, steps=2)


def test_masks_and_positions_are_made_where_they_are_needed() -> None:
    """They reduce nothing, or little, so their consumers say how they are split."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            at = torch.arange(x.shape[0])
            mask = (at[:, None] >= at[None, :]) & (x.sum(-1) > 0)[None, :]
            y = self.head(x)
            return (y @ y.T).masked_fill(mask, 0.0).mean()

    with torch.device("meta"):
        model, x = Masked(), torch.randn(4096, 8)
    plan = sw.plan(model, x, 4)
    search = plan.report.finished_search
    names = {op.name for op in search.cost.domains.operators}
    assert "/matmul" in names
    assert not names & {"/ge", "/bitwise_and", "/gt", "/sum"}, names


class Scaled(nn.Module):
    """Activations divided and chosen by extrema without gradients, as quantization and normalization do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        seen = hidden.detach()
        hidden = hidden / (seen.abs().amax() - seen.amin(0) + 1)
        hidden = torch.where((seen > 3).any(0), hidden, -hidden)
        return self.down(hidden).square().mean()


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=2, tp=2), sw.Mesh(x=3)])
def test_extrema_of_activations_are_split_and_combined(mesh: sw.Mesh) -> None:
    module, x = Scaled(), torch.randn(4800, 32)
    plan = sw.plan(module, x, cluster_of(2, mesh.num_devices), mesh=mesh, cache=False)
    for name in ("/amax", "/amin", "/any"):
        assert "@" in plan.strategies[name], f"{name} is split"
    assert prove(module, x, plan).ok
