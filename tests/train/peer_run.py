"""A training script whose ranks are machines of their own: ``peer_run.py FOLDER STEPS KIND EVERY [STEP:RANK]``.

``STEP:RANK``: that rank is killed ahead of this step. Every rank writes its state down at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from train.elastic_run import data
from train.runs import batch, make

HOW: dict[str, Any] = {"zero": {"zero": 1}, "zero3": {"zero": 3}, "dp": {}}


def main() -> None:
    folder, num_steps, kind, every, *lost = sys.argv[1:]
    sw.init_ranks()
    count, rank = sw.world_size(), sw.rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm in parts of a batch: not what is tested here
        mesh = sw.Mesh(dp=count)
        plan = sw.plan(make(), batch(0), count, search="sharding_propagation", mesh=mesh, **HOW[kind])
        par = sw.parallelize(make(), plan, seed=7)
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.01)
    loader = sw.DataLoader(data(), par, 12, seed=5)
    memory = Path(folder, f"machine-{rank}")
    recovery = sw.Recovery(par, optimizer, data=loader, peer_copy=sw.PeerCopy(memory, int(every)))
    step = recovery.resume()
    if rank == 0:
        with Path(folder, "begun").open("a") as file:
            file.write(f"{step} {recovery.extra}\n")
    kill = [int(text) for text in lost[0].split(":")] if lost else [0, 0]
    while step < int(num_steps):
        for own in loader:
            if [step + 1, rank] == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            par.step(*own)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            recovery.keep(step, extra={"at": step})
            if step == int(num_steps):
                break
    states = {name: optimizer.state[p] for name, p in par.named_parameters()}
    torch.save([dict(par.state_dict()), states, loader.state_dict()], Path(folder, f"state-{rank}"))
    sw.finish()


if __name__ == "__main__":
    main()
