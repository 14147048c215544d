"""Read tensors of which every rank holds a part: whole, and their norms by name."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.guards.dcp import ShardIndex
from shardwise.runtime.guards.registry import held_tensors
from shardwise.runtime.hooks import gather_whole
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
    held = list(held_tensors())
    record = next((record for part, record in held if tensor is part or tensor is part.grad), None)
    if record is None and tensor.numel():  # an empty part is known by its identity only
        record = ShardIndex(held).of(tensor, ())
    if record is None and held and not isinstance(tensor, torch.nn.Parameter):
        raise ShardwiseError(
            f"a tensor of shape {list(tensor.shape)} is no parameter, buffer, gradient or optimizer state of a "
            "parallel module: it is unknown which part of which tensor it is",
            fix="pass the tensor itself, no copy or view: sw.full_tensor(p.grad).float(), not "
            "sw.full_tensor(p.grad.float())",
        )
    if record is None or not record.layout.positions:
        return tensor.detach().clone()
    return gather_whole(tensor, record.layout, f"the whole of {record.name}", record.ranks)


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
    wider = torch.promote_types(tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=tensor.dtype if tensor.is_complex() else wider)
    return norm.to(device, torch.float64).square()
