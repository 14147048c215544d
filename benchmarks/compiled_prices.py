"""What kernels a compiler makes of a graph of operators: chains of element-wise ones become one pass over memory.

Products, and what scatters, stay kernels of their own. Everything else at one *depth* (the number of such kernels that
come before it) is one kernel with those that it exchanges values with, or with which it reads the same large value: it
reads what comes from outside once and writes what others read. Sums over rows are in the kernel of what makes them and
of what reads them, as in a norm; sums over columns (gradients of weights and biases) end a kernel. So Inductor's
scheduler fuses, but for its limits on the size of a kernel.

``price_section`` makes programs whose sections were priced instead of compiled: for the time and memory of a compiled
step on a machine without the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from shardwise.costs.cluster import PRODUCTS
from shardwise.costs.kernels import KernelCall, KernelWork, work_of
from shardwise.graph.ir import Ref
from shardwise.programs.forms import Form

_BY_THEMSELVES = {"scatter", *PRODUCTS}
_LEAST_BYTES = 2**16  # of a value that two kernels are joined for because both read it


def fused_works(module: fx.GraphModule) -> tuple[KernelWork, ...]:
    """Return the kernels of a graph whose nodes have their fake tensors as ``meta["val"]``."""
    return _Fusion(module.graph).run()


@dataclass
class _Fusion:
    graph: fx.Graph
    depth: dict[fx.Node, int] = field(default_factory=dict)
    root: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of a view: what it looks at
    alone: dict[fx.Node, KernelWork] = field(default_factory=dict)
    members: list[fx.Node] = field(default_factory=list)
    columns: set[fx.Node] = field(default_factory=set)
    rows: set[fx.Node] = field(default_factory=set)

    def run(self) -> tuple[KernelWork, ...]:
        joined = nx.Graph()
        readers: dict[tuple[fx.Node, int, bool], fx.Node] = {}
        for node in self.graph.nodes:
            operands = list(dict.fromkeys(self._origin(operand) for operand in node.all_input_nodes))
            self.depth[node] = max((self.depth[operand] + (operand in self.alone) for operand in operands), default=0)
            if node.op != "call_function" or not _forms(node) or self._is_view(node):
                continue
            work = _work(node)
            if work.flops or work.kind in _BY_THEMSELVES:
                self.alone[node] = work
                continue
            self.members.append(node)
            (self.columns if work.kind == "column_reduction" else self.rows if work.kind == "reduction" else set()).add(
                node
            )
            joined.add_node(node)
            for operand in operands:
                if operand in joined and operand not in self.columns and self.depth[operand] == self.depth[node]:
                    joined.add_edge(operand, node)
                elif _num_bytes(operand) >= _LEAST_BYTES:
                    reader = readers.setdefault((operand, self.depth[node], node in self.columns), node)
                    joined.add_edge(reader, node)
        groups = [self._work_of(set(group)) for group in nx.connected_components(joined)]
        return (*self.alone.values(), *(work for work in groups if work.num_bytes))

    def _is_view(self, node: fx.Node) -> bool:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):  # takes one of several results
            self.root[node] = self._origin(node.all_input_nodes[0])
            return True
        aliased = any(out.alias_info is not None and not out.alias_info.is_write for out in target._schema.returns)
        if aliased and node.all_input_nodes:
            self.root[node] = self._origin(node.all_input_nodes[0])
        return aliased

    def _origin(self, node: fx.Node) -> fx.Node:
        return self.root.get(node, node)

    def _work_of(self, group: set[fx.Node]) -> KernelWork:
        """One pass over what a group reads from outside and what others read of it."""
        read = {self._origin(operand) for node in group for operand in node.all_input_nodes} - group
        written = [node for node in group if any(user not in group for user in self._users(node))]
        num_bytes = sum(map(_num_bytes, (*read, *written)))
        kind = "column_reduction" if group & self.columns else "fused_reduction" if group & self.rows else ""
        return KernelWork(kind, num_bytes=float(num_bytes))

    def _users(self, node: fx.Node) -> Iterable[fx.Node]:
        """Yield the readers of a value, looking through its views."""
        for user in node.users:
            if user in self.root and user.op == "call_function":
                yield from self._users(user)
            else:
                yield user


def _forms(node: fx.Node) -> Sequence[Form]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [Form.of(tensor) for tensor in values if isinstance(tensor, Tensor)]


def _num_bytes(node: fx.Node) -> int:
    return sum(form.num_bytes for form in _forms(node) if prod(form.shape))


def _work(node: fx.Node) -> KernelWork:
    def ref(operand: fx.Node) -> Any:
        return Ref(operand.name)

    args = fx.map_arg(node.args, ref)
    kwargs = tuple((key, fx.map_arg(value, ref)) for key, value in node.kwargs.items())
    operands = [form for operand in node.all_input_nodes for form in _forms(operand)]
    return work_of(KernelCall(node.target, tuple(args), kwargs), operands, _forms(node))


@dataclass(frozen=True)
class PricedSection:
    """A section that cannot run: the work its kernels would do."""

    works: tuple[KernelWork, ...]

    def __call__(self, operands: list[Tensor]) -> Sequence[Tensor]:
        raise AssertionError("a section that was only priced cannot be run")


def price_section(
    module: fx.GraphModule, operands: Sequence[Tensor], fixed: Sequence[int]
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], Sequence[tuple[int, ...] | None]]:
    """Return the work of the kernels that Inductor would make."""
    return PricedSection(fused_works(module)), [None] * len(module.graph.output_node().args[0])
