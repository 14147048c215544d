"""Predicted against measured bytes of training steps over models and levers, on two gloo ranks: ``make sweep-memory``.

A case is a model with a setting of every lever: storage in parts (ZeRO), values made again or on the host, passes over
micro-batches, precision. Cases are drawn by a seed, so that one that fails can be run again (``--seed 3 --cases 40``).
A prediction that is off by more than ``TOLERANCE`` makes the exit code 1. What is measured is said in
``benchmarks/step_memory.py``.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import shardwise as sw
from models import tiny_models
from models.tiny_models import TinyModel
from shardwise.api import step_memory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_memory import measure

TOLERANCE = 0.03  # of the measured peak
BATCH, RANKS = 8, 2
MIXED = sw.Precision(torch.bfloat16, torch.float32, torch.float32)
MODELS = ("gpt2", "llama", "mixtral", "vit", "resnet", "dlrm")
LEVERS: dict[str, tuple[Any, ...]] = {
    "zero": (None, 1, 2, 3),
    "recompute": ("none", "cheap", "full"),
    "offload": ("none", "all"),
    "micro_batch": (BATCH, BATCH // 2, BATCH // 4),
    "precision": (None, MIXED),
}


@dataclass(frozen=True)
class Case:
    model: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        said = dict(self.settings, precision="bf16" if self.settings["precision"] else "f32")
        return f"{self.model}: " + ", ".join(f"{name} {value}" for name, value in said.items())

    def plan(self) -> sw.Plan:
        chosen = {key: value for key, value in self.settings.items() if value is not None}
        if chosen["micro_batch"] < BATCH:
            chosen["global_batch"] = BATCH
        else:
            del chosen["micro_batch"]
        module, inputs = built(self.model)
        return sw.plan(module, (), RANKS, kwargs=inputs, mode="data_parallel", mesh=sw.Mesh(dp=RANKS), **chosen)


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    tiny: TinyModel
    if name in ("mixtral", "dlrm"):
        from models.zoo import ZOO

        tiny = ZOO[name]
    else:
        tiny = getattr(tiny_models, name)()
    module = tiny.build().train()
    if name == "mixtral":
        module.config.output_router_logits = False  # its auxiliary loss is no sum over micro-batches
    return module, tiny.inputs(BATCH)


def drawn(count: int, seed: int, models: Sequence[str]) -> Iterator[Case]:
    draw = random.Random(seed)
    for number in range(count):
        settings = {name: draw.choice(values) for name, values in LEVERS.items()}
        yield Case(models[number % len(models)], settings)


def _rank(rank: int, folder: str, cases: Sequence[tuple[Case, str]]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    off = 0
    with mock.patch("shardwise.programs.activation_offload.SMALLEST_BYTES", 1):  # these models are small
        for case, text in cases:
            module, inputs = built(case.model)
            plan = sw.Plan.from_json(text)
            peak = torch.tensor(measure(module, inputs, plan).peak)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            memory = step_memory(module, (), plan, kwargs=inputs)
            predicted = max(own.num_bytes for phase, own in memory.peak_of.items() if phase != "update")
            ratio = predicted / int(peak)
            wrong = abs(ratio - 1) > TOLERANCE
            off += wrong
            if rank == 0:
                print(f"| {case} | {int(peak) / 1e6:.3f} | {ratio:.4f}{' OFF' if wrong else ''} |", flush=True)
            del module, inputs, memory
            gc.collect()
    if rank == 0:
        print(f"{len(cases) - off} of {len(cases)} within {TOLERANCE:.0%}")
        Path(folder, "off").write_text(str(off), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    chosen = parser.parse_args()
    with (
        warnings.catch_warnings(action="ignore"),
        mock.patch("shardwise.programs.activation_offload.SMALLEST_BYTES", 1),
    ):
        cases = [(case, case.plan().to_json()) for case in drawn(chosen.cases, chosen.seed, chosen.models)]
    print("| case | measured MB | predicted / measured |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, cases), RANKS)
        off = int(Path(folder, "off").read_text(encoding="utf-8"))
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
