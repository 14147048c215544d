"""``torch.autocast`` around a call and in regions of a model: the graph casts what torch casts, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.errors import CaptureError, ShardwiseError
from shardwise.graph.capture import capture
from shardwise.graph.interpret import interpret

BF16, F16 = torch.bfloat16, torch.float16


def lists(x: torch.Tensor, w: torch.Tensor) -> Any:
    low = F.linear(x, w)
    heads = low.view(2, 4, 2, 8)
    attended = F.scaled_dot_product_attention(heads, heads, x.view(2, 4, 2, 8), is_causal=True)
    promoted = torch.cat([low, x, low.double().float()], -1)
    wide = F.mse_loss(low, x) + F.cosine_similarity(low, x).sum() + torch.cdist(low, low).mean()
    return (
        attended, promoted, wide, low.softmax(-1), F.layer_norm(low, (16,)), torch.einsum("bi,bj->ij", x, low),
        low.exp(), torch.stack([low, x]), F.gelu(low) @ w, low.norm(), F.cross_entropy(low, x.argmax(-1)),
        torch.baddbmm(x.view(2, 4, 16), x.view(2, 4, 16), w[None].expand(2, 16, 16)), F.prelu(x, w[0, :1]),
    )  # fmt: skip


def regions(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Regions inside of each other, in other dtypes, switched off, and without gradients."""
    first = x @ w
    with torch.autocast("cpu", dtype=F16):
        second = first @ x.t() @ x  # a parameter that was cast is torch's cache's, in the other dtype
        with torch.autocast("cpu", enabled=False):
            third = second.float() @ w
        fourth = third @ x.t() @ x
    with torch.no_grad():
        fifth = (x @ w).sum(0)
    return first, second, third, fourth, fourth * fifth


def views_and_writes(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    y += x @ w
    rows = (x @ w).t()
    return y, rows @ x, rows.contiguous().mul_(2.0)


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.w)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("function", [lists, regions, views_and_writes])
def test_a_graph_casts_what_torch_casts(function: Callable[..., Any], dtype: torch.dtype) -> None:
    module, x = Called(function), 0.1 * torch.randn(8, 16)
    with torch.autocast("cpu", dtype=dtype):
        expected = module(x)
        captured = capture(module, (x,))
    made = interpret(captured.graph, {"w": module.w.detach(), "args[0]": x, **captured.constants})
    own = [made[out.name] for out in captured.graph.outputs]
    for i, (want, have) in enumerate(zip(expected, own, strict=True)):
        assert want.dtype == have.dtype, i
        # Kernels that the graph takes apart (attention, norms, losses) round between their parts.
        bound = torch.finfo(dtype).eps * 16 if function is lists else 0.0
        assert (want.detach() - have).abs().max() <= bound * want.detach().abs().max(), i


def test_a_trained_parameter_is_cast_once_and_a_frozen_one_wherever_it_is_used() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum() + (x.sin() @ w).sum()

    module, x = Called(twice), torch.randn(8, 16)

    def casts() -> int:
        with torch.autocast("cpu", dtype=BF16):
            graph = capture(module, (x,)).graph
        return sum(op.target is torch.ops.aten.to.dtype and op.operands == ("w",) for op in graph.ops)

    assert casts() == 1
    module.w.requires_grad_(False)
    assert casts() == 2


def test_an_autocast_is_part_of_a_plan_and_proven() -> None:
    module, x = Called(lambda x, w: (x @ w).softmax(-1).square().mean()), torch.randn(8, 16)
    with torch.autocast("cpu", dtype=BF16):
        plan = sw.plan(module, (x,), 2, mode="data_parallel")
        inside = sw.verify(module, (x,), plan)
    assert "autocast cpu bf16" in str(plan)
    assert sw.Plan.from_json(plan.to_json()) == plan
    outside = sw.verify(module, (x,), plan)
    for report in (inside, outside):
        assert report.ok, str(report)
        assert "in the plan's precision" in str(report)
    plain = sw.plan(module, (x,), 2, mode="data_parallel")
    assert plain.precision == sw.Precision()
    with torch.autocast("cpu", dtype=BF16), raises(CaptureError, "sw.verify", "no autocast"):
        sw.verify(module, (x,), plain)
    with torch.autocast("cpu", dtype=F16), raises(CaptureError, "sw.verify", 'torch.autocast("cpu", torch.bfloat16)'):
        sw.verify(module, (x,), plan)
    with torch.autocast("cpu", dtype=BF16), raises(ShardwiseError, 'torch.autocast("cpu", torch.bfloat16)', "compute"):
        sw.plan(module, (x,), 2, precision=sw.Precision(compute=BF16))


def test_an_autocast_of_another_device_is_refused() -> None:
    def elsewhere(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return (x @ w).sum()

    torch.set_autocast_enabled("cuda", True)
    try:
        with raises(CaptureError, 'torch.autocast("cuda")', "CPU"):
            sw.plan(Called(lambda x, w: x @ w), (torch.randn(8, 16),), 2)
    finally:
        torch.set_autocast_enabled("cuda", False)
