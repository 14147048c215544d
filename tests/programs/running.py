"""Random strategies and storage layouts for a program, and its run on the virtual cluster against the whole one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from layouts.placing import random_layout, scatter, worst_difference
from programs.building import Program
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import Router
from shardwise.graph.ir import Graph, Op, Ref
from shardwise.layouts.choice import AxisChoice, Split, parse_choice
from shardwise.layouts.conversions import WINDOW_CELLS
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.routes import Axes
from shardwise.layouts.strategy import Strategy
from shardwise.programs.builder import Choice
from shardwise.programs.differentiate import differentiate
from shardwise.programs.invariants import check_program
from shardwise.programs.lifetimes import backward_collectives, dropped_values, repeated
from shardwise.programs.program import busiest_rank, localize
from shardwise.programs.rank_program import RankProgram as StepProgram
from shardwise.programs.rank_program import delivered_values
from shardwise.programs.spmd import Lifetimes, SpmdProgram, build_spmd
from shardwise.programs.spmd_steps import chunk_of
from shardwise.programs.vjp import VjpCache
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.rules.atoms import factor_graph
from shardwise.rules.rule import OpRule
from shardwise.rules.tables import rule_of, whole_rule
from shardwise.runtime.local_shards import shard

MESHES = (
    Mesh(a=2, b=2, c=2),
    Mesh(dp=2, tp=4),
    Mesh(a=2, b=3),
    Mesh(x=6),
    Mesh(a=3, b=2, c=2),
    Mesh(x=8),
    Mesh(x=5),
)
VJP_CACHE = VjpCache()
TOLERANCE = 1e-10  # float64, tens of operators on a few thousand elements


@dataclass
class Outcome:
    """What a run showed: the worst error relative to the larger of the tensor and 1e-6 of the largest gradient, where
    it is, whether the recorded collectives are those of the program, and what the program exercised."""

    error: float = 0.0
    where: str = ""
    collectives_match: bool = True
    comparisons: int = 0
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE and self.collectives_match

    def note(self, error: float, where: str) -> None:
        self.comparisons += 1
        if not error <= self.error:  # also for nan
            self.error, self.where = error, where


def random_strategy(
    rng: random.Random, rule: OpRule, op: Op, graph: Graph, mesh: Mesh, *, by_hand: bool = False
) -> Strategy:
    """Every sub-axis to some factor that leaves each device a share, or to I, R or P. ``by_hand``: factors that can be
    split unevenly are split anywhere."""
    floating = [graph.by_name[name].dtype.is_floating_point for name in op.operands]
    left = {factor.name: factor.size for factor in rule.factors}
    choices: dict[str, AxisChoice] = {}
    axes = list(mesh.sub_axes)
    rng.shuffle(axes)
    for axis in axes:
        size = mesh.sizes[axis]
        options = [f.name for f in rule.factors if f.kind != "whole" and left[f.name] >= size] * 3
        options += ["I", "R", *(f"P{g}" for g, group in enumerate(rule.linear) if all(floating[i] for i in group))]
        word = rng.choice(options)
        if word in left:
            left[word] //= size
        choices[axis] = Split(word) if word in left else parse_choice(word)
    strategy = Strategy.of(choices)
    return replace(strategy, cuts=_random_cuts(rng, rule, strategy, mesh)) if by_hand else strategy


def _random_cuts(
    rng: random.Random, rule: OpRule, strategy: Strategy, mesh: Mesh
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Lengths, some of them perhaps 0, for the factors that a strategy may split unevenly."""
    if rule.windows or any(rule.factor(name).kind == "lowered" for name, _ in strategy.factors):
        return ()
    found = []
    for name, axes in strategy.factors:
        factor = rule.factor(name)
        if factor.kind in ("sum", "parallel"):
            inner = sorted(rng.randint(0, factor.size) for _ in range(mesh.size_of(axes) - 1))
            found.append((name, tuple(stop - start for start, stop in pairwise((0, *inner, factor.size)))))
    return tuple(found)


def random_spmd(
    program: Program,
    rng: random.Random,
    mesh: Mesh,
    *,
    by_hand: bool = False,
    priced: bool = False,
    row_chunks: int = 1,
) -> tuple[SpmdProgram, dict[str, Layout]]:
    """The program under random strategies and random storage. ``priced``: between layouts it takes the routes that are
    fastest on a described cluster, instead of those that send the fewest bytes."""
    graph = program.graph
    rules = {op.name: rule_of(op, graph) or whole_rule(op, graph) for op in graph.ops}
    factored = factor_graph(graph, rules)
    strategies = {
        op.name: random_strategy(rng, factored.rules[op.name], op, graph, mesh, by_hand=by_hand) for op in graph.ops
    }
    storage = {}
    for source in graph.sources:
        value = graph.by_name[source.value]
        storage[source.value] = random_layout(
            rng, mesh, factored.atoms[source.value], "IRP" if value.requires_grad else "I"
        )
    router = None
    if priced:
        separate = frozenset(name for name, _ in mesh.axes if rng.random() < 0.5)
        prices = Prices(Links(Cluster.local(mesh.num_devices), mesh))
        router = Router(Axes.of(mesh, separate), prices, factored.atoms)
    choice = Choice(strategies, storage, route=router, row_chunks=row_chunks)
    return build_spmd(graph, factored.rules, choice, mesh), storage


def random_lifetimes(spmd: SpmdProgram, rng: random.Random, kept: float) -> Lifetimes:
    operators = frozenset(op.name for op in spmd.graph.ops if rng.random() >= kept)
    return Lifetimes(operators, frozenset(c.result for c in spmd.conversions if rng.random() >= kept))


