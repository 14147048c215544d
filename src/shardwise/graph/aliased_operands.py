"""Detection of operators that return their operand's memory though their schema does not say so.

For some arguments ``dropout(x, 0.)``, ``einsum("i->i", x)``, ``meshgrid(x)`` and others return the operand itself or a
view of it. torch.export keeps such a function as one operator, whose result has new memory. Calling the operator again
on the same fake tensors, outside export, shows whose memory the result has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from shardwise.graph.schema import tensor_results
from shardwise.graph.trees import storage_of


@dataclass(frozen=True, slots=True)
class AliasedOperand:
    """An operand whose memory a result has. ``is_whole``: the result equals the operand element by element, and the
    operand's memory holds nothing else."""

    operand: Node
    is_whole: bool


def aliased_operands(node: Node) -> dict[int, AliasedOperand]:
    """Return the results of a call that have an operand's memory, by position."""
    target: Any = node.target
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, Node) and isinstance(leaf.meta["val"], torch.Tensor)]
    is_said = any(result.alias_info for result in target._schema.returns)
    dtypes = {tensor.dtype for tensor in (*(o.meta["val"] for o in operands), *tensor_results(node.meta["val"]))}
    # One dtype: an aliased result has its operand's, and autocast would change the dtypes of other calls.
    if is_said or not operands or len(dtypes) != 1 or not target._can_decompose():
        return {}
    args, kwargs = pytree.tree_map_only(Node, lambda argument: argument.meta["val"], (node.args, node.kwargs))
    with operands[0].meta["val"].fake_mode, torch.no_grad():
        results = tensor_results(target(*args, **kwargs))
    owners = {storage_of(operand.meta["val"]): operand for operand in reversed(operands)}
    handed_on = {}
    for index, (result, traced) in enumerate(zip(results, tensor_results(node.meta["val"]), strict=True)):
        operand = owners.get(storage_of(result))
        if operand is None:
            continue
        entry = AliasedOperand(operand, _is_whole(result, operand.meta["val"]))
        if entry.is_whole or storage_of(traced) not in owners:
            handed_on[index] = entry
    return handed_on


def _is_whole(result: torch.Tensor, operand: torch.Tensor) -> bool:
    same = (result.shape, result.stride(), result.storage_offset()) == (operand.shape, operand.stride(), 0)
    return same and operand.is_contiguous() and result.is_conj() == operand.is_conj()
