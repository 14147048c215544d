"""A small GPT and batches for tests that start real ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

import shardwise as sw

EXAMPLES = Path(__file__).parents[2] / "examples"
TENSOR_PARALLEL = {"blocks.*.attention.qkv": "n@tp", "blocks.*.mlp.up": "n@tp", "head": "n@tp", "tokens": "v@tp"}


def example_module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def make_gpt(seed: int = 0, layers: int = 2) -> torch.nn.Module:
    """Layers of width 24 with 6 heads, in float64; ``seed`` is that of the eager initialisation."""
    gpt = example_module("gpt")
    torch.manual_seed(seed)
    return gpt.GPT(gpt.GPTConfig(vocab=50, layers=layers, heads=6, width=24, context=8, tied=True)).double()


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (2, size, 8), generator=generator)
    return ids[0], ids[1]


def make_plan(name: str, devices: int = 4, layers: int = 2) -> sw.Plan:
    """``auto`` (data parallel), or ``tp``: two-way data by tensor parallelism over the rest."""
    with sw.deferred(seed=0):
        model = make_gpt(layers=layers)
    if name == "auto":
        return sw.plan(model, batch(8, 0), sw.Cluster.local(devices), search="sharding_propagation")
    mesh = sw.Mesh(dp=2, tp=devices // 2)
    return sw.plan(model, batch(8, 0), sw.Cluster.local(devices), mesh=mesh, strategies=TENSOR_PARALLEL)
