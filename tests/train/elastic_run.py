"""A training script for elastic jobs: ``elastic_run.py FOLDER STEPS KIND [EVENT ...]``.

``EVENT`` is ``GENERATION:STEP:RANK:WHAT``: what a rank does to itself ahead of a step. Every rank 0 writes down, per
step, the loss and the place in the data.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.launch.restart_policy import ElasticConfig
from shardwise.runtime.generation import current
from shardwise.runtime.heartbeat_file import PAGE, HeartbeatFile
from train.runs import batch, make

SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "5"))
Events = dict[int, dict[int, str]]  # ahead of a step, to a rank


def data() -> TensorDataset:
    return TensorDataset(*torch.randint(0, 14, (2, 60, 5), generator=torch.Generator().manual_seed(1)))


class Written(sw.Trainer):
    """Writes losses down, and does what is to happen ahead of a step, when all ranks have kept the one before."""

    events: Events
    where: Path

    def _train_step(self, batches: Any) -> Any:
        if event := self.events.get(self.step + 1):
            dist.barrier()
            happens(self, event.get(sw.rank(), ""))
        loss, norm, count = super()._train_step(batches)
        if sw.rank() == 0:
            with (self.where / "losses").open("a") as file:
                file.write(json.dumps([self.step + 1, loss.item(), self.loader.epoch, self.loader.cursor]) + "\n")
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return loss, norm, count


def happens(trainer: sw.Trainer, what: str) -> None:
    if what == "differ":
        with torch.no_grad():
            next(trainer.par.parameters()).view(-1)[0] += 1e-9
    elif what == "hang":
        time.sleep(600)
    elif what == "stopped for long":  # nobody must wait, nor a time be chosen that busy machines exceed
        HeartbeatFile(os.environ[PAGE]).beat(time.monotonic() - 2 * ElasticConfig().silent_seconds)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "machine":  # the launcher, which is the parent of the process that ranks are forked from
        os.kill(int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
        time.sleep(600)
    elif what:
        os.kill(os.getpid(), getattr(signal, what))


def train(folder: Path, num_steps: int, kind: str, events: Events) -> None:
    num_ranks = sw.world_size()
    how: dict[str, Any] = {"mesh": sw.Mesh(dp=num_ranks)}
    if kind == "zero":
        how["zero"] = 1
    elif kind == "stages":
        how = {"stages": num_ranks, "micro_batch": 6, "mesh": sw.Mesh(dp=1)}
    with warnings.catch_warnings(action="ignore"):  # batch norm in parts of a batch: not what is tested here
        plan = sw.planned(lambda: sw.plan(make(), batch(0), num_ranks, search="sharding_propagation", **how))
        par = sw.parallelize(make(), plan, seed=7, check_replicas=1 if kind == "checked" else None)
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = sw.DataLoader(data(), par, 12, seed=5)
    trainer = Written(
        par, optimizer, loader, scheduler=scheduler, folder=folder / "run", save_every=SAVE_EVERY, progress=False
    )
    trainer.events, trainer.where = events, folder
    trainer.fit(num_steps)


def losses(folder: Path) -> dict[int, tuple[float, int, int]]:
    """Step -> (loss, epoch, cursor); what was done again must not differ by more than rounding."""
    found: dict[int, tuple[float, int, int]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss, *place = json.loads(line)
        if step in found:
            assert abs(found[step][0] - loss) < 1e-11, f"step {step} was done again with another loss"
            assert list(found[step][1:]) == place, f"step {step} was done again with other samples"
        found[step] = (loss, *place)
    return found


if __name__ == "__main__":
    sw.init_ranks()
    generation = current.generation
    told: Events = {}
    for number, step, rank, what in (event.split(":") for event in sys.argv[4:]):
        if generation is not None and int(number) == generation.number:
            told.setdefault(int(step), {})[int(rank)] = what
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], told)
