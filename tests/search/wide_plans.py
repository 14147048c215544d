"""Plans one large wide model in a process of its own, and prints its peak memory and its gap.

``python -m search.wide_plans cells-64 a=2,b=2,c=2``
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from search.wide_models import Cells, Gru, HyperConnections, Rwkv


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


# Name -> a model and its input, of a length.
MODELS: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {
    "mamba": lambda length: (Scanned("mamba"), torch.zeros(8, length, dtype=torch.int64)),
    "mamba2": lambda length: (Scanned("mamba2"), torch.zeros(8, length, dtype=torch.int64)),
    "cells": lambda length: (Cells(), torch.zeros(8, length, 8)),
    "gru": lambda length: (Gru(), torch.zeros(8, length, 8)),
    "rwkv": lambda length: (Rwkv(), torch.zeros(8, length, 16)),
    "hyper": lambda blocks: (HyperConnections(streams=4, blocks=blocks), torch.zeros(8, 16, 16)),
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
    prediction = sw.plan(model, (x,), cluster, mesh=mesh).plan.prediction
    assert prediction is not None
    figures = {
        "bytes": _peak_bytes(),
        "bound": prediction.bound,
        "price": prediction.additive_price,
        "gap": 1 - prediction.bound / prediction.additive_price,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
