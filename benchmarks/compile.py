"""Compiling: seconds and distinct functions by depth, and bytes kept for backward beside ``torch.compile``.

``make bench-compile``, or ``python benchmarks/compile.py --layers 2 8 32``. A GPT of ``examples/``, on one device;
nothing is kept on disk between runs (``TORCHINDUCTOR_FORCE_DISABLE_CACHES``). Ratios are to the first number of layers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import torch
import torch.distributed as dist

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def kept_bytes(run: Any, known: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps after ``run``; ``known`` tensors are not counted."""
    places = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def measure(layers: int, width: int, device: torch.device) -> tuple[float, float, int, int, int]:
    """Seconds of the first step of ``torch.compile`` and of ours, distinct functions of ours, bytes kept by both."""
    from gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=512, layers=layers, heads=width // 32, width=width, context=128, tied=False))
    model = model.to(device)
    ids, labels = torch.randint(512, (2, 4, 128), device=device)
    plan = sw.plan(model, (ids, labels), 1, mesh=sw.Mesh(dp=1), search="sharding_propagation")
    eager = sw.parallelize(model, plan, compile=False, device=device)
    par = sw.parallelize(model, plan, compile=True, device=device)
    known = [*model.parameters(), *model.buffers(), *par.parameters(), *par.buffers(), ids, labels]
    start = time.perf_counter()
    eager.step(ids, labels)
    before = time.perf_counter() - start  # capture and writing of the program
    start = time.perf_counter()
    par.step(ids, labels)
    ours = time.perf_counter() - start - before
    torch._dynamo.reset()
    plain = torch.compile(model)
    start = time.perf_counter()
    plain(ids, labels).backward()
    theirs = time.perf_counter() - start
    compiling = par.latest.step.compiling
    assert compiling is not None, "it was asked for"
    assert compiling.variant is not None, "compiled by now"
    program = compiling.variant.emitted.program
    functions = {id(i.target) for i in (*program.forward, *program.backward) if hasattr(i, "target")}
    return (
        theirs,
        ours,
        len(functions),
        kept_bytes(lambda: plain(ids, labels), known),
        kept_bytes(lambda: par(ids, labels), known),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"})
    dist.init_process_group("gloo")
    print("layers  torch.compile s  ours s (ratio)  functions  kept by torch.compile  kept by ours (ratio)")
    first: float | None = None
    for layers in options.layers:
        theirs, ours, functions, kept, own = measure(layers, options.width, torch.device(options.device))
        first = first or ours
        row = f"{layers:6d}  {theirs:15.1f}  {ours:6.1f} ({ours / first:5.2f})  {functions:9d}"
        print(f"{row}  {kept:21,d}  {own:12,d} ({own / kept:.4f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
