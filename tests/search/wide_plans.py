"""Plans one large wide model in a process of its own, and prints its CPU seconds, its peak memory and its gap.

``python -m search.wide_plans cells-64 a=2,b=2,c=2``
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from search.wide_models import Cell, Cells, DenseNet, Gru, HyperConnections, Rwkv, Scan, UNet


class Densenet121(nn.Module):
    """Four dense blocks of 6, 12, 24 and 16 layers with transitions (Huang et al., 2017), at a tenth of the width."""

    def __init__(self, growth: int = 4, stem: int = 8) -> None:
        super().__init__()
        self.stem, width = nn.Conv2d(3, stem, 7, 2, 3), stem
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for count in (6, 12, 24, 16):
            self.blocks.append(
                nn.ModuleList(
                    nn.Sequential(
                        nn.BatchNorm2d(width + i * growth), nn.ReLU(), nn.Conv2d(width + i * growth, 4 * growth, 1),
                        nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1),
                    )
                    for i in range(count)
                )
            )  # fmt: skip
            width += count * growth
            self.transitions.append(nn.Conv2d(width, width // 2, 1))
            width //= 2
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in block:
                features.append(layer(torch.cat(features, 1)))
            x = nn.functional.avg_pool2d(transition(torch.cat(features, 1)), 2)
        return self.head(x.mean((2, 3))).square().mean()


class Scanned(nn.Module):
    """A language model of transformers, on the path without fused kernels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

        sizes = {"vocab_size": 256, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "use_cache": False}
        heads = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4}
        self.model = (
            MambaForCausalLM(MambaConfig(**sizes))
            if kind == "mamba"
            else Mamba2ForCausalLM(Mamba2Config(**sizes, **heads))
        )

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def _states(model: Callable[[], nn.Module], width: int) -> Callable[[int], tuple[nn.Module, Tensor]]:
    return lambda length: (model(), torch.zeros(8, length, width))


# Name -> a model and its input, of a length.
MODELS: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {
    "mamba": lambda length: (Scanned("mamba"), torch.zeros(8, length, dtype=torch.int64)),
    "mamba2": lambda length: (Scanned("mamba2"), torch.zeros(8, length, dtype=torch.int64)),
    "scan": _states(Scan, 16),
    "cells": _states(Cells, 8),
    "gru": _states(Gru, 8),
    "rwkv": _states(Rwkv, 16),
    "hyper": lambda blocks: (HyperConnections(streams=4, blocks=blocks), torch.zeros(8, 16, 16)),
    "cell": lambda cells: (Cell(cells=cells), torch.zeros(8, 4, 16, 16)),
    "dense": lambda blocks: (DenseNet(blocks=blocks), torch.zeros(8, 4, 16, 16)),
    "densenet": lambda size: (Densenet121(), torch.zeros(8, 3, size, size)),
    "unet": lambda depth: (UNet(depth=depth), torch.zeros(8, 4, 1 << depth, 1 << depth)),
}


def slow(cluster: sw.Cluster) -> sw.Cluster:
    """Return a cluster on which splitting these small models pays."""
    from dataclasses import replace

    flops = type(cluster.device.flops)({name: rate / 1e5 for name, rate in cluster.device.flops.items()})
    bandwidth = cluster.device.memory_bandwidth / 1e4
    return replace(cluster, device=replace(cluster.device, flops=flops, memory_bandwidth=bandwidth, kernel_latency=0.0))


def _peak_bytes() -> int:
    # ru_maxrss would be at least what the process held that started this one: it outlives exec.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def main(case: str, axes: str) -> None:
    name, length = case.split("-")
    model, x = MODELS[name](int(length))
    mesh = sw.Mesh.parse(axes)
    cluster = slow(sw.Cluster.load("h100-1x8").with_devices(mesh.num_devices))
    warnings.simplefilter("ignore")
    start = time.process_time()
    prediction = sw.plan(model, (x,), cluster, mesh=mesh).plan.prediction
    assert prediction is not None
    figures = {
        "seconds": time.process_time() - start,
        "bytes": _peak_bytes(),
        "bound": prediction.bound,
        "price": prediction.additive_price,
        "gap": 1 - prediction.bound / prediction.additive_price,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
