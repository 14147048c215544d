"""Read tensors of which every rank holds a part: whole, and their norms by name."""

from __future__ import annotations

from itertools import chain
from math import sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.runtime.guards.dcp import memory_place, optimizer_states
from shardwise.runtime.guards.norms import accumulator
from shardwise.runtime.guards.registry import held_tensors
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.parallel import Parallel


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the whole of a parameter, buffer, gradient or optimizer state of which each rank holds a part.

    Every rank that holds a part calls this: all ranks, under stages those of the stages that have the parameter.
    A tensor that is whole on every rank is copied, without a message.

    Args:
        tensor: A parameter or buffer of what ``sw.parallelize`` returned, its ``.grad``, or a tensor of an optimizer's
            state that has the parameter's shape. Not a copy or a view of one: nothing says which part that is.

    Returns:
        A new tensor of the shape that one device has, detached, on the same device.

    Raises:
        ShardwiseError: If it is not known which part of which tensor it is.
    """
    held = list(held_tensors(with_whole=True))
    states = ((state, record) for state, record, is_part in optimizer_states(held) if is_part)
    gradients = ((part.grad, record) for part, record in held if part.grad is not None)
    record = next((record for part, record in chain(held, gradients, states) if _is_same(tensor, part)), None)
    if record is None and any(held_tensors()) and not isinstance(tensor, torch.nn.Parameter):
        raise ShardwiseError(
            f"a tensor of shape {list(tensor.shape)} is no parameter, buffer, gradient or optimizer state of a "
            "parallel module: it is unknown which part of which tensor it is",
            fix="pass the tensor itself, no copy or view: sw.full_tensor(p.grad).float(), not "
            "sw.full_tensor(p.grad.float())",
        )
    return tensor.detach().clone() if record is None else record.gather(tensor)


def _is_same(tensor: Tensor, part: Tensor) -> bool:
    """Return whether two tensors are one, or entries of a state in the same memory. An empty part has none."""
    return tensor is part or (tensor.numel() > 0 and memory_place(tensor) == memory_place(part))


class Norms(NamedTuple):
    """Norms of whole tensors by name: of ``parameters``, and of the ``gradients`` of those that have one."""

    parameters: dict[str, float]
    gradients: dict[str, float]


@torch.no_grad()
def norms(par: Parallel) -> Norms:
    """Return the norm of every parameter and of every gradient, as one device would compute it, on every rank.

    Every rank calls this. It sends two numbers per parameter and rank, once, and waits for the device once.

    Args:
        par: What ``sw.parallelize`` returned.

    Returns:
        The 2-norms, computed in at least float32 and added up in float64, by the names of parameters. A parameter
        without a gradient on any rank is in ``parameters`` only.

    Raises:
        ShardwiseError: If ``par`` is not what ``sw.parallelize`` returned.
    """
    if not isinstance(par, Parallel):
        what = f"sw.norms takes what sw.parallelize returned, not {type(par).__name__}"
        raise ShardwiseError(what, fix="norms of a module on one device: p.norm() of its parameters")
    own, records = dict(par.named_parameters(remove_duplicate=False)), par.records
    names = [name for name, _ in par.original.named_parameters()]
    table = torch.zeros(3, len(names), dtype=torch.float64, device=par.device)  # squares, squares, has a gradient
    for i, name in enumerate(names):
        counts = records[name].counts if name in records else dist.get_rank() == 0  # what no program uses is whole
        if name not in own or not counts:
            continue
        table[0, i] = _square(own[name], par.device)
        gradient = own[name].grad
        if gradient is not None:
            table[1, i], table[2, i] = _square(gradient, par.device), 1.0
    with trail.waiting(b"norms"):
        dist.all_reduce(table)
        squares = table.tolist()
    of_parameters, of_gradients, has_gradient = [dict(zip(names, row, strict=True)) for row in squares]
    return Norms(
        {name: sqrt(square) for name, square in of_parameters.items()},
        {name: sqrt(square) for name, square in of_gradients.items() if has_gradient[name]},
    )


def _square(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the square of the 2-norm in float64."""
    dtype = tensor.dtype if tensor.is_complex() else accumulator(tensor.dtype)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.to(device, torch.float64).square()
