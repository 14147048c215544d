"""Every process finds the same plan: ranks of a job plan by themselves."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch, shardwise as sw
from torch import nn
with torch.device("meta"):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True), 3)
    x = torch.zeros(32, 256, 512)
options = dict(loss=lambda output: output.square().mean(), micro_batch=16, memory_bytes=80e6, cache=False)
plan = sw.plan(model, x, "h100-1x8", **options)
print(plan.digest)
"""


def test_plans_do_not_depend_on_the_order_of_sets() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    told = [process.communicate()[0] for process in running]
    assert told[0] == told[1] != ""
