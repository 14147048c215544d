"""Measure a machine for ``shardwise calibrate``. Every rank runs this module, and rank 0 writes the points as JSON.

    shardwise run -n 8 -m shardwise.launch.measure points.json                      # what `shardwise calibrate` does
    shardwise run --hostfile hosts.txt -m shardwise.launch.measure points.json      # several machines

All ranks compute at the same time, as in training: they share cores, caches and memory. The measurements are repeated
in rounds over all sizes, so that a disturbance affects one round and not one size. Of the rounds the second fastest
counts; the time in a round is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.costs import probe
from shardwise.costs.fit import CollectiveTime, KernelTime, MatmulTime, Measurements, StreamTime
from shardwise.costs.kernels import KernelCall, KernelWork, work_of
from shardwise.costs.optimizers import update_of
from shardwise.dispatch_mode import OpRecorder
from shardwise.errors import LaunchError
from shardwise.graph.ir import Ref
from shardwise.launch.ranks import init_ranks
from shardwise.programs.forms import Form
from shardwise.runtime.agree import gather_values
from shardwise.runtime.communicator import (
    adds_rows,
    backend_of,
    exchange_rows,
    finish_work,
    gather_rows,
    rank_device,
    scatter_tensor,
    sum_received,
)

_Time = TypeVar("_Time", MatmulTime, StreamTime, CollectiveTime, KernelTime)

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")

# Maximum bytes of the all-reduce that measures overlap: about a gradient bucket.
_OVERLAPPED = 2**22

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and repetitions to measure. ``widths``: of square matmuls; ``streams``, ``messages``: bytes; ``seconds``:
    for one call's repetitions in a round; ``rounds``: at least 2; ``is_tiny``: a test run."""

    dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    streams: tuple[int, ...]
    messages: tuple[int, ...]
    seconds: float
    rounds: int
    is_tiny: bool = False

    @staticmethod
    def of(backend: str, tiny: bool) -> Effort:
        """Return sizes that take a minute or two; with ``tiny``, a second, to test that it works."""
        if tiny:
            return Effort(("f32",), (32, 64), (2**14, 2**16), (2**10, 2**14), 0.001, 2, is_tiny=True)
        if backend == "nccl":
            powers, messages = range(20, 31, 2), range(14, 31, 2)
            dtypes: tuple[str, ...] = ("f64", "f32", "bf16", "f16")
            widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
        else:
            powers, messages = range(18, 27, 2), range(12, 25, 2)
            dtypes, widths = ("f64", "f32", "bf16"), (64, 128, 256, 512, 1024)
        return Effort(dtypes, widths, tuple(2**p for p in powers), tuple(2**p for p in messages), 0.02, 5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures this machine, on every rank of a job.")
    parser.add_argument("points", help="where rank 0 writes the measurements, as JSON")
    parser.add_argument("--tiny", action="store_true", help="only a few small sizes")
    chosen = parser.parse_args(arguments)
    init_ranks()
    measured = measure(Effort.of(backend_of(), chosen.tiny))
    if dist.get_rank() == 0:
        Path(chosen.points).write_text(json.dumps(measured.to_json(), indent=1), encoding="utf-8")
    dist.barrier()


def measure(effort: Effort) -> Measurements:
    """Measure the machines of this job. Collective: all ranks call it and return the same measurements."""
    device = rank_device()
    watch = _CollectiveTimer(device, effort)
    sizes = sizes_of(gather_values(platform.node()))
    groups = _create_groups(sizes)
    small = torch.ones(16, device=device)
    latencies, matmuls, streams, collectives = [], [], [], []
    kernels: list[list[KernelTime]] = []
    on_gpu = device.type == "cuda"
    for _ in range(effort.rounds):
        latencies.append(watch.seconds(lambda: torch.add(small, small, out=small)))
        matmuls.append(list(_matmuls(watch, effort, device)))
        streams.append(list(_streams(watch, effort, device)))
        collectives.append(list(_collectives(watch, effort, device, groups)))
        kernels.append(list(kernel_times(watch.seconds, device, KernelSizes.of(effort.is_tiny))) if on_gpu else [])
    return Measurements(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_processor()}, a rank of {sizes[0]}",
        memory_bytes=_memory(device, sizes[0]),
        sizes=sizes,
        kernel_latency=sorted(latencies)[1],
        matmuls=second_fastest(matmuls),
        streams=second_fastest(streams),
        collectives=second_fastest(collectives),
        overlap=_overlap(watch, effort, device),
        kernels=second_fastest(kernels),
        launch=launch_seconds(watch.issued, device) if on_gpu else 0.0,
        host_bandwidth=host_bandwidth(watch.seconds, device, 2**26) if on_gpu else 0.0,
        reserve_bytes=_reserve(device) if on_gpu else 0.0,
        noise=noise_of(matmuls, streams, collectives, kernels),
        fresh_bandwidth=_fresh_bandwidth(watch, effort) if device.type == "cpu" else 0.0,
        facts=_facts(),
    )


