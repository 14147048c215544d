"""Stages on the virtual cluster, by hand: every part of a cut graph on a placement of its own, boundary values and
their cotangents brought from one to the other as transfers say.

``StageRun`` runs a stage's forward list on what it received, and its backward list on the cotangents that came back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from layouts.blocks import deliver
from layouts.placing import random_layout, scatter, worst_difference
from layouts.transfers import transfer
from programs.running import VJP_CACHE, random_strategy
from shardwise.graph.cut import GraphCut
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Ref, Value
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.transfer import boundary_layout
from shardwise.programs.differentiate import differentiate
from shardwise.programs.invariants import check_program
from shardwise.programs.program import localize
from shardwise.programs.rank_program import delivered_values
from shardwise.programs.spmd import Choice, SpmdProgram, build_spmd
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.rule import OpRule
from shardwise.rules.tables import rule_of, whole_rule
from shardwise.runtime.local_shards import shard
from shardwise.search.modes import choose
from shardwise.search.user_strategies import choices_for, num_blockers

Everywhere = dict[int, Tensor]  # global rank -> what it holds


@dataclass(frozen=True)
class Stage:
    """A part of a graph, its placement, its program, and the layouts of its sources."""

    part: Graph
    place: Placement
    spmd: SpmdProgram
    storage: Mapping[str, Layout]


def rules_of_part(part: Graph) -> dict[str, OpRule]:
    return {op.name: rule_of(op, part) or whole_rule(op, part) for op in part.ops}


def build_stage(
    part: Graph,
    place: Placement,
    factored: Factored,
    strategies: Mapping[str, Strategy],
    sources: Mapping[str, Layout],
    sends: Sequence[str],
) -> Stage:
    """A stage that sends values as it has them, or completed where a boundary asks for it."""
    activations = {s.value for s in part.sources if s.kind == "activation"}
    storage = {name: boundary_layout(own) if name in activations else own for name, own in sources.items()}
    choice = Choice(strategies, storage)
    made = build_spmd(part, factored.rules, choice, place.mesh).layouts
    delivered = {name: boundary_layout(made[name]) for name in sends}
    spmd = build_spmd(part, factored.rules, replace(choice, delivered=delivered), place.mesh)
    return Stage(part, place, spmd, storage)


def chosen_stage(
    part: Graph, place: Placement, sends: Sequence[str], mode: str, strategies: Mapping[str, str]
) -> Stage:
    """What a mode makes of the strategies (end of a module's name -> text) of its matrix products."""
    rules = rules_of_part(part)
    factored = factor_graph(part, rules)
    weights = num_blockers(part, factored.rules)
    fixed = {}
    for op in part.ops:
        text = next((text for module, text in strategies.items() if op.module.endswith(module)), None)
        rule = factored.rules[op.name]
        if text is not None and any(factor.kind == "sum" for factor in rule.factors):
            weight = {factor.name: weights[op.name, factor.name] for factor in rule.factors}
            fixed[op.name] = choices_for(op, rules[op.name], rule, text, place.mesh, part, weight)
    assert bool(fixed) == bool(strategies)
    choice = choose(part, factored, place.mesh, mode, fixed)
    return build_stage(part, place, factored, choice.strategies, choice.sources, sends)


def random_stage(part: Graph, place: Placement, sends: Sequence[str], rng: random.Random) -> Stage:
    """Random strategies, random storage (replicated and partial parameters too), random layouts of what is received."""
    factored, mesh = factor_graph(part, rules_of_part(part)), place.mesh
    strategies = {op.name: random_strategy(rng, factored.rules[op.name], op, part, mesh) for op in part.ops}
    storage = {}
    for source in part.sources:
        states = "IRP" if part.by_name[source.value].requires_grad else "I"
        storage[source.value] = random_layout(rng, mesh, factored.atoms[source.value], states)
    return build_stage(part, place, factored, strategies, storage, sends)


@dataclass
class StageRun:
    """One forward and one backward of a stage on all of its ranks."""

    stage: Stage
    cluster: VirtualCluster = field(init=False)

    def __post_init__(self) -> None:
        self.cluster = VirtualCluster(self.stage.place.mesh)
        spmd = self.stage.spmd
        devices = range(self.stage.place.mesh.num_devices)
        reached = [n == spmd.loss or n in spmd.cotangents for n in delivered_values(spmd, loss_only=False)]
        self.programs = [
            differentiate(localize(spmd, device), VJP_CACHE, loss_only=False, reached=reached) for device in devices
        ]
        for program in self.programs:
            check_program(program)
        self.leaves: dict[str, list[Tensor]] = {}
        self.results: list[dict[str, Tensor]] = []

    def forward(self, data: Mapping[str, Tensor], received: Mapping[str, Everywhere], seed: int) -> None:
        """``data``: whole sources; ``received``: what the ranks hold of activations."""
        stage, generator = self.stage, torch.Generator().manual_seed(seed)
        for source in stage.part.sources:
            layout, needs = stage.storage[source.value], stage.part.by_name[source.value].requires_grad
            if source.kind == "activation":
                held = [received[source.value][rank].detach().clone() for rank in stage.place.ranks]
            elif needs:
                held = scatter(data[source.value], layout, generator)
            else:
                held = [shard(data[source.value], layout, c).clone() for c in self.cluster.coordinates]
            self.leaves[source.value] = [tensor.detach() for tensor in held]
        devices = range(stage.place.mesh.num_devices)
        bindings = [{name: held[device] for name, held in self.leaves.items()} for device in devices]
        self.results = run_forward(self.cluster, self.programs, bindings)
        assert tuple(self.cluster.record) == stage.spmd.forward_collectives()
        self.cluster.record.clear()

    def value(self, name: str) -> tuple[Layout, Everywhere]:
        """An output of the part: its layout, and what every rank holds of it."""
        position = [out.name for out in self.stage.part.outputs if isinstance(out, Ref)].index(name)
        out = self.stage.spmd.outputs[position]
        assert isinstance(out, Ref)
        held = [own[program.resolve(out.name)] for program, own in zip(self.programs, self.results, strict=True)]
        return self.stage.spmd.layouts[out.name], dict(zip(self.stage.place.ranks, held, strict=True))

    def backward(self, cotangents: Mapping[str, Everywhere]) -> dict[str, list[Tensor]]:
        """``cotangents``: of the part's ``cotangents``, per rank. Returns the cotangents of all sources, per device."""
        spmd = self.stage.spmd
        assert set(cotangents) == set(self.stage.part.cotangents or ())
        of_output = dict(zip(spmd.cotangents, self.stage.part.cotangents or (), strict=True))
        delivered = delivered_values(spmd, loss_only=False)
        seeds: list[dict[str, Tensor]] = []
        for rank, program, values in zip(self.stage.place.ranks, self.programs, self.results, strict=True):
            seeds.append({})
            for name, seed in zip(delivered, program.cotangents, strict=True):
                if seed is not None:
                    one = torch.ones_like(values[program.resolve(name)])
                    seeds[-1][seed] = cotangents[of_output[name]][rank] if name in of_output else one
        gradients = run_backward(self.cluster, self.programs, self.results, seeds)
        assert tuple(self.cluster.record) == spmd.backward_collectives()
        return {
            name: [own.get(name, torch.zeros_like(leaf)) for own, leaf in zip(gradients, held, strict=True)]
            for name, held in self.leaves.items()
            if self.stage.part.by_name[name].requires_grad
        }


def check_stages(
    cut: GraphCut, graph: Graph, data: Mapping[str, Tensor], places: Sequence[Placement], make: Callable[[int], Stage]
) -> float:
    """Run the parts on their placements, forward and backward, and compare with the whole graph on one device: outputs,
    what buffers become, and every gradient (of tied parameters the sum over stages). The worst relative error."""
    leaves = {
        s.value: data[s.value].detach().clone().requires_grad_(graph.by_name[s.value].requires_grad)
        for s in graph.sources
    }
    whole = interpret(graph, leaves)
    stages = [make(number) for number in range(len(places))]
    runs = [StageRun(stage) for stage in stages]
    for number, run in enumerate(runs):
        received = {name: _brought(runs[number - 1], run, name) for name in (cut.sends(number - 1) if number else ())}
        run.forward(data, received, seed=number)
    worst = 0.0
    for name, number in cut.output_parts:
        if any(out == Ref(name) for out in stages[number].part.outputs):
            layout, held = runs[number].value(name)
            error = worst_difference([held[rank] for rank in places[number].ranks], layout, whole[name].detach())
            worst = max(worst, _relative(error, whole[name]))
    for run in runs:
        for position, (buffer, name) in enumerate(run.stage.part.mutations):
            both = zip(run.programs, run.results, strict=True)
            written = [result[program.mutations[position][1]] for program, result in both]
            worst = max(worst, worst_difference(written, run.stage.storage[buffer], whole[name].detach()))
    gradients = _backward(runs)
    needed = [name for name, leaf in leaves.items() if leaf.requires_grad]
    assert graph.loss is not None
    expected = torch.autograd.grad(whole[graph.loss], [leaves[name] for name in needed], allow_unused=True)
    largest = max(float(g.abs().max()) for g in expected if g is not None and g.numel())
    for name, want in zip(needed, expected, strict=True):
        want = torch.zeros_like(leaves[name]) if want is None else want
        # A tied parameter is kept by every stage in a layout of its own: summands of the gradient are whole each.
        parts = [_whole(held, layout) for held, layout in gradients[name]]
        total = torch.stack([tensor for tensor, _ in parts]).sum(0)
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-6 * largest) or 1.0
        worst = max(worst, *(difference / scale for _, difference in parts))
        worst = max(worst, float((total - want).abs().max()) / scale if want.numel() else 0.0)
    return worst