def run(
    program: Program,
    seed: int,
    mesh: Mesh | None = None,
    *,
    by_hand: bool = False,
    priced: bool = False,
    kept: float = 1.0,
    row_chunks: int = 1,
) -> Outcome:
    """Run a program under the random choices of ``seed`` (``random_spmd``). ``kept``: the share of operators and
    conversions whose results are kept for backward; the others are made again. ``row_chunks``: chunks of rows."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    mesh = mesh or rng.choice(MESHES)
    spmd, storage = random_spmd(program, rng, mesh, by_hand=by_hand, priced=priced, row_chunks=row_chunks)
    spmd = replace(spmd, lifetimes=random_lifetimes(spmd, rng, kept))
    outcome = Outcome()
    _count_features(spmd, outcome)
    outcome.features["messages of chunks"] += sum(bool(chunk_of(c.origin)) for c in spmd.conversions)
    cluster = VirtualCluster(mesh)
    held: dict[str, list[Tensor]] = {}
    for name, tensor in program.sources.items():
        if tensor.requires_grad:
            held[name] = [t.requires_grad_() for t in scatter(tensor, storage[name], generator)]
        else:
            held[name] = [shard(tensor, storage[name], c).clone() for c in cluster.coordinates]
    reached = [name == spmd.loss for name in delivered_values(spmd, loss_only=False)]
    programs = [
        differentiate(localize(spmd, rank), VJP_CACHE, loss_only=False, reached=reached)
        for rank in range(mesh.num_devices)
    ]
    bindings = [{name: tensors[rank].detach() for name, tensors in held.items()} for rank in range(mesh.num_devices)]
    if spmd.lifetimes:
        for own in programs:
            check_program(own)
            dropped = dropped_values(own)
            if own.rank == busiest_rank(spmd):  # others keep what its messages do not bring in time
                assert not dropped.intersection(own.saved), "what is dropped is not kept"
            outcome.features["dropped"] += len(dropped)
            outcome.features["made again"] += sum(map(len, repeated(own)))
    environments = run_forward(cluster, programs, bindings)
    outcome.collectives_match &= tuple(cluster.record) == spmd.forward_collectives()
    for position, (output, want) in enumerate(zip(spmd.outputs, program.results, strict=True)):
        assert isinstance(output, Ref)
        for rank, environment in enumerate(environments):
            outcome.note(
                _difference(environment[programs[rank].resolve(output.name)], want), f"output {position} on rank {rank}"
            )
    if spmd.loss is not None:
        _check_gradients(program, spmd, storage, programs, environments, cluster, outcome)
    return outcome


def _check_gradients(
    program: Program,
    spmd: SpmdProgram,
    storage: dict[str, Layout],
    programs: list[StepProgram],
    environments: list[dict[str, Tensor]],
    cluster: VirtualCluster,
    outcome: Outcome,
) -> None:
    leaves = {name: tensor for name, tensor in program.sources.items() if tensor.requires_grad}
    loss = program.results[0]
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
    wanted = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)}
    cluster.record.clear()
    one = [torch.ones_like(env[own.resolve(spmd.loss or "")]) for own, env in zip(programs, environments, strict=True)]
    seeds = [{own.cotangents[0]: ones} if own.cotangents[0] else {} for own, ones in zip(programs, one, strict=True)]
    gradients = run_backward(cluster, programs, environments, seeds)
    outcome.collectives_match &= tuple(cluster.record) == backward_collectives(programs[0])
    largest = max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)
    for name, want in wanted.items():
        shapes = [storage[name].local_shape(coordinates) for coordinates in cluster.coordinates]
        have = [
            own.get(name, torch.zeros(shape, dtype=want.dtype)) for own, shape in zip(gradients, shapes, strict=True)
        ]
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-6 * largest)
        difference = worst_difference(have, storage[name].dual, want)
        outcome.note(difference / scale if scale else difference, f"gradient of {name}")


def _difference(have: Tensor, want: Tensor) -> float:
    if have.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    have, want = have.detach(), want.detach()
    same = (have == want) | (torch.isnan(have) & torch.isnan(want))
    # A partial sum that is cast to a lower precision is rounded per summand: errors count in that type's resolution.
    resolution = torch.finfo(want.dtype).eps / 2**-52 if want.dtype.is_floating_point else 1.0
    worst = float(torch.where(same, 0.0, (have.to(torch.complex128) - want.to(torch.complex128)).abs()).max())
    finite = want.abs()[torch.isfinite(want)] if want.dtype != torch.bool else want.double()
    scale = float(finite.max()) if finite.numel() else 0.0
    return worst / max(scale, 1e-6) / resolution


def _count_features(spmd: SpmdProgram, outcome: Outcome) -> None:
    for conversion in spmd.conversions:
        for move in conversion.moves:
            outcome.cells[move.cell] += 1
            outcome.features["halos"] += move.cut is not None and move.entry is WINDOW_CELLS["halo"]
            outcome.features["closings"] += move.reverse is not None
        outcome.features["conversions"] += 1
        shortest = redistribute(conversion.source, conversion.target, differentiable=conversion.differentiable)
        outcome.features["other routes"] += conversion.moves != shortest
    for layout in spmd.layouts.values():
        sharded = [atom for dim in layout.dims for atom in dim if atom.axes]
        outcome.features["nested"] += any(len(atom.axes) > 1 for atom in sharded)
        outcome.features["factored"] += any(
            len(dim) > 1 and any(a.axes for a in dim[1:]) for dim in layout.canonical().dims
        )
        outcome.features["uneven"] += not layout.without_windows.is_even
        outcome.features["windows"] += bool(layout.windows)
    outcome.features["lowered"] += sum("." in op.name for op in spmd.graph.ops)


__all__ = ["MESHES", "TOLERANCE", "Outcome", "random_spmd", "random_strategy", "run"]
