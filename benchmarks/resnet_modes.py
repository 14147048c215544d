"""Times training steps of ResNet-50 in data_parallel and in auto_parallel mode: the slides' chart, as a table.

Both modes of the MindSpore dialect, auto_parallel with each of some searches, train the same network from the same
weights on gloo ranks (one thread each), in one run, and take turns step by step in an order that changes
(``step_time``): a machine's speed drifts by more than what is measured. All ranks are given the same rows, for which
local batch statistics are the global ones, so that all must have the same losses, compared in float64 before anything
is timed.

Run ``python benchmarks/resnet_modes.py [--ranks 8] [--image 64] [--rows 2] [--search dynamic_programming]``.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every rank

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from step_time import LOSS_STEPS, TIMEOUT, quartiles, ratios, slowest, take_turns
from torch.multiprocessing.spawn import start_processes

import shardwise.mindspore as ms
from shardwise.mindspore import nn

sys.path.append(str(Path(__file__).parents[1] / "examples" / "mindspore" / "slides"))
from issued import issued
from resnet import ResNet

# In float64. In float32 the modes part after a step: fifty batch norms, the last ones of a few values per channel,
# make 1e-5 of the loss of its rounding, and far more of the gradients.
LOSS_TOLERANCE = 1e-6
DATA_PARALLEL = "data_parallel"
SEARCHES = ("recursive_programming", "dynamic_programming")  # without strategies nothing is propagated


@dataclass(frozen=True)
class Result:
    """What a run measured, by mode: data_parallel, or a search of auto_parallel. ``seconds``: per round, on the slowest
    rank; ``sent``: (collectives, bytes) of a step; ``held``: bytes of parameters on a rank; ``first``: seconds of the
    first step, planning included."""

    losses: Mapping[str, list[float]]
    seconds: Mapping[str, list[float]]
    sent: Mapping[str, tuple[int, int]]
    held: Mapping[str, int]
    first: Mapping[str, float]


def make_step(
    mode: str, options: argparse.Namespace, dtype: torch.dtype
) -> tuple[Callable[..., torch.Tensor], nn.Cell]:
    """A training step of the network in a mode, and the network."""
    ms.set_seed(1)
    net = ResNet(options.layers, options.classes, options.width).to(dtype)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    trained = nn.TrainOneStepCell(nn.WithLossCell(net, loss), nn.Momentum(net.trainable_params(), 0.01, 0.9))
    trained.set_train()

    def step(*batch: torch.Tensor) -> torch.Tensor:
        if mode == DATA_PARALLEL:
            ms.set_auto_parallel_context(parallel_mode=mode, gradients_mean=True)
        else:
            ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode=mode, gradients_mean=False)
        result: torch.Tensor = trained(*batch)
        return result

    return step, net


def rank_main(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    """What every rank does; rank 0 leaves the result in ``folder``."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    numbers = torch.Generator().manual_seed(0)
    batch = (
        torch.rand(options.rows, 3, options.image, options.image, generator=numbers),
        torch.randint(options.classes, (options.rows,), generator=numbers),
    )
    losses = {}
    for mode in (DATA_PARALLEL, *options.search):
        step, _ = make_step(mode, options, torch.float64)
        losses[mode] = [float(step(batch[0].double(), batch[1])) for _ in range(LOSS_STEPS)]
    check_losses(losses)
    del step
    steps, held, first = {}, {}, {}
    for mode in (DATA_PARALLEL, *options.search):
        steps[mode], net = make_step(mode, options, torch.float32)
        began = time.perf_counter()
        steps[mode](*batch)
        first[mode] = time.perf_counter() - began
        held[mode] = sum(parameter.nbytes for parameter in net.parameters())
    sent = {}
    for mode, step in steps.items():
        with issued() as heard:
            step(*batch)
        sent[mode] = len(heard), sum(own.num_bytes for own in heard)
    gc.collect()
    gc.freeze()
    seconds = slowest(take_turns(steps, batch, options.rounds)[0])
    if rank == 0:
        torch.save(Result(losses, seconds, sent, held, first), f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise if the modes do not compute the same thing."""
    expected = losses[DATA_PARALLEL]
    for mode, found in losses.items():
        if any(abs(a - b) > LOSS_TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"{mode} trains differently: its losses are {found}, not {expected}")


def run(options: argparse.Namespace) -> Result:
    """Start the ranks and wait for their result."""
    get_context("forkserver").set_forkserver_preload(["torch.distributed", "shardwise"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options, folder)
        start_processes(rank_main, arguments, nprocs=options.ranks, start_method="forkserver")
        result: Result = torch.load(f"{folder}/result", weights_only=False)
    return result


def mode_table(result: Result, title: str) -> Table:
    """One line per mode."""
    table = Table(title=title)
    for heading in ("mode", "seconds per step", "ratio", "quartiles", "messages", "MB sent", "MB held", "first step"):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for mode in result.seconds:
        low, ratio, high = quartiles(ratios(result.seconds, mode))
        number, num_bytes = result.sent[mode]
        table.add_row(
            mode if mode == DATA_PARALLEL else f"auto_parallel, {mode}",
            f"{median(result.seconds[mode]):.3f}",
            f"{ratio:.3f}",
            f"{low:.3f} - {high:.3f}",
            str(number),
            f"{num_bytes / 1e6:.1f}",
            f"{result.held[mode] / 1e6:.1f}",
            f"{result.first[mode]:.1f} s",
        )
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--search", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 4, 6, 3])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--image", type=int, default=64, help="pixels in each direction")
    parser.add_argument("--rows", type=int, default=2, help="of every rank")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each mode")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    name = "ResNet-50" if tuple(options.layers) == (3, 4, 6, 3) else f"ResNet {options.layers}"
    images = f"{options.rows} images of {options.image}x{options.image} per rank"
    title = f"{name}, {options.ranks} ranks, {images}: training steps in turn, losses equal"
    Console(width=None if sys.stdout.isatty() else 140).print(mode_table(run(options), title))


if __name__ == "__main__":
    main()
