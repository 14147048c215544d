"""Ring attention: a strategy named ``ring``, compared with one device, outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from costs.live_bytes import LiveBytes
from proving import prove
from raising import raises
from shardwise.dispatch_mode import OpRecorder
from shardwise.graph.capture import capture
from shardwise.rules import attention, ring
from shardwise.rules.attention_bands import Band, band_of
from shardwise.rules.attention_kernels import ATTENTION_ROWS, ring_rows
from shardwise.rules.ring import RING, zigzag
from shardwise.rules.tables import rule_of


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
@pytest.mark.sampled(3)
def test_a_ring_equals_one_device(kind: dict[str, Any], mesh: sw.Mesh) -> None:
    length = 12
    model = Attention(length, **kind)
    plan = sw.plan(model, given(length), mesh.num_devices, mesh=mesh, search="sharding_propagation")
    prove(model, given(length), plan)
    own = mesh.size_of(mesh.expand("cp"))
    handed_on = [c for c in plan.collectives() if c.kind == "halo_exchange"]
    assert len(handed_on) == 2 * (own - 1)  # keys and values, one step less than there are devices
    block = (
        2 // mesh.size_of(mesh.expand("dp") if "dp" in dict(mesh.axes) else ()) * model.keys.shape[1] * length // own
    )
    of_values = 5 if kind.get("mask") == "learned" else 6  # elsewhere padded to the width of keys
    assert {c.num_bytes for c in handed_on} == {block * 6 * 4, block * of_values * 4}
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

    with raises(sw.errors.LayoutError, "'ring'", op="/scaled_dot_product_attention", section="strategy-names"):
        sw.plan(
            Cross(),
            (torch.randn(2, 2, 8, 4), torch.randn(2, 2, 6, 4)),
            2,
            mesh=sw.Mesh(cp=2),
            search="sharding_propagation",
        )


class Positions(nn.Module):
    """Attention of which the mask says ``seen(query - key)``, by a strategy; ``padded``: and lengths of the samples."""

    def __init__(self, length: int, strategy: str, seen: Callable[[Tensor], Tensor], *, padded: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3, 2, 2, length, 4, generator=generator))
        self.attend: Any = sw.shard(F.scaled_dot_product_attention, strategy)
        self.seen, self.padded = seen, padded

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (self.weight * x).unbind(0)
        positions = torch.arange(q.shape[-2])
        mask = self.seen(positions[:, None] - positions[None])
        if self.padded:
            mask = mask & (positions < lengths[:, None, None, None])
        return self.attend(q, k, v, attn_mask=mask).square().mean()


def causal(distance: Tensor) -> Tensor:
    return distance >= 0


def window(number: int) -> Callable[[Tensor], Tensor]:
    return lambda distance: (distance >= 0) & (distance < number)


def around(number: int) -> Callable[[Tensor], Tensor]:
    return lambda distance: distance.abs() < number


# Mask -> the blocks of keys that each of 2 and of 4 devices is handed, of 16 positions.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], dict[int, int]]] = {
    "full": (lambda distance: distance > -100, {2: 1, 4: 3}),
    "causal": (causal, {2: 1, 4: 3}),
    "a window of 1": (window(1), {2: 0, 4: 0}),
    "a window of 2": (window(2), {4: 1}),
    "a window of 5": (window(5), {4: 1}),
    "a window of 6": (window(6), {2: 1, 4: 2}),
    "a window of 10": (window(10), {4: 3}),
    "around 2": (around(2), {2: 1, 4: 2}),
    "around 6": (around(6), {2: 1, 4: 3}),
    "behind": (lambda distance: distance <= 0, {4: 3}),
    "far before": (lambda distance: distance >= 9, {4: 2}),
}
LENGTHS = torch.tensor([11, 16])


def planned(model: nn.Module, length: int, devices: int) -> tuple[sw.Plan, tuple[Tensor, Tensor]]:
    given = torch.randn(length, 1, generator=torch.Generator().manual_seed(4)), LENGTHS
    return sw.plan(model, given, devices, mesh=sw.Mesh(cp=devices), search="sharding_propagation"), given


def messages(plan: sw.Plan) -> int:
    return len([c for c in plan.collectives() if c.kind == "halo_exchange"])


def num_pairs(attend: Callable[..., Tensor], *tensors: Tensor | None, **settings: Any) -> float:
    """Return how many pairs of a query and a key the kernels of attention compute, of one head of one sample."""
    with OpRecording() as recorder:
        attend(*tensors, **settings)
    return sum(q.shape[-2] * k.shape[-2] * (0.5 if causal else 1) * q.shape[0] / 2 for q, k, causal in recorder.calls)


class OpRecording(OpRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, bool]] = []

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.calls.append((args[0], args[1], args[4:] == (True,)))


@pytest.mark.parametrize(("name", "devices"), [(name, devices) for name in MASKS for devices in MASKS[name][1]])
@pytest.mark.sampled(2)
def test_blocks_that_a_mask_proves_empty_are_neither_sent_nor_computed(name: str, devices: int) -> None:
    seen, handed = MASKS[name]
    model = Positions(16, "ring@cp", seen)
    plan, given = planned(model, 16, devices)
    assert sw.verify(model, given, plan).ok
    assert messages(plan) == 2 * handed[devices]  # of keys and of values
    graph = capture(model, given).graph
    (op,) = (op for op in graph.ops if "scaled_dot_product" in op.name)
    rule = dict(rule_of(op, graph).variants)["ring"]
    heads = torch.empty(2, 2, 16, 4, device="meta")
    is_causal, mask = name == "causal", torch.empty(16, 16, dtype=torch.bool, device="meta")
    found = num_pairs(
        rule.lowering, heads, heads, heads, None if is_causal else mask, 0.0, is_causal, runs=(2, 2, 16 // devices, 4)
    )
    positions = torch.arange(16)
    visible = int(seen(positions[:, None] - positions[None]).sum())
    if is_causal:
        assert found == 16 * 16 / 2
    else:
        assert visible <= found <= 16 * 16 * (1 + handed[devices]) / devices
    if name == "full":
        assert found == visible


@pytest.mark.parametrize("name", ["causal", "a window of 6"])
@pytest.mark.sampled(1)
def test_padding_beside_a_mask_that_is_known_is_right(name: str) -> None:
    seen, handed = MASKS[name]
    model = Positions(16, "ring@cp", seen, padded=True)
    plan, given = planned(model, 16, 4)
    assert sw.verify(model, given, plan).ok
    assert messages(plan) == 2 * handed[4]  # what is known holds beside the padding


def test_a_window_and_padding_together_have_the_band_of_the_window() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            rows = torch.arange(2, 18).unsqueeze(1)
            return F.scaled_dot_product_attention(x, x, x, (torch.arange(16) < rows) & mask)

    graph = capture(Both(), (torch.randn(2, 16, 4), torch.ones(2, 16, 16, dtype=torch.bool))).graph
    assert band_of(graph.ops[-1].operands[-1], graph) == Band(-15, 1)


# name: what is broken and how, length (of its own: lowerings are remembered), strategy, mask, devices
BROKEN: dict[str, tuple[Any, ...]] = {
    "a block that is not empty is dropped": (
        (attention, "band_of", lambda real: lambda mask, graph: Band(-1, 0)),
        (16, "ring@cp", window(6), 4),
    ),
    "blocks from a wrong place": (
        (ring, "_shifted", lambda real: lambda x, number: real(x, number + 1)),
        (20, "ring@cp", causal, 4),
    ),
    "chunks in a wrong order": (
        (ring, "_chunks", lambda real: lambda x, order, chunk: real(x, sorted(order), chunk)),
        (28, "zigzag@cp", causal, 2),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ring_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (module, function, broken), (length, strategy, seen, devices) = BROKEN[name]
    monkeypatch.setattr(module, function, broken(getattr(module, function)))
    model = Positions(length, strategy, seen)
    plan, given = planned(model, length, devices)
    assert not sw.verify(model, given, plan).ok


@pytest.mark.parametrize(("length", "devices"), [(24, 2), (24, 3), (16, 4), (12, 4)])
@pytest.mark.sampled(1)
def test_causal_work_in_zigzag_equals_one_device(length: int, devices: int) -> None:
    model = Positions(length, "zigzag@cp", causal)
    plan, given = planned(model, length, devices)
    assert plan.strategies["/scaled_dot_product_attention"] == "zigzag@cp"
    assert sw.verify(model, given, plan).ok
    moved = 4 if length % (2 * devices) == 0 else 0  # there and back: queries, keys, values and result
    assert messages(plan) == 2 * (devices - 1) + moved


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_of_a_zigzag_compute_what_is_seen_and_all_equally_much(devices: int) -> None:
    heads = torch.empty(2, 2, 32, 4, device="meta")
    runs = (2, 2, 32 // devices, 4)
    for lowering in (zigzag, RING):
        assert num_pairs(lowering, heads, heads, heads, None, 0.0, True, runs=runs) == 32 * 32 / 2

    def pairs(step: int, block: int) -> float:
        tiles = ring_rows(step, devices, block, 32 // devices, 2, True, None, 0)
        return sum((r.end - r.begin) * (c.end - c.begin) * (1 - c.causal / 2) for r in tiles for c in r.columns)

    for step in range(devices):
        assert len({pairs(step, block) for block in range(devices)}) == 1


class Causal(nn.Module):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1, 2, 1, 8, device="meta"))
        self.attend: Any = sw.shard(F.scaled_dot_product_attention, strategy)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.weight * x).unbind(0)
        return self.attend(q, k, v, is_causal=True).square().mean()


def test_long_causal_work_in_zigzag_is_priced_below_a_ring() -> None:
    prices = {}
    for strategy in ("ring@cp", "zigzag@cp"):
        x = torch.empty(32_768, 1, device="meta")
        plan = sw.plan(Causal(strategy), (x,), 4, mesh=sw.Mesh(cp=4), search="dynamic_programming")
        prices[strategy] = plan.prediction.step_seconds
    assert prices["zigzag@cp"] < 0.75 * prices["ring@cp"]


def test_only_causal_attention_has_a_zigzag() -> None:
    model = Positions(16, "zigzag@cp", MASKS["full"][0])
    with raises(sw.errors.LayoutError, "'zigzag'", op="/scaled_dot_product_attention", section="strategy-names"):
        planned(model, 16, 2)


@pytest.mark.parametrize("run", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("lowering", [RING, zigzag], ids=["ring", "zigzag"])
def test_the_lowering_is_attention_however_many_blocks(lowering: Callable[..., Tensor], run: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, heads, 12, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, groups, groups)
    )
    own = lowering(q, k, v, is_causal=True, enable_gqa=True, runs=(2, 4, run, 4))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(own, whole)
    seed = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(own, (q, k, v), seed), torch.autograd.grad(whole, (q, k, v), seed), strict=True
    ):
        torch.testing.assert_close(one, other)


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("strategy", ["t@cp", pytest.param("ring@cp", marks=pytest.mark.long), "zigzag@cp"])
def test_the_memory_of_a_sequence_over_devices_is_linear_in_its_length(strategy: str) -> None:
    """All scores of 65,536 positions would take 128 times the queries of a device."""

    def peak(length: int) -> int:
        x = torch.empty(length, 1, device="meta")
        plan = sw.plan(Causal(strategy), (x,), 8, mesh=sw.Mesh(cp=8), search="sharding_propagation")
        assert plan.strategies["/scaled_dot_product_attention"] == strategy
        return plan.prediction.peak_bytes

    assert peak(65_536) <= 2.01 * peak(32_768)


@pytest.mark.parametrize("kind", ["rows", "ring", "zigzag"])
def test_kernels_of_a_split_sequence_hold_no_scores(kind: str) -> None:
    """Measured forward and backward, of the rows of the last of 4 devices, and of all blocks of a ring."""
    length, width = 2048, 16
    rows = length // 4 if kind == "rows" else length
    q, k, v = (torch.randn(1, 1, n, width, requires_grad=True) for n in (rows, length, length))
    with LiveBytes() as live:
        if kind == "rows":
            out = ATTENTION_ROWS(q, k, v, None, True, False, None, (length,), (length - rows,), (rows,))
        else:
            lowering = RING if kind == "ring" else zigzag
            out = lowering(q, k, v, is_causal=True, runs=(1, 1, length // 4, width))
        torch.autograd.grad(out.sum(), (q, k, v))
    whole = F.scaled_dot_product_attention(
        *(x.detach() for x in (q, k, v)), torch.ones(rows, length).tril(length - rows).bool()
    )
    torch.testing.assert_close(out.detach(), whole)
    assert live.peak < 0.5 * (rows * length * 4)  # a quarter is the mask alone, which the blocks had
