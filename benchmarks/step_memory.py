"""Memory of a training step on real gloo ranks beside what ``costs.memory`` predicts: ``make bench-memory``.

Measured are the bytes of all tensors' storages in a step when optimizer states exist: what is live before it, and the
most that is live beyond that after any kernel of forward and backward, buffers of messages included. It is the least of
three such steps: gloo's threads let go of a message's buffer a moment after the ranks wait for it no more, later where
the machine is busy. Of inputs the rank's part is counted, as in a prediction: the whole batch is its caller's, who may
keep it elsewhere. (Scratch memory inside a kernel is not seen. PyTorch's memory profiler would see it, but misses what
gloo's threads free.) The update is not measured: optimizers work in place but for one tensor.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from transformer import Shape, Transformer

import shardwise as sw
from costs.live_bytes import LiveBytes
from shardwise.api import step_memory
from shardwise.costs.memory import MemoryEstimate
from shardwise.layouts.text import parse_dtype

Inputs = tuple[torch.Tensor, ...]
SHAPE = Shape(width=128, layers=3, head_width=32, vocab=1024, batch=16, time=64)


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a plan; ``options``: of ``sw.plan``."""

    name: str
    options: Mapping[str, Any]


TENSOR_PARALLEL = {
    "blocks.*.attention.qkv": "n@tp",
    "blocks.*.attention.out": "k@tp",
    "blocks.*.up": "n@tp",
    "blocks.*.down": "k@tp",
}


def cases(num_ranks: int) -> list[Case]:
    """The plans of the benchmark transformer that are compared."""
    mixed = sw.Mesh(dp=num_ranks // 2, tp=2) if num_ranks > 2 else sw.Mesh(tp=2)
    return [
        Case("data parallel", {"mode": "data_parallel"}),
        Case(
            "data and tensor parallel", {"mesh": mixed, "strategies": TENSOR_PARALLEL, "search": "sharding_propagation"}
        ),
        Case("auto", {"search": "dynamic_programming"}),
        Case("auto, little memory", {"search": "dynamic_programming", "memory_bytes": 20e6}),
    ]


def transformer() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    size = (SHAPE.batch, SHAPE.time)
    return Transformer(SHAPE), (torch.randint(SHAPE.vocab, size), torch.randint(SHAPE.vocab, size))


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes on one rank: live before a step, and the most beyond that in forward and backward."""

    before: int
    beyond: int

    @property
    def peak(self) -> int:
        return self.before + self.beyond


def measure(module: nn.Module, inputs: Inputs | Mapping[str, torch.Tensor], plan: sw.Plan) -> Measured:
    """On this rank of the process group that is open. ``inputs``: positional, or by name."""
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
    torch.set_num_threads(1)
    parallel = sw.parallelize(module, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
    for _ in range(2):
        parallel.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    gc.collect()
    before = storage_bytes([*parallel.parameters(), *parallel.buffers(), *states(optimizer)]) + input_bytes(plan)
    beyond = []
    for _ in range(3):
        dist.barrier()
        with LiveBytes() as live:
            parallel.step(*args, **kwargs)
        beyond.append(live.peak)
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return Measured(before, min(beyond))


def input_bytes(plan: sw.Plan) -> int:
    """Of this rank's part of the inputs."""
    coordinates = plan.mesh.coordinates(dist.get_rank())
    shapes = [(plan.layouts[entry.name].local_shape(coordinates), entry.dtype) for entry in plan.inputs]
    return sum(prod(shape) * parse_dtype(dtype).itemsize for shape, dtype in shapes)


def states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (item for item in state.values() if isinstance(item, torch.Tensor))


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of the storages of tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def predict(module: nn.Module, inputs: Inputs, plan: sw.Plan) -> MemoryEstimate:
    return step_memory(module, inputs, plan)


def _rank(rank: int, num_ranks: int, folder: str, plans: list[str]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5))
    found = []
    for text in plans:
        module, inputs = transformer()
        found.append(measure(module, inputs, sw.Plan.from_json(text)))
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def compare(num_ranks: int, report: Callable[[str], None]) -> None:
    """Print a row per plan."""
    own = cases(num_ranks)
    plans = []
    for case in own:
        module, inputs = transformer()
        plans.append(sw.plan(module, inputs, num_ranks, **case.options))
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (num_ranks, folder, [plan.to_json() for plan in plans]), num_ranks)
        measured = [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(num_ranks)]
    for i, (case, plan) in enumerate(zip(own, plans, strict=True)):
        largest = max((found[i] for found in measured), key=lambda item: item.peak)
        module, inputs = transformer()
        memory = predict(module, inputs, plan)
        phases = {name: peak for name, peak in memory.peak_of.items() if name != "update"}
        peak = max(phases.values(), key=lambda peak: peak.num_bytes)
        ratio = peak.num_bytes / largest.peak
        report(
            f"| {num_ranks} | {case.name} | {plan.mesh} | {peak.num_bytes / 1e6:.2f} | {largest.peak / 1e6:.2f} "
            f"| {ratio:.3f} | {peak.where} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    print("| ranks | plan | mesh | predicted MB | measured MB | predicted / measured | where |")
    print("|---|---|---|---|---|---|---|")
    for num_ranks in options.ranks:
        compare(num_ranks, print)


if __name__ == "__main__":
    main()