def _brought(sender: StageRun, receiver: StageRun, name: str) -> Everywhere:
    layout, held = sender.value(name)
    target, place = receiver.stage.storage[name], receiver.stage.place
    blocks = transfer(receiver.stage.part.by_name[name], layout, sender.stage.place, target, place)
    return deliver(blocks, held, target, place)


def _backward(runs: Sequence[StageRun]) -> dict[str, list[tuple[list[Tensor], Layout]]]:
    """Source -> what every stage that holds it finds of its gradient, in the dual of its layout there."""
    found: dict[str, list[tuple[list[Tensor], Layout]]] = {}
    arrived: dict[str, Everywhere] = {}
    for number in reversed(range(len(runs))):
        stage = runs[number].stage
        gradients = runs[number].backward(arrived)
        arrived = {}
        for source in stage.part.sources:
            if source.value not in gradients:
                continue
            held, layout = gradients[source.value], stage.storage[source.value].dual
            if source.kind != "activation":
                found.setdefault(source.value, []).append((held, layout))
            elif source.value in (runs[number - 1].stage.part.cotangents or ()):
                sender = runs[number - 1]
                target, place = sender.value(source.value)[0].dual, sender.stage.place
                value = stage.part.by_name[source.value]
                blocks = transfer(value, layout, stage.place, target, place)
                arrived[source.value] = deliver(blocks, dict(zip(stage.place.ranks, held, strict=True)), target, place)
    return found


def _whole(held: list[Tensor], layout: Layout) -> tuple[Tensor, float]:
    """The whole tensor of what devices hold, and how far those that must hold the same are apart."""
    mesh, bare = layout.mesh, boundary_layout(layout)
    sums = [
        torch.stack([held[member].detach() for member in mesh.group(layout.partial_axes, device)]).sum(0)
        for device in range(mesh.num_devices)
    ]
    everywhere = Placement.whole(mesh)
    alone = Placement(Mesh(), (0,))
    target = Layout.whole(alone.mesh, layout.shape)
    blocks = transfer(Value("gradient", layout.shape, sums[0].dtype), bare, everywhere, target, alone)
    full = deliver(blocks, dict(enumerate(sums)), target, alone)[0]
    return full, worst_difference(sums, bare, full)


def _relative(error: float, want: Tensor) -> float:
    finite = want.detach().double().abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return error / scale if scale else error
