"""What checkpoints cost a training run on this machine's CPU: the step after a save beside a normal one, the stall of a
save that goes on beside training beside the copy of its bytes, what a checkpoint in every step costs, and seconds to
save and load.

    python benchmarks/checkpoints.py [--width 768] [--steps 12]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

_STEPS_OF_A_TURN = 3


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def every_step(step: Callable[[], None], save: Callable[[int], sw.Saving], rounds: int) -> tuple[list[float], float]:
    """(per round the time of steps with a checkpoint each over that of steps without; the same of all CPU seconds). In
    turns, since other work on the machine comes and goes."""
    ratios: list[float] = []
    cpu = {True: 0.0, False: 0.0}
    number = 0
    for _ in range(rounds):
        wall = {}
        for saves in (False, True):
            saving = None
            start, began = time.perf_counter(), time.process_time()
            for _ in range(_STEPS_OF_A_TURN):
                if saves:
                    number += 1
                    saving = save(number)
                step()
            wall[saves] = time.perf_counter() - start
            if saving is not None:
                saving.wait()
            cpu[saves] += time.process_time() - began
        ratios.append(wall[True] / wall[False])
    return ratios, cpu[True] / cpu[False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(width, 4 * width), nn.Linear(4 * width, width)))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(options.samples, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    num_bytes = sum(t.nbytes for t in held)
    room = [torch.empty_like(t) for t in held]
    folder = Path(tempfile.mkdtemp())
    normal, after, stalls, copies, waits = [], [], [], [], []
    stalled, copied = [], []  # CPU seconds of this thread: other work on the machine counts less
    for number in range(options.steps):
        normal.append(seconds(step))
        began = time.thread_time()
        copies.append(seconds(lambda: [a.copy_(b) for a, b in zip(room, held, strict=True)]))
        copied.append(time.thread_time() - began)
        start, began = time.perf_counter(), time.thread_time()
        saving = sw.save_checkpoint(folder / f"step-{number}", model, optimizer, step=number, blocking=False)
        stalls.append(time.perf_counter() - start)
        stalled.append(time.thread_time() - began)
        after.append(seconds(step))
        waits.append(seconds(saving.wait))
        shutil.rmtree(folder / f"step-{number}")
    beside = folder / "every step"

    def save(number: int) -> sw.Saving:
        path = beside / f"step-{number}"
        return sw.save_checkpoint(path, model, optimizer, step=number, keep=sw.Keep(last=2), blocking=False)

    ratios, cpu = every_step(step, save, max(options.steps // _STEPS_OF_A_TURN, 3))
    blocking = seconds(lambda: sw.save_checkpoint(folder / "last", model, optimizer, step=0))
    loading = seconds(lambda: sw.load_checkpoint(folder / "last", model, optimizer))
    shutil.rmtree(folder)
    half = options.steps // 4  # the first saves allocate
    middle = {
        name: statistics.median(values[half:])
        for name, values in (
            ("normal", normal), ("after", after), ("stall", stalls), ("copy", copies), ("wait", waits),
            ("stalled", stalled), ("copied", copied),
        )
    }  # fmt: skip
    print(
        f"{num_bytes / 2**20:.0f} MiB of parameters and optimizer states, one rank, {torch.get_num_threads()} threads"
    )
    print(f"a step            {middle['normal']:.3f} s")
    print(f"the one beside a save {middle['after']:.3f} s ({middle['after'] / middle['normal']:.2f} of it)")
    print(f"stall of a save   {middle['stall']:.3f} s ({middle['stall'] / middle['copy']:.2f} of a copy of its bytes)")
    of_copy = middle["stalled"] / middle["copied"]
    print(f"CPU seconds of it {middle['stalled']:.4f} s, {of_copy:.3f} of those of the copy")
    low, high = min(ratios), max(ratios)
    print(f"steps with a checkpoint each {statistics.median(ratios):.3f} of steps without ({low:.3f} to {high:.3f})")
    print(f"CPU seconds of these {cpu:.3f}, all threads and what the system does for them")
    print(f"then still writing {middle['wait']:.3f} s")
    print(f"a save that waits {blocking:.3f} s, a load {loading:.3f} s")


if __name__ == "__main__":
    main()
