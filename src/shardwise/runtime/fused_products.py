"""Runs a message and its products as one operator of symmetric memory, on GPUs of one machine that reach each other."""

from __future__ import annotations

import socket
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the operators

from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.instructions import sent_by
from shardwise.runtime.communicator import Communicator


class RunFusedProduct(torch.nn.Module):
    """The operands of a ``FusedProduct`` -> its results."""

    def __init__(self, instruction: FusedProduct, ranks: Communicator) -> None:
        super().__init__()
        self.instruction, self.ranks = instruction, ranks
        (self.message,) = sent_by(instruction)
        self.group = ranks.group(self.message.axes).group_name

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, ops = self.instruction, torch.ops.symm_mem
        self.ranks.launched += 1
        self.ranks.note(self.message.kind, self.message.axes, self.message.num_bytes)
        left, weights = operands[0], one.weights(operands)
        if one.gathers:
            whole, products = ops.fused_all_gather_matmul(left, weights, one.dim, self.group)
            made = whole, *products
        else:
            made = (ops.fused_matmul_reduce_scatter(left, weights[0], "sum", one.dim, self.group),)
        # Results of these operators lie in memory with ``dim`` first.
        return tuple(each.contiguous().view(form.shape) for each, form in zip(made, one.forms, strict=True))


def have_symmetric_memory(group: Any) -> bool:
    """Return whether the GPUs of a group's ranks reach each other's memory. All of them must call this."""
    here, device = crc32(socket.gethostname().encode()), torch.cuda.current_device()
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    reaches = bool(others) and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    seen = torch.tensor([here, -here, int(not reaches)], device="cuda")
    dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, is_missing = seen.tolist()
    return largest == -smallest and not is_missing
