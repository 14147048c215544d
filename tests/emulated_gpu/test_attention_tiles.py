"""Attention in tiles by the kernels of a GPU: flash, memory-efficient, and in float64 by scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launch.gloo_ranks import RunRanks
from shardwise.rules.attention_kernels import ATTENTION_ROWS
from shardwise.rules.ring import RING, zigzag

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}


def attend_in_tiles() -> None:
    from emulated_gpu.device import record

    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 1, 16, 16, generator=generator) < 0.6
    mask[0, 0, 1] = False  # this query sees nothing
    on_gpu = mask.cuda()
    for dtype, tolerance in TOLERANCES.items():
        exact = [torch.randn(2, heads, 16, 8, generator=generator).to(dtype).double() for heads in (4, 2, 2)]
        operands = [x.to(dtype).cuda().requires_grad_() for x in exact]
        exact = [x.requires_grad_() for x in exact]
        q, k, v = operands
        runs = (2, 4, 4, 8)
        causal = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
        masked = F.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
        cotangent = torch.randn(causal.shape, generator=generator)
        of_gpu = cotangent.to(dtype).cuda()
        record.clear()
        found = [
            RING(q, k, v, is_causal=True, enable_gqa=True, runs=runs),
            zigzag(q, k, v, is_causal=True, enable_gqa=True, runs=runs),
            RING(q, k, v, on_gpu, enable_gqa=True, runs=runs),
            ATTENTION_ROWS(q[:, :, 9:14], k, v, None, True, True, None, (16,), (9,), (5,)),
        ]
        cotangents = [of_gpu, of_gpu, of_gpu, of_gpu[:, :, 9:14]]
        gradients = [torch.autograd.grad(x, operands, c) for x, c in zip(found, cotangents, strict=True)]
        assert not record.waits, record.waits
        assert not record.races, record.races
        whole = [causal, causal, masked, causal[:, :, 9:14]]
        for one, result, expected, c in zip(
            found, gradients, whole, (*[cotangent] * 3, cotangent[:, :, 9:14]), strict=True
        ):
            _assert_close(one, expected, tolerance)
            of_expected = torch.autograd.grad(expected, exact, c.double(), retain_graph=True)
            for gradient, of_one in zip(result, of_expected, strict=True):
                _assert_close(gradient, of_one, tolerance)


def _assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.long
def test_the_kernels_of_a_gpu_give_attention_in_tiles(run_gpu_ranks: RunRanks) -> None:
    run_gpu_ranks(attend_in_tiles, 1)
