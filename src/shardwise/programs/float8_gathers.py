"""Gathers of weights in float8: a rank rounds its part of a weight, and the message has a byte per element.

A weight that only products in float8 read (``graph.float8``, one scale per tensor) is rounded element by element once
the largest number of the whole weight is known. So a gather of rounded parts gives the bits of the rounded whole.

The largest numbers of weights are found where these are stored, ahead of everything else in a step. Ranks combine them
in few messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.graph.float8 import E4M3, FLOAT8_LINEAR, LARGEST
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Layout
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.builder import Choice, gradient_free
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.rules.rule import OpRule


def rounded_name(gather: str) -> str:
    """Return the name of what a gather in float8 sends. ``gather``: the name of its result."""
    return f"{gather}~f8"


def operand_name(gather: str) -> str:
    """Return the name under which products take the result of a gather in float8, beside the one with a cotangent."""
    return f"{gather}.f8"


def weight_scales(graph: Graph, steps: Iterable[OpStep | Conversion]) -> frozenset[str]:
    """Return the largest numbers of parameters that operators find where these are stored, in all their layouts."""
    scales: set[str] = set()
    for step in steps:
        if isinstance(step, Conversion):
            scales.update(step.results if step.value in scales else ())
        elif step.placed.op.target == LARGEST and _is_parameter(step.operands[0], graph):
            scales.update(step.results)
    return frozenset(scales)


def _is_parameter(name: str, graph: Graph) -> bool:
    return name in graph.source_of and graph.source_of[name].kind == "parameter"


def scaled_where_stored(choice: Choice, graph: Graph, rules: Mapping[str, OpRule]) -> Choice:
    """Return the choice in which the largest numbers of parameters are found where these are stored."""
    strategies = dict(choice.strategies)
    for op in graph.ops:
        if op.target == LARGEST and _is_parameter(op.operands[0], graph):
            layout = choice.sources[op.operands[0]]
            strategy = _of_parts(rules[op.name], layout)
            if strategy and _reads(rules[op.name], strategy, layout):
                strategies[op.name] = strategy
    return replace(choice, strategies=strategies)


def _of_parts(rule: OpRule, layout: Layout) -> Strategy | None:
    """Return the strategy that splits the only operand of a rule like a layout, or None."""
    factors: list[tuple[str, tuple[str, ...]]] = []
    for names, dim in zip(rule.operands[0], layout.dims, strict=True):
        if len(names) != len(dim) and any(atom.axes for atom in dim):
            return None
        factors += [(name, atom.axes) for name, atom in zip(names, dim, strict=False) if atom.axes]
    return Strategy(tuple(sorted(factors)))


def _reads(rule: OpRule, strategy: Strategy, layout: Layout) -> bool:
    operand = apply_strategy(rule, strategy, layout.mesh).operands[0]
    return gradient_free(operand).canonical() == gradient_free(layout).canonical()


@dataclass(frozen=True)
class Float8Gathers:
    """The gathers of a program without buckets. ``ends``: values that the program delivers."""

    graph: Graph
    steps: Sequence[OpStep | Conversion]
    ends: Collection[str]

    def rounded(
        self, predicate: Callable[[Conversion], bool]
    ) -> tuple[tuple[OpStep | Conversion, ...], dict[str, Layout]]:
        """Return the steps with gathers in float8, those that may be and satisfy ``predicate``, and the layouts of
        further names. What finds the scales of weights comes first."""
        steps, layouts = list[OpStep | Conversion](), dict[str, Layout]()
        for step in self.steps:
            if isinstance(step, Conversion) and self._may_be_rounded(step) and predicate(step):
                layouts[operand_name(step.result)] = step.target
                scale = self._products(step)[0].operands[3]
                step = replace(step, itemsize=E4M3.itemsize, scale=scale)
            steps.append(step)

        def turn(step: OpStep | Conversion) -> int:
            return 2 if self._scales.isdisjoint(step.results) else isinstance(step, Conversion)

        return tuple(sorted(steps, key=turn)), layouts

    def _may_be_rounded(self, conversion: Conversion) -> bool:
        """Return whether a conversion gathers a weight that only products in float8 read. Products by rows round it by
        columns in backward."""
        products, collectives = self._products(conversion), conversion.collectives()
        if not products or not collectives or not _is_parameter(conversion.value, self.graph):
            return False
        is_read_alone = len(self._readers[conversion.result]) == len(products) and conversion.result not in self.ends
        is_moved = all(collective.kind in ("all_gather", "all_to_all") for collective in collectives)
        is_cut = any(move.cut or move.reverse for move in conversion.moves)
        scales = {step.operands[3] if len(step.operands) == 4 else "" for step in products}
        return is_read_alone and is_moved and not is_cut and len(scales) == 1 and scales <= self._scales

    @cached_property
    def _scales(self) -> frozenset[str]:
        return weight_scales(self.graph, self.steps)

    @cached_property
    def _readers(self) -> Mapping[str, list[OpStep | Conversion]]:
        readers: dict[str, list[OpStep | Conversion]] = {}
        for step in self.steps:
            for name in dict.fromkeys(step.operands):
                readers.setdefault(name, []).append(step)
        return readers

    def _products(self, conversion: Conversion) -> list[OpStep]:
        """Return the products in float8 that read a conversion's result as their weight, and as nothing else."""
        return [
            step
            for step in self._readers.get(conversion.result, ())
            if isinstance(step, OpStep) and step.placed.op.target == FLOAT8_LINEAR
            if step.operands[1] == conversion.result and step.operands.count(conversion.result) == 1
        ]