def second_fastest(rounds: Sequence[Sequence[_Time]]) -> tuple[_Time, ...]:
    """Return the second-fastest time of each measurement; all rounds have the same order."""
    return tuple(sorted(times, key=lambda time: time.seconds)[1] for times in zip(*rounds, strict=True))


def noise_of(*series: Sequence[Sequence[MatmulTime | StreamTime | CollectiveTime | KernelTime]]) -> float:
    """Return the relative slowdown of the median round against the fastest: the median over all times of all series.

    >>> noise_of([[StreamTime(1.0, 2.0)], [StreamTime(1.0, 3.0)], [StreamTime(1.0, 9.0)]])
    0.5
    """
    seconds_of_rounds = [[time.seconds for time in times] for rounds in series for times in zip(*rounds, strict=True)]
    return float(median(median(seconds) / min(seconds) - 1 for seconds in seconds_of_rounds))


@dataclass(frozen=True, slots=True)
class _CollectiveTimer:
    """Times calls that all ranks make together."""

    device: torch.device
    effort: Effort

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call on the slowest rank, as the mean of several consecutive calls."""
        call()
        number = max(1, min(10_000, int(self.effort.seconds / max(self._slowest(call, 1), 1e-7))))
        return self._slowest(call, number)

    def fastest(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
        """Return the fastest round of each call; the calls alternate within a round."""
        taken = [[self._slowest(call, 1) for call in calls] for _ in range(rounds)]
        return [min(times) for times in zip(*taken, strict=True)]

    def issued(self, call: Callable[[], Any], number: int) -> float:
        """Return the host's seconds to issue one of ``number`` asynchronous calls."""
        call()
        finish_work(self.device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number

    def _slowest(self, call: Callable[[], Any], number: int) -> float:
        dist.barrier()
        finish_work(self.device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        finish_work(self.device)
        taken = torch.tensor((time.perf_counter() - start) / number, dtype=torch.float64, device=self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)


def _matmuls(watch: _CollectiveTimer, effort: Effort, device: torch.device) -> Iterator[MatmulTime]:
    for name in effort.dtypes:
        for width in effort.widths:
            left, right = (torch.rand(width, width, device=device).to(_DTYPES[name]) for _ in range(2))
            out = torch.empty_like(left)
            seconds = watch.seconds(partial(torch.mm, left, right, out=out))
            yield MatmulTime(name, 2.0 * width**3, seconds)


def _streams(watch: _CollectiveTimer, effort: Effort, device: torch.device) -> Iterator[StreamTime]:
    for num_bytes in effort.streams:
        left, right, out = (torch.ones(num_bytes // 4, device=device) for _ in range(3))
        seconds = watch.seconds(partial(torch.add, left, right, out=out))
        yield StreamTime(3.0 * num_bytes, seconds)


def _fresh_bandwidth(watch: _CollectiveTimer, effort: Effort) -> float:
    """Return B/s at which the system provides fresh memory: an addition with and without a new result of 48 MiB."""
    left = torch.ones(12 * 2**20)
    out = torch.empty_like(left)
    new, old = watch.fastest((lambda: left + left, lambda: torch.add(left, left, out=out)), effort.rounds)
    return left.nbytes / (new - old) if new > old else 0.0


def _collectives(
    watch: _CollectiveTimer, effort: Effort, device: torch.device, groups: Sequence[tuple[tuple[int, ...], Any]]
) -> Iterator[CollectiveTime]:
    for units, group in groups:
        for kind in KINDS:
            for num_bytes in effort.messages:
                call, moved = _call(kind, group, units[0], num_bytes, device)
                yield CollectiveTime(kind, units, moved, watch.seconds(call))


def _overlap(watch: _CollectiveTimer, effort: Effort, device: torch.device) -> float:
    """Return the fraction of an all-reduce over all ranks that matmuls of about the same duration hide. Calls alternate
    and the fastest counts: a disturbance would look like hidden or exposed time."""
    if dist.get_world_size() == 1:
        return 1.0
    message = torch.zeros(min(effort.messages[-1], _OVERLAPPED) // 4, device=device)
    width = effort.widths[len(effort.widths) // 2]
    left, right = (torch.rand(width, width, device=device) for _ in range(2))

    def send() -> None:
        dist.all_reduce(message)

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(left, right)

    def both() -> None:
        handle = dist.all_reduce(message, async_op=True)
        compute()
        handle.wait()

    repeats = 1
    alone = [watch.fastest((send, compute), effort.rounds) for _ in range(2)][1]
    repeats = max(1, round(alone[0] / alone[1]))
    return hidden_part(*watch.fastest((send, compute, both), 8 * effort.rounds))


def hidden_part(sent: float, computed: float, both: float) -> float:
    """Return the fraction of the shorter time that the longer one hides.

    >>> hidden_part(1.0, 2.0, 2.0), hidden_part(1.0, 2.0, 2.5), hidden_part(1.0, 2.0, 3.5)
    (1.0, 0.5, 0.0)
    """
    return min(1.0, max(0.0, (computed + sent - both) / min(computed, sent)))


def _create_groups(sizes: tuple[int, ...]) -> list[tuple[tuple[int, ...], Any]]:
    members_of = []
    for units, groups in groups_of(sizes):
        group_of = {tuple(members): dist.new_group(members) for members in groups}
        members_of.append((units, next(group for members, group in group_of.items() if dist.get_rank() in members)))
    return members_of


def groups_of(sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], list[list[int]]]]:
    """Yield (``Span.units``, a partition of all ranks): neighbours in a node, one rank per node, and all ranks."""
    inside = sizes[0]
    nodes = sizes[1] if len(sizes) > 1 else 1
    for size in range(2, inside + 1):
        if inside % size == 0:
            starts = range(0, inside * nodes, size)
            yield (size, 1, 1)[: len(sizes) + 1], [list(range(start, start + size)) for start in starts]
    for size in range(2, nodes + 1):
        if nodes % size == 0:
            first = [row * size * inside + column for row in range(nodes // size) for column in range(inside)]
            yield (size, size, 1), [list(range(start, start + size * inside, inside)) for start in first]
    if nodes > 1 and inside > 1:
        yield (inside * nodes, nodes, 1), [list(range(inside * nodes))]


def _call(kind: str, group: Any, size: int, num_bytes: int, device: torch.device) -> tuple[Callable[[], Any], float]:
    """Return a collective as ``runtime.communicator`` performs it, and the bytes that the cost model counts."""
    whole = torch.zeros(max(1, num_bytes // 4 // size) * size, device=device)
    other, part = torch.empty_like(whole), whole.new_zeros(whole.numel() // size)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group), whole.nbytes
    if kind == "all_gather":
        return lambda: gather_rows(other, part, group, is_async=False), whole.nbytes
    if kind == "reduce_scatter" and not adds_rows(group):
        return lambda: scatter_tensor(part, whole, group=group), whole.nbytes
    if kind == "reduce_scatter":

        def exchanged() -> None:
            received, flight = exchange_rows(whole, group, is_async=True)
            flight.wait()
            sum_received(received, size)

        return exchanged, whole.nbytes
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group), whole.nbytes
    place, count = dist.get_rank(group), whole.numel()
    counts = [count if member == (place + 1) % size else 0 for member in range(size)]
    taken = [count if member == (place - 1) % size else 0 for member in range(size)]
    return lambda: dist.all_to_all_single(other, whole, taken, counts, group=group), whole.nbytes


def sizes_of(names: Sequence[str]) -> tuple[int, ...]:
    """Return (ranks per machine, machines if several) from the name of every rank's machine. Raises LaunchError unless
    all have as many, consecutively."""
    inside = names.count(names[0])
    blocks = [set(names[start : start + inside]) for start in range(0, len(names), inside)]
    if len(names) % inside or any(len(block) > 1 for block in blocks) or len(set(names)) < len(blocks):
        what = f"the ranks are on {', '.join(names[:16])}: a different number per machine, or not consecutive"
        raise LaunchError(what, fix="start the same number on each, machine by machine")
    return (inside,) if len(blocks) == 1 else (inside, len(blocks))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _memory(device: torch.device, num_local: int) -> float:
    """Return the memory of a rank in bytes: its GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return probe.memory_bytes() / num_local


def _reserve(device: torch.device) -> float:
    """Return the bytes of a GPU that are not available for tensors: other uses at the end of the measurements (context,
    kernels, NCCL buffers), and 4 % of allocator fragmentation (measured on an H100)."""
    free, whole = torch.cuda.mem_get_info(device)
    return float(whole - free - torch.cuda.memory_reserved(device)) + 0.04 * whole


def _facts() -> dict[str, str]:
    version = sys.modules["shardwise"].__version__  # not imported: the package is a later layer
    backend = backend_of()
    if backend == "nccl":
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "software": f"shardwise {version}, torch {torch.__version__}, Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}, {torch.get_num_threads()} threads per rank",
        "backend": backend,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Kernels that ``shardwise calibrate`` measures on a GPU, one of each kind that a cluster file can describe. Small
# functions run once, forward and backward, below autograd, where PyTorch calls the same kernels as in a rank's program.
# ``costs.kernels`` gives the work of every call, as for a plan; then the call is timed by itself.

Seconds = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Sizes of the measured kernels. ``rows`` by ``width``: of memory-bound kernels; ``heads``, ``positions``,
    ``head``: of attention (``head`` is the width); ``images``, ``side``: batch and side of images."""

    rows: int
    width: int
    heads: int
    positions: int
    head: int
    images: int
    side: int
    dtype: torch.dtype

    @staticmethod
    def of(tiny: bool) -> KernelSizes:
        """Return sizes that fill a GPU, as the layers of a model do; with ``tiny``, sizes for a test run."""
        if tiny:
            return KernelSizes(16, 32, 2, 16, 8, 1, 8, torch.float32)
        return KernelSizes(8192, 4096, 64, 4096, 128, 32, 56, torch.bfloat16)


def kernel_times(seconds: Seconds, device: torch.device, sizes: KernelSizes) -> Iterator[KernelTime]:
    """Yield the time of each kernel. ``seconds``: times a call on all ranks together."""
    for function, shapes in _functions(sizes):
        tensors = [torch.randn(shape, device=device, dtype=sizes.dtype).requires_grad_() for shape in shapes]
        with _KernelCallRecorder() as calls:
            result = function(*tensors)
            torch.autograd.grad(result, tensors, torch.ones_like(result), allow_unused=True)
        for call, work in calls.kernel_calls:
            yield KernelTime(work, seconds(call))
    yield _update(seconds, device, sizes)


def launch_seconds(issue: Callable[[Callable[[], Any], int], float], device: torch.device) -> float:
    """Return the host's seconds to launch a kernel. ``issue``: times a number of asynchronous calls."""
    small, out = torch.ones(16, device=device), torch.ones(16, device=device)
    return issue(partial(torch.add, small, small, out=out), 500)


def host_bandwidth(seconds: Seconds, device: torch.device, num_bytes: int) -> float:
    """Return the B/s of copies between the device and pinned host memory, in the slower direction."""
    here = torch.ones(num_bytes // 4, device=device)
    there = torch.empty(num_bytes // 4, pin_memory=device.type == "cuda")
    slower = max(
        seconds(partial(there.copy_, here, non_blocking=True)), seconds(partial(here.copy_, there, non_blocking=True))
    )
    return here.nbytes / slower


class _KernelCallRecorder(OpRecorder):
    """Records the calls whose kernel kind a cluster file describes, each with its work."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_calls: list[tuple[Callable[[], Any], KernelWork]] = []

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        operands, results = _forms((args, kwargs)), _forms(returned)
        named: Any = tree_map(lambda leaf: Ref("value") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        work = work_of(KernelCall(func, tuple(named[0]), tuple(named[1].items())), operands, results)
        if work.kind:
            self.kernel_calls.append((partial(func, *args, **kwargs), work))


def _forms(tree: Any) -> Sequence[Form]:
    return [Form.of(leaf.detach()) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _functions(sizes: KernelSizes) -> list[tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]]:
    table = (sizes.rows, sizes.width)
    heads = (1, sizes.heads, sizes.positions, sizes.head)
    images, kernel = (sizes.images, 64, sizes.side, sizes.side), (64, 64, 3, 3)
    width = (sizes.width,)

    def labels(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(sizes.rows, device=x.device) % sizes.width

    def looked_up(weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(torch.arange(sizes.rows // 2, device=weight.device), weight)

    return [
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (heads, heads, heads)),
        (lambda x, w, b: F.layer_norm(x, width, w, b), (table, width, width)),
        (lambda x, w: F.rms_norm(x, width, w), (table, width)),
        (lambda x: torch.softmax(x, -1), (table,)),
        (lambda x: F.cross_entropy(x, labels(x)), (table,)),
        (lambda x: x.sum(-1), (table,)),
        (lambda x: x.sum(0), (table,)),
        (lambda x: F.dropout(x, 0.1), (table,)),
        (looked_up, (table,)),
        (lambda x, w: F.conv2d(x, w, padding=1), (images, kernel)),
        (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (images, (64,), (64,))),
        (lambda x: F.max_pool2d(x, 2), (images,)),
    ]


def _update(seconds: Seconds, device: torch.device, sizes: KernelSizes) -> KernelTime:
    """Time a fused AdamW over one parameter; the work is that of ``Prices.update``."""
    weight = torch.zeros(sizes.rows, sizes.width, device=device, dtype=sizes.dtype, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    update = update_of("adamw fused", foreach=device.type == "cuda")
    work = KernelWork("update", num_bytes=float(weight.nbytes * update.passes), scalars=weight.numel() * update.scalars)
    return KernelTime(work, seconds(optimizer.step))


if __name__ == "__main__":
    main()
