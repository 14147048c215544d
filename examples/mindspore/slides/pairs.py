"""Runs a pair of products from the slides on four ranks: is it what one device computes, and what is sent for it?"""

from __future__ import annotations

import numpy as np
import torch

import shardwise.mindspore as ms
from shardwise.mindspore import nn
from shardwise.mindspore.communication import get_rank, init

from issued import Issued, issued  # isort: skip


class Trained(nn.Cell):
    """A pair whose three matrices are parameters, so that all of them have gradients."""

    def __init__(self, net: nn.Cell, x: ms.Tensor, w: ms.Tensor, v: ms.Tensor):
        super().__init__()
        self.net = net
        self.x, self.w, self.v = ms.Parameter(x, "x"), ms.Parameter(w, "w"), ms.Parameter(v, "v")

    def construct(self):
        return self.net(self.x, self.w, self.v)


def run(make_net) -> tuple[float, list[Issued], list[Issued]]:
    """``make_net()`` split over four ranks. Returns the largest difference from one device, of the value and of the
    gradients of all three matrices, and what was sent forward (the last all-gather delivers z) and backward."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4, full_batch=True)
    init()
    numbers = np.random.RandomState(0)
    x, w, v, cotangent = (ms.Tensor(numbers.rand(*shape)) for shape in ((8, 12), (12, 16), (16, 8), (8, 8)))
    net = make_net()
    errors = [net(x, w, v) - x @ w @ v]  # called as the slides do

    trained = Trained(make_net(), x, w, v)
    for _ in range(2):  # made and compiled; then the ranks agree on the parameters that they were given
        trained()
    with issued() as forward:
        z = trained()
    with issued() as backward:
        (z * cotangent).sum().backward()
    whole = [matrix.clone().requires_grad_() for matrix in (x, w, v)]
    (whole[0] @ whole[1] @ whole[2] * cotangent).sum().backward()
    for parameter, matrix in zip((trained.x, trained.w, trained.v), whole, strict=True):
        errors.append(parameter.grad - part_of(matrix.grad, parameter))
    error = max(float(own.abs().max()) for own in errors)
    if get_rank() == 0:
        print(f"largest difference from one device: {error:.1e}")
        for direction, sent in (("forward", forward), ("backward", backward)):
            print(f"{direction}: {', '.join(map(str, sent))}")
    return error, forward, backward


def part_of(whole: torch.Tensor, parameter: ms.Parameter) -> torch.Tensor:
    """What this rank must hold of ``whole``, if it holds it as it holds the parameter."""
    from shardwise.mindspore.holding import holding_of
    from shardwise.runtime.local_shards import shard

    holding = holding_of(parameter)
    return whole if holding is None else shard(whole, holding.layout, holding.layout.mesh.coordinates(get_rank()))
