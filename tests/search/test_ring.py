"""Ring attention: a strategy named ``ring``, compared with one device, outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.rules.ring import ring_attention


class Attention(nn.Module):
    """Every kind of mask: ``None``, ``bool`` (of which a row sees nothing), ``learned``, ``broadcast`` columns."""

    def __init__(self, length: int, heads: int = 4, kv_heads: int = 4, causal: bool = False, mask: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.queries = parameter(2, heads, length, 6)
        self.keys, self.values = parameter(2, kv_heads, length, 6), parameter(2, kv_heads, length, 5)
        self.bias = parameter(length, length)
        self.causal, self.mask, self.grouped = causal, mask, heads != kv_heads

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        masks = {"": None, "bool": allowed, "learned": self.bias, "broadcast": allowed[:, :, :1] | allowed[:, :, 1:2]}
        attend = sw.shard(F.scaled_dot_product_attention, "ring@cp")
        seen = attend(
            self.queries * x, self.keys, self.values, masks[self.mask], is_causal=self.causal, enable_gqa=self.grouped
        )
        return (seen * seen).mean()


def given(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand((2, 1, length, length), generator=generator) < 0.6
    allowed[0, 0, 1] = False
    return torch.randn((2, 1, length, 1), generator=generator), allowed


KINDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"mask": "bool"},
    {"mask": "learned"},
    {"mask": "broadcast"},
    {"kv_heads": 2, "causal": True},
    {"kv_heads": 2, "mask": "bool"},
]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [(kind, sw.Mesh(cp=4)) for kind in KINDS]
    + [(kind, mesh) for kind in KINDS[1:5:3] for mesh in (sw.Mesh(cp=2), sw.Mesh(cp=3), sw.Mesh(dp=2, cp=2))],
    ids=str,
)
def test_a_ring_equals_one_device(kind: dict[str, Any], mesh: sw.Mesh) -> None:
    length = 12
    model = Attention(length, **kind)
    plan = sw.plan(model, given(length), mesh.num_devices, mesh=mesh, search="sharding_propagation")
    report = sw.verify(model, given(length), plan)
    assert report.ok, report
    own = mesh.size_of(mesh.expand("cp"))
    handed_on = [c for c in plan.collectives() if c.kind == "halo_exchange"]
    assert len(handed_on) == 2 * (own - 1)  # keys and values, one step less than there are devices
    block = (
        2 // mesh.size_of(mesh.expand("dp") if "dp" in dict(mesh.axes) else ()) * model.keys.shape[1] * length // own
    )
    assert {c.num_bytes for c in handed_on} == {block * 6 * 4, block * 5 * 4}
    assert "all_gather" not in {c.kind for c in plan.collectives()}


def test_plans_with_a_ring_are_read_back() -> None:
    model = Attention(8, causal=True)
    plan = sw.plan(model, given(8), 4, mesh=sw.Mesh(dp=2, cp=2), search="sharding_propagation")
    again = sw.Plan.from_json(plan.to_json())
    assert again.strategies["/scaled_dot_product_attention"] == "b@dp ring@cp"
    assert sw.verify(model, given(8), again).ok


def test_lengths_that_do_not_divide_gather_keys_and_are_right() -> None:
    model = Attention(10, causal=True)
    plan = sw.plan(model, given(10), 4, mesh=sw.Mesh(cp=4), search="sharding_propagation")
    assert "halo_exchange" not in {c.kind for c in plan.collectives()}
    assert sw.verify(model, given(10), plan).ok


def test_other_numbers_of_keys_than_of_queries_have_no_ring() -> None:
    class Cross(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return sw.shard(F.scaled_dot_product_attention, "ring@cp")(q, k, k).mean()

    with pytest.raises(sw.LayoutError, match="no factor 'ring'"):
        sw.plan(
            Cross(),
            (torch.randn(2, 2, 8, 4), torch.randn(2, 2, 6, 4)),
            2,
            mesh=sw.Mesh(cp=2),
            search="sharding_propagation",
        )


@pytest.mark.parametrize("run", [1, 2, 4, 8])
def test_the_lowering_is_attention_however_many_blocks(run: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, 8, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ring = ring_attention(q, k, v, is_causal=True, runs=(2, 2, run, 4))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ring, whole)
    seed = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(ring, (q, k, v), seed), torch.autograd.grad(whole, (q, k, v), seed), strict=True
    ):
        torch.testing.assert_close(one, other)
