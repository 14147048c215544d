"""A bound of the price of all plans whose blocks have memory policies of their own.

``fit_memory`` searches one policy for all blocks at a time, and then recomputes less in some of them. The bound holds
for all such mixtures: in the cost graph of this module, every block has one more variable, its policy. Only the tables
of the block have it, so that elimination is as narrow as for one policy, and equal blocks are eliminated once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple, cast

import numpy as np

from shardwise.graph.segments import Segment
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Floats, Ints
from shardwise.search.constants import EXACT_GAP, FAST_JOINT_COMBINATIONS
from shardwise.search.cost_graph import Components, CostGraph, CostWeights, Variable
from shardwise.search.cost_tables import CostTable, Tables
from shardwise.search.dynamic_programming import DoesNotFit, least_step
from shardwise.search.elimination import TooWide, elimination_of
from shardwise.search.memory_policy import PricedPolicy, blocks_of
from shardwise.search.planner import Planner


class BlockPolicy(NamedTuple):
    """The variable of a block: which of ``size`` policies it has."""

    name: str
    size: int


# ``policies[p][q]``: policy p for blocks of even number, policy q for the others.
PolicyPairs = Sequence[Sequence[PricedPolicy]]


def least_of_mixtures(planners: Sequence[Planner], mesh: Mesh, memory_bytes: float, cutoff: float) -> float:
    """Return a bound of the additive price of all plans on a mesh whose blocks each have the policy of any planner.

    Args:
        planners: Planners of one model, whose policies differ in how blocks are recomputed. The first recomputes none.
        mesh: The mesh.
        memory_bytes: The additive bytes that plans may have.
        cutoff: A bound above it need not be tight.

    Returns:
        The bound: infinite if nothing fits, 0 if none is known (``with_policy_by_block``).
    """
    cost, num_blocks = cost_graph_by_block(planners, mesh), len(blocks_of(planners[0].graph))
    if cost is None or not _is_narrow(cost):
        return 0.0
    known = (
        [*solution.assignment, *[number] * num_blocks]
        for number, planner in enumerate(planners)
        for solution in planner.cost_graph(mesh).solutions.values()
    )
    try:
        return least_step(cost, cutoff, memory_bytes, known) * (1 - EXACT_GAP)
    except DoesNotFit:
        return inf


def cost_graph_by_block(planners: Sequence[Planner], mesh: Mesh) -> CostGraph | None:
    """Return the cost graph in which every block has the policy of any planner (``with_policy_by_block``)."""
    first, blocks = planners[0], blocks_of(planners[0].graph)
    own = first.settings.memory_policy.segments
    number_of = {block.name: number for number, block in enumerate(blocks)}
    added = [[s for s in planner.settings.memory_policy.segments if s not in own] for planner in planners]

    def pair(even: Sequence[Segment], odd: Sequence[Segment]) -> PricedPolicy:
        mixed = [segment for part, by in ((even, 0), (odd, 1)) for segment in part if number_of[segment.name] % 2 == by]
        policy = replace(first.settings.memory_policy, segments=(*own, *mixed))
        return policy.priced(first.values, first.settings.in_flight)

    pairs = [[pair(even, odd) for odd in added] for even in added]
    block_of = {op: number_of[block.name] for block in blocks for op in block.operators}
    return with_policy_by_block(first.tables(mesh), pairs, block_of)


def _is_narrow(cost: CostGraph) -> bool:
    """Return whether a solve takes a second at most."""
    try:
        return elimination_of(cost.weighted(CostWeights())).largest <= FAST_JOINT_COMBINATIONS
    except TooWide:
        return False


def with_policy_by_block(tables: Tables, policies: PolicyPairs, block_of: Mapping[str, int]) -> CostGraph | None:
    """Return the cost graph with the policy of every block as one more variable, after all others.

    Args:
        tables: The tables of all policies.
        policies: The policies in pairs.
        block_of: Operator -> number of its block; those outside of blocks are missing.

    Returns:
        The cost graph; None if a table depends on other policies than those of one block, or of an even and an odd one.
    """
    first, num_blocks = len(tables.cost.variables), 1 + max(block_of.values(), default=-1)
    added = cast("list[Variable]", [BlockPolicy(str(number), len(policies)) for number in range(num_blocks)])
    cost = replace(tables.cost, variables=[*tables.cost.variables, *added], factors=[], kinds=[], transients={})
    kinds: dict[object, int] = {}
    for factor in tables.factors:
        blocks = sorted({block_of[name] for name in factor.operators if name in block_of})
        if len({number % 2 for number in blocks}) < len(blocks):
            return None
        choices = [*product(range(len(policies)), repeat=len(blocks))]
        used = [_pair(policies, blocks, choice) for choice in choices]
        hows = [factor.how(policy) for policy in used]
        numbers = {how: number for number, how in enumerate(dict.fromkeys(hows))}
        content = np.array([numbers[how] for how in hows], dtype=np.int64).reshape((len(policies),) * len(blocks))
        axes = tuple(axis for axis in range(len(blocks)) if (content != content.take([0], axis)).any())
        for axis in sorted({*range(len(blocks))} - {*axes}, reverse=True):
            content = content.take([0], axis).squeeze(axis)
        key = factor.number, tuple(numbers), content.tobytes(), content.shape
        if key not in kinds:
            kinds[key] = len(cost.kinds)
            cost.kinds.append(_stacked(tables, factor, dict(zip(hows, used, strict=True)), [*numbers], content))
        cost.factors.append(((*factor.scope, *(first + blocks[axis] for axis in axes)), kinds[key]))
    return cost


def _pair(policies: PolicyPairs, blocks: Sequence[int], choice: Sequence[int]) -> PricedPolicy:
    """Return the policies of a choice for blocks, of which at most one is even and one odd."""
    by_parity = {number % 2: policy for number, policy in zip(blocks, choice, strict=True)}
    even, odd = by_parity.get(0, by_parity.get(1, 0)), by_parity.get(1, by_parity.get(0, 0))
    return policies[even][odd]


def _stacked(
    tables: Tables,
    factor: CostTable,
    policy_of: Mapping[tuple[bool, ...], PricedPolicy],
    hows: Sequence[tuple[bool, ...]],
    content: Ints,
) -> Components:
    """Return the tables of all policies as one, whose last axes are those of ``content``: which of ``hows`` it is."""
    parts = [tables.components_of(factor, policy_of[how], how) for how in hows]
    if not content.ndim:
        return parts[int(content)]
    shape = next(table.shape for table in parts[0] if table is not None)
    stacked: list[Floats | None] = []
    for component in zip(*parts, strict=True):
        is_zero = all(table is None for table in component)
        every = np.stack([np.zeros(shape) if table is None else table for table in component], axis=-1)
        stacked.append(None if is_zero else np.ascontiguousarray(every[..., content]))
    return tuple(stacked)
