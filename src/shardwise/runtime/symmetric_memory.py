"""Runs a message and its products as one operator of symmetric memory, on GPUs of one machine that reach each other.

Elsewhere the message and the products of the same instruction run one after the other.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the operators

from shardwise.errors import listed
from shardwise.graph.ir import Graph
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.instructions import sent_by
from shardwise.programs.moves import local_move
from shardwise.runtime.communicator import Communicator, InFlight, rank_device
from shardwise.runtime.messages import CollectiveMessage
from shardwise.runtime.transit import Converting


class RunFusedProduct(Converting):
    """The operands of a ``FusedProduct`` -> its results."""

    def __init__(self, instruction: FusedProduct, graph: Graph, ranks: Communicator) -> None:
        super().__init__(instruction, graph, ranks)
        self.fused = FusedMessage(self) if ranks.symmetric.get(frozenset(sent_by(instruction)[0].axes)) else None

    def forward(self, *operands: torch.Tensor) -> Any:
        one = self.instruction
        if self.fused is not None:
            made, _ = self.fused.launch(operands, wait=True)
        elif one.gathers:
            (whole,) = self.direction(operands[:1])
            made = [whole, *one.products(whole, operands)]
        else:
            made = self.direction([one.scattered(operands)])
        return tuple(made) if one.gathers else made[0]


class FusedMessage(CollectiveMessage):
    """The collective of a fused product: operands -> results."""

    def __init__(self, running: RunFusedProduct) -> None:
        self.instruction, ranks = running.instruction, running.purpose.ranks
        (conversion,), (self.sent,) = self.instruction.conversions, sent_by(self.instruction)
        move = local_move(conversion.moves[0], ranks.coordinates, backward=self.instruction.backward)
        super().__init__([move], ranks, running.purpose, [[0]])
        self.group = ranks.group(self.sent.axes).group_name

    def _start(self, tensors: Sequence[torch.Tensor], blocks: bool) -> tuple[list[torch.Tensor], list[InFlight], int]:
        one, operators = self.instruction, torch.ops.symm_mem
        left, weights = tensors[0], one.weights(tensors)
        if one.gathers:
            whole, products = operators.fused_all_gather_matmul(left, weights, one.dim, self.group)
            made = [whole, *products]
        else:
            made = [operators.fused_matmul_reduce_scatter(left, weights[0], "sum", one.dim, self.group)]
        # Results of these operators lie in memory with ``dim`` first.
        made = [each.contiguous().view(form.shape) for each, form in zip(made, one.forms, strict=True)]
        return made, [], self.sent.num_bytes


def find_symmetric_memory(ranks: Communicator, axis_sets: Collection[frozenset[str]]) -> None:
    """Find the axes along which a message and its products are one operator, once each.

    All ranks call this, and the ranks of a group agree. Where a group has no symmetric memory, rank 0 prints it.
    """
    if not ranks.coordinates:
        return
    missing = []
    for axes in sorted(axis_sets - ranks.symmetric.keys(), key=sorted):
        ranks.symmetric[axes] = rank_device().type == "cuda" and have_symmetric_memory(ranks.group(tuple(axes)))
        if not ranks.symmetric[axes]:
            missing.append("+".join(sorted(axes)))
    if missing and ranks.rank == min(ranks.place.ranks):
        what = "row_chunks='fused', but these ranks are not NVIDIA GPUs of one machine that reach each other's memory"
        text = f"shardwise: the plan has {what}: messages along {listed(missing)} and products run one after the other"
        print(text, file=sys.stderr)


def have_symmetric_memory(group: Any) -> bool:
    """Return whether the GPUs of a group's ranks reach each other's memory. All of them must call this."""
    here, device = crc32(socket.gethostname().encode()), torch.cuda.current_device()
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    reaches = bool(others) and torch.version.hip is None
    reaches = reaches and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    seen = torch.tensor([here, -here, int(not reaches)], device="cuda")
    dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, is_missing = seen.tolist()
    return largest == -smallest and not is_missing
