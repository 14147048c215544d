"""A user's file, as a type checker sees it (``test_typing.py``): every line that is marked is an error, no other is."""

import torch

import shardwise as sw
import shardwise.mindspore as ms
from shardwise.mindspore import nn, ops
from shardwise.mindspore.ops import operations as P

model = torch.nn.Linear(4, 4)
batch = (torch.zeros(4, 4),)
plan = sw.plan(model, batch, sw.Cluster.load("h100-1x8"), mode="auto", search="dynamic_programming")
print(f"{plan.prediction.step_seconds * 1e3:.2f} ms a step, gap {plan.optimality_gap:.1%}")
fits: bool = sw.verify(model, batch, plan).ok

product: ops.MatMul = ops.MatMul(transpose_b=True)
same: P.MatMul = ms.ops.MatMul().shard(((2, 4), (4, 1)))
dense: nn.Cell = nn.Dense(4, 4)

sw.paralellize(model, plan)  # error: attr-defined
sw.plan(model, batch, 8, mode="semi")  # error: arg-type
sw.plan(model, batch, 8, search="dynamic")  # error: arg-type
sw.compare(model, batch, 8, searches=("dynamic_programming", "greedy"))  # error: arg-type
print(plan.predction)  # error: attr-defined
ops.MatMul(transpose=True)  # error: call-arg
ops.MatMul().shrd(((1, 1), (1, 1)))  # error: attr-defined
