"""Sizes that do not divide by the number of devices: a vocabulary of 50,257, 30 heads and a batch of 6 on four."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from proving import prove
from shardwise.runtime.local_shards import shard

VOCABULARY, HEADS, BATCH, TIME = 50_257, 30, 6, 5


class OneBlock(nn.Module):
    """A block of GPT-2 with tied embeddings; ``heads``: the strategy of its attention, if it has one."""

    def __init__(self, heads: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 2 * HEADS
        self.tokens, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        attention = F.scaled_dot_product_attention
        self.attention = sw.shard(attention, heads) if heads else attention

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        batch, time, width = x.shape
        q, k, v = (t.view(batch, time, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = self.attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, BATCH, TIME), generator=generator)
    return ids, labels


TENSOR_PARALLEL = {"head": "n@tp", "tokens": "v@tp", "up": "n@tp"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("", {"mesh": sw.Mesh(dp=4)}),
    "data parallel": ("", {"mode": "data_parallel"}),
    "semi-auto": ("h@tp", {"mode": "semi_auto", "mesh": sw.Mesh(tp=4), "strategies": TENSOR_PARALLEL}),
    "auto, 2 x 2": ("h@tp", {"mesh": sw.Mesh(dp=2, tp=2), "strategies": TENSOR_PARALLEL}),
}


def planned(name: str) -> tuple[OneBlock, sw.Plan]:
    heads, options = PLANS[name]
    model = OneBlock(heads)
    return model, sw.plan(model, batch(), 4, optimizer="sgd", **options)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(1)
def test_a_model_whose_sizes_do_not_divide_equals_one_device(name: str) -> None:
    model, plan = planned(name)
    prove(model, batch(), plan, steps=1)
    if name == "semi-auto":  # shards of 12,564 or 12,565 rows, and of 7 or 8 heads
        assert str(plan.layouts["tokens.weight"]) == f"[{VOCABULARY}@tp, 60]"
        rows = {plan.layouts["tokens.weight"].local_shape(plan.mesh.coordinates(rank))[0] for rank in range(4)}
        assert rows == {12_564, 12_565}
        assert [e.strategy for e in plan.operators if "attention" in e.target] == ["h@tp"]
    elif name == "data parallel":
        assert "6@dp" in str(plan.layouts["args[0]"])


def stepped() -> dict[str, float]:
    """On a rank: the error of the loss, and of every gradient relative to its largest element, in float64."""
    heads, options = PLANS["semi-auto"]
    plan = sw.plan(OneBlock(heads).double(), batch(), 4, **options)
    par = sw.parallelize(OneBlock(heads).double(), plan)
    loss = par.step(*batch())
    alone = OneBlock().double()
    want = alone(*batch())
    want.backward()
    errors = {"loss": float((loss - want.detach()).abs())}
    for name, parameter in par.named_parameters():
        whole = alone.get_parameter(name).grad
        own = shard(whole, plan.layouts[name], plan.mesh.coordinates(dist.get_rank()))
        errors[name] = float((parameter.grad - own).abs().max() / whole.abs().max())
    return errors


def test_four_real_ranks_equal_one_device(run_ranks: RunRanks) -> None:
    for errors in run_ranks(stepped, 4):
        assert len(errors) == 12
        assert max(errors.values()) < 1e-11, errors


class Mixed(nn.Module):
    """Layers that look at the whole batch beside those that do not, and a view of batch and time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x.flatten(0, 1))).relu()
        return self.down(h.view(x.shape[0], x.shape[1], -1).mean(1)).square().mean()


def odd_batches() -> dict[str, float]:
    """On a rank: per batch size and mesh, the largest error of the loss, gradients and parameters after a step."""
    errors: dict[str, float] = {}
    for mesh, sizes in ((sw.Mesh(dp=4), (5, 6, 7)), (sw.Mesh(a=2, b=2), (5,))):
        for samples in sizes:
            x = torch.randn(samples, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
            plan = sw.plan(Mixed().double(), x, 4, mesh=mesh, mode="data_parallel", optimizer="sgd")
            par, alone = sw.parallelize(Mixed().double(), plan), Mixed().double()
            optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (par, alone)]
            loss, want = par.step(x), alone(x)
            want.backward()
            for optimizer in optimizers:
                optimizer.step()
            pairs = [(loss, want)]
            for name, parameter in alone.named_parameters():
                mine = par.get_parameter(name)
                pairs += [(mine, parameter), (mine.grad, parameter.grad)]
            rows = plan.layouts["args[0]"].local_shape(mesh.coordinates(dist.get_rank()))[0]
            assert rows in (samples // 4, samples // 4 + 1)
            errors[f"{samples} on {mesh}"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return errors


def test_batches_that_do_not_divide_have_a_part_on_each_of_four_ranks(run_ranks: RunRanks) -> None:
    for errors in run_ranks(odd_batches, 4):
        assert len(errors) == 4
        assert max(errors.values()) < 1e-13, errors
