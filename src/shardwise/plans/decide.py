"""From a graph to the choice of a plan, and from a plan back to the choice for a graph."""

from __future__ import annotations

import warnings
from ast import literal_eval
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import format_cluster
from shardwise.costs.cluster_file import parse as parse_cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Precision, Prices
from shardwise.errors import LayoutError, PlanError, ShardwiseError, problem
from shardwise.graph.annotate import Annotation
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Axes
from shardwise.layouts.strategy import Strategy, check_strategy, is_rest, named_factors, parse_choices, parse_cuts
from shardwise.layouts.text import format_dtype, parse_dtype, parse_layout
from shardwise.plans.plan import Plan, PricingEntry
from shardwise.plans.printing import format_bytes
from shardwise.plans.ranking import REFERENCE_OPERATORS, Ranked, Simulate, fitted
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.rule import OpRule, base_name
from shardwise.rules.tables import rule_of, whole_rule
from shardwise.search.auto import Prediction, Search, assignment_of, cost_graph, searched, separate_axes
from shardwise.search.cost_graph import CostGraph, held_by
from shardwise.search.cuts import stored_as_cut, with_cuts
from shardwise.search.domains import PriceFragment
from shardwise.search.dynamic_programming import DoesNotFit
from shardwise.search.modes import Choice, Choices, choose, follows, spread_axes
from shardwise.search.propagate import Where, factor_places, where_of
from shardwise.search.routing import Router
from shardwise.search.wishes import SplitCounts, burdens, choices_for, splittable


class UnsplitWarning(UserWarning):
    """An operator has no rule: it runs unsplit on gathered operands, slower but right."""


def rules_of(graph: Graph, *, known: Container[str] = (), stacklevel: int = 4) -> dict[str, OpRule]:
    """The rule of every op; operators without one are kept whole, with one warning that names them all, once per kind.
    ``known``: ops that a plan has decided already; nothing is said about them. ``stacklevel``: of the user's call."""
    rules: dict[str, OpRule] = {}
    missing: dict[str, Op] = {}
    for op in graph.ops:
        rule = rule_of(op, graph)
        if rule is None:
            rule = whole_rule(op, graph)
            if op.name not in known:
                missing.setdefault(str(op.target), op)
        rules[op.name] = rule
    if missing:
        named = ", ".join(f"{target} ({op.name}, {op.source})" for target, op in missing.items())
        warnings.warn(
            f"no rule for {named}: they run unsplit on gathered operands (sw.rule gives an operator one)",
            UnsplitWarning,
            stacklevel=stacklevel,
        )
    return rules


def decide(graph: Graph, annotations: Iterable[Annotation], mesh: Mesh, mode: str) -> tuple[Factored, Choice]:
    """Complete what the user annotated, in the given mode."""
    rules, factored = _ruled(graph, annotations := tuple(annotations))
    fixed = _fixed(graph, rules, factored, annotations, mesh)
    choice = choose(graph, factored, mesh, mode, fixed)
    cuts = {
        op.name: parse_cuts(annotation.strategy)
        for annotation in annotations
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy)
        for op in _subjects(graph, factored, annotation)
    }
    return factored, stored_as_cut(with_cuts(choice, cuts, graph, factored.rules, mesh), graph, factored.rules, mesh)


def _ruled(graph: Graph, annotations: tuple[Annotation, ...]) -> tuple[dict[str, OpRule], Factored]:
    """The rules, in the variants that annotations name, and divided."""
    rules = rules_of(graph, stacklevel=5)
    factored = factor_graph(graph, rules)
    if not any(rule.variants for rule in rules.values()):
        return rules, factored
    plain = dict(rules)
    for annotation in annotations:
        if isinstance(annotation.strategy, str):
            for op in _subjects(graph, factored, annotation):
                rules[op.name] = _variant(rules[op.name], annotation.strategy)
    return rules, factored if rules == plain else factor_graph(graph, rules)


def _variant(rule: OpRule, strategy: str) -> OpRule:
    """The variant of a rule that has the factors of a strategy's text; the rule itself if none is named."""
    named = set(map(base_name, named_factors(strategy)))
    return next((variant for name, variant in rule.variants if name in named), rule)


@dataclass(frozen=True)
class Decided:
    """What a search by price decided."""

    mesh: Mesh
    factored: Factored
    choice: Choice
    pricing: PricingEntry
    prediction: Prediction
    search: Search


def decide_by_price(
    graph: Graph,
    annotations: Iterable[Annotation],
    cluster: Cluster,
    meshes: Iterable[Mesh],
    search: str,
    optimizer: str,
    precision: Precision,
    passes: int,
    memory_bytes: float | None,
    fragments: Callable[[Graph, Router], PriceFragment],
    simulate: Simulate | None = None,
) -> Decided:
    """The fastest choice over some meshes that keeps what the user annotated and fits into ``memory_bytes`` (None: what
    a device has). ``simulate``: settles what does not add up (``plans.ranking``). Raises PlanError when nothing
    fits."""
    rules, factored = _ruled(graph, annotations := tuple(annotations))
    _refuse_cuts(annotations, search)
    limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    searches: list[Search] = []
    least: tuple[float, CostGraph, list[int]] | None = None
    for mesh in meshes:
        fixed = _fixed(graph, rules, factored, annotations, mesh)
        axes = Axes.of(mesh, separate_axes(fixed, mesh))
        cost = cost_graph(
            graph, factored, fixed, axes, Prices(Links(cluster, mesh), optimizer, precision, passes), fragments
        )
        try:
            found = searched(cost, search, limit)
            searches.append(found)
            if simulate is not None and not fixed and len(graph.ops) <= REFERENCE_OPERATORS:
                found.reference = assignment_of(cost, choose(graph, factored, mesh, "data_parallel", {}))
        except DoesNotFit as error:
            if least is None or error.num_bytes < least[0]:
                least = error.num_bytes, cost, error.assignment
    chosen = _first_that_fits(searches, search, limit, simulate)
    if isinstance(chosen, PlanError):
        raise chosen
    if chosen is None:
        assert least is not None, "there is a mesh"
        raise _nothing_fits(limit, *least)
    best = chosen.search
    groups = best.cost.domains.axes.groups
    separate = tuple(
        name for name, _ in best.mesh.axes if len(best.mesh.expand(name)) > 1 and best.mesh.expand(name) not in groups
    )
    compute, parameter, reduce = (
        "" if own is None else format_dtype(own) for own in (precision.compute, precision.parameter, precision.reduce)
    )
    pricing = PricingEntry(format_cluster(cluster), compute, parameter, reduce, separate)
    return Decided(best.mesh, factored, best.choice(), pricing, chosen.prediction, best)


def _refuse_cuts(annotations: Iterable[Annotation], search: str) -> None:
    for annotation in annotations:
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy):
            raise LayoutError(
                problem(
                    f"search={search!r} prices even splits only, and {annotation.strategy!r} says how many indices "
                    "each device has",
                    op=annotation.scope,
                    source=annotation.source,
                    fix='plan with search="sharding_propagation", or leave out the braces',
                )
            )


def _first_that_fits(
    searches: list[Search], name: str, limit: float, simulate: Simulate | None
) -> Ranked | PlanError | None:
    """Of searches on several meshes the fastest whose peak fits; None where there are none."""
    failed: PlanError | None = None
    for search in sorted(searches, key=lambda own: own.outcome.seconds):
        try:
            found = fitted(search, name, limit, simulate)
        except DoesNotFit as error:
            failed = failed or _nothing_fits(limit, error.num_bytes, search.cost, error.assignment)
            continue
        if not found.excess:
            return found
        peak = found.prediction
        failed = failed or PlanError(
            problem(
                f"no plan fits: the peak of a step is {format_bytes(peak.peak_bytes)} a device ({peak.peak_at}), "
                f"{format_bytes(limit)} are allowed",
                facts=[("without temporaries", format_bytes(peak.num_bytes))],
                fix="use more devices or devices with more memory, or a smaller batch",
            )
        )
    return failed


def _nothing_fits(limit: float, num_bytes: float, cost: CostGraph, assignment: list[int]) -> PlanError:
    """What is needed at least, and the tensors that make most of it."""
    held = sorted(held_by(cost, assignment).items(), key=lambda item: -item[1])
    graph = cost.domains.graph
    largest = ", ".join(
        f"{kind} {_shown(graph, kind, name)} {format_bytes(int(size))}" for (kind, name), size in held[:5]
    )
    return PlanError(
        problem(
            f"no plan fits: the least memory that any plan needs is {format_bytes(int(num_bytes))} a device, "
            f"{format_bytes(int(limit))} are allowed",
            facts=[("largest", largest)],
            fix="use more devices or devices with more memory, a smaller batch, or an optimizer with fewer states",
        )
    )


def _shown(graph: Graph, kind: str, name: str) -> str:
    return name if kind == "operator" else value_name(name, graph)


def _fixed(
    graph: Graph, rules: Mapping[str, OpRule], factored: Factored, annotations: Iterable[Annotation], mesh: Mesh
) -> Choices:
    """The user's strategies and constraints, per operator."""
    annotations = tuple(annotations)
    weight = burdens(graph, factored.rules) if annotations else {}
    fixed: Choices = {}
    idle = {annotation.source: annotation for annotation in annotations}
    for annotation in annotations:
        for op in _subjects(graph, factored, annotation):
            idle.pop(annotation.source, None)
            rule = factored.rules[op.name]
            own = {f.name: weight[op.name, f.name] for f in rule.factors}
            fixed[op.name] = choices_for(op, rules[op.name], rule, annotation.strategy, mesh, graph, own)
    for annotation in idle.values():
        raise LayoutError(
            problem(
                f"the strategy {annotation.strategy!r} covers no operator: none runs in this call outside submodules",
                op=annotation.scope,
                source=annotation.source,
                fix="annotate the submodule or the call that computes, or remove the strategy",
            )
        )
    for value, text in graph.constraints:
        op = graph.producer[value]
        shape = graph.by_name[value].shape
        try:
            if text.startswith("(("):  # the split counts of an out_strategy
                own = {f.name: 0 for f in factored.rules[op.name].factors}
                counts = literal_eval(text)
                wish = _beside_producer(op, counts, rules[op.name], factored, fixed, mesh, graph) or counts
                fixed[op.name] = choices_for(op, rules[op.name], factored.rules[op.name], wish, mesh, graph, own)
                continue
            layout = parse_layout(text, mesh)
            if layout.shape != shape:
                raise LayoutError(f"{text} is not a layout of shape {list(shape)}: it has shape {list(layout.shape)}")
            fixed[op.name] = _alias_choices(factored.rules[op.name], layout, factored.atoms[value])
        except ShardwiseError as error:
            raise type(error)(
                problem(
                    f"the layout asked for does not fit: {error}",
                    op=op.name,
                    source=op.source,
                    fix=f"a layout of shape {list(shape)} over the axes of {mesh}",
                )
            ) from error
    return fixed


def _beside_producer(
    alias: Op, counts: SplitCounts, rule: OpRule, factored: Factored, fixed: Choices, mesh: Mesh, graph: Graph
) -> str:
    """The split counts of an ``out_strategy`` over the axes that its operator uses: first those that split the same dim
    of its result, then those it sums over (a reduce-scatter), then free ones. "" if the counts do not come out."""
    producer = graph.producer.get(alias.operands[0])
    while producer is not None and producer.name not in fixed:  # a bias, say
        producer = graph.producer.get(producer.operands[0]) if producer.operands else None
    (own,) = counts[:1] or ((),)
    if producer is None or len(own) != len(rule.results[0]) or len(producer.results) != 1:
        return ""
    chosen, made = fixed[producer.name], factored.rules[producer.name]
    in_result = {factor for dim in made.results[0] for factor in dim}
    summed = [axis for axis in mesh.sub_axes if axis in chosen and chosen[axis] not in in_result]
    summed.sort(key=lambda axis: is_rest(chosen[axis]))
    words = []
    for d, count in enumerate(own):
        inside = made.results[0][d] if d < len(made.results[0]) else ()
        candidates = [axis for axis in mesh.sub_axes if chosen.get(axis) in inside] + summed
        taken: list[str] = []
        for axis in candidates:
            if count % (mesh.size_of(taken) * mesh.sizes[axis]) == 0:
                taken.append(axis)
        if mesh.size_of(taken) != count or (taken and not rule.results[0][d]):
            return ""
        summed = [axis for axis in summed if axis not in taken]
        if taken:
            words.append(f"{rule.results[0][d][0]}@({','.join(taken)})")
    return " ".join(words)


def _alias_choices(rule: OpRule, layout: Layout, atoms: tuple[tuple[int, ...], ...]) -> dict[str, str]:
    """The choices of an identity operator whose result is in ``layout``."""
    (places,) = factor_places(rule)[1]
    at = {place: factor for factor, place in places.items()}
    choices: dict[str, str] = {}
    for axis, where in where_of(layout.canonical().refine(atoms)).items():
        if isinstance(where, tuple):
            choices[axis] = at[where]
        else:
            choices[axis] = "P0" if where == "P" else where
    return choices


def _subjects(graph: Graph, factored: Factored, annotation: Annotation) -> list[Op]:
    """The operator that an annotation speaks of: the one in its scope that does the work; several if they are the same
    operator on parameters of the same module. Of several that have the factors of a text, those that read parameters.

    Views, casts and the sum with a bias that normalisation split off are not counted.
    """
    inside = [op for op in graph.ops if op.scope == annotation.scope]
    if not inside:
        return []
    working = [op for op in inside if not follows(op, factored) and not _is_split_off(op, inside, graph)] or inside
    if isinstance(annotation.strategy, str) and len(working) > 1:
        names = named_factors(annotation.strategy)
        working = [op for op in working if names <= _factor_names(factored.rules[op.name])] or working
        working = [op for op in working if _owners(op, graph, factored)] or working
    if len({(op.target, _owners(op, graph, factored) or op.name) for op in working}) > 1:
        listed = ", ".join(op.name for op in working[:6]) + (", ..." if len(working) > 6 else "")
        raise LayoutError(
            problem(
                f"the strategy {annotation.strategy!r} covers {len(working)} operators: {listed}",
                op=annotation.scope,
                source=annotation.source,
                fix="annotate the operator it is meant for: a smaller submodule, or the call inside forward",
            )
        )
    return working


def _factor_names(rule: OpRule) -> set[str]:
    """The undivided factors, those of its variants included."""
    rules = (rule, *(variant for _, variant in rule.variants))
    return {base_name(factor.name) for own in rules for factor in own.factors}


def _owners(op: Op, graph: Graph, factored: Factored) -> tuple[str, ...]:
    """The modules whose parameters the operator reads, through views: the same in two calls of a module, and for all
    experts of a mixture."""
    owners = []
    for name in op.operands:
        while name in graph.producer and follows(graph.producer[name], factored) and graph.producer[name].operands:
            name = graph.producer[name].operands[0]
        source = graph.source_of.get(name)
        if source is not None and source.kind == "parameter":
            owners.append(source.names[0].rpartition(".")[0])
    return tuple(owners)


def _is_split_off(op: Op, inside: list[Op], graph: Graph) -> bool:
    """Whether the operator adds a parameter to the result of another operator of the same scope (a bias)."""
    names = {result for other in inside for result in other.results}
    sources = [name for name in op.operands if name in graph.source_of and graph.source_of[name].kind == "parameter"]
    return str(op.target) == "aten.add.Tensor" and len(sources) == 1 and any(name in names for name in op.operands)


def bind(plan: Plan, graph: Graph, *, training: bool | None = None, widened: bool = False) -> tuple[Factored, Choice]:
    """The choice that a plan makes for a graph of its model.

    For the inputs and the mode of the plan (``training``, if the caller knows it) the graph must have the plan's
    operators, and every strategy must fit. For inputs of other sizes, and for evaluation, the strategies of operators
    that still exist are kept where they still apply, and the rest follows them. ``widened``: the graph computes in
    float64, whatever the plan says. Raises PlanError listing what does not fit.
    """
    _check_sources(plan, graph, widened)
    same = same_inputs(plan, graph)
    if same and training == plan.training:
        _check_operators(plan, graph)
    rules = rules_of(graph, known=plan.strategies)
    rules = {name: _variant(rule, plan.strategies.get(name, "")) for name, rule in rules.items()}
    factored = factor_graph(graph, rules)
    exact = same and {op.name for op in graph.ops} == set(plan.strategies)
    fixed: Choices = {}
    faults: list[str] = []
    for op in graph.ops:
        if op.name not in plan.strategies:
            continue
        try:
            fixed[op.name] = _parse(plan.strategies[op.name], factored.rules[op.name], plan.mesh)
        except ShardwiseError as error:
            if exact:
                rule = factored.rules[op.name]
                text = f"strategy {plan.strategies[op.name]!r}: {error}"
                faults.append(problem(text, op=op.name, source=op.source, fix=splittable(rule)))
    if faults:
        raise PlanError("\n".join(["the plan does not fit its model:", *faults]))
    storage = {
        source.value: _storage(plan, source.names, factored.atoms[source.value], graph.by_name[source.value].shape)
        for source in graph.sources
        if source.kind != "constant"
    }
    choice = choose(graph, factored, plan.mesh, "auto", fixed, storage=storage)
    cuts = {name: parse_cuts(plan.strategies[name]) for name in fixed if parse_cuts(plan.strategies[name])}
    choice = _stored_as_planned(with_cuts(choice, cuts, graph, factored.rules, plan.mesh), plan, graph)
    return factored, replace(choice, shared=_shared(plan, graph), router=_router(plan, graph, factored))


def _stored_as_planned(choice: Choice, plan: Plan, graph: Graph) -> Choice:
    """The choice with the uneven splits in which the plan keeps parameters and buffers."""
    sources = dict(choice.sources)
    for source in graph.sources:
        planned = plan.layouts.get(source.names[0])
        if planned is None or not planned.windows:
            continue
        own = sources[source.value]
        if any(own.dims[cut.dim] != planned.dims[cut.dim] for cut in planned.windows):
            raise PlanError(
                problem(
                    f"{source.names[0]} is kept as {planned}, but the model divides it as {own}",
                    fix="split a dim by hand only where no view divides it",
                )
            )
        sources[source.value] = replace(own, windows=planned.windows)
    return replace(choice, sources=sources)


def _shared(plan: Plan, graph: Graph) -> dict[str, Layout]:
    """The shared layouts of a plan, of values that have the plan's shape."""
    wanted = {entry.name: parse_layout(entry.layout, plan.mesh) for entry in plan.shared}
    names = {value_name(value.name, graph): value for value in graph.values} if wanted else {}
    return {
        names[name].name: layout
        for name, layout in wanted.items()
        if name in names and names[name].shape == layout.shape
    }


def _router(plan: Plan, graph: Graph, factored: Factored) -> Router | None:
    """The moves that the plan was priced with."""
    entry = plan.pricing
    if entry is None:
        return None
    dtypes = [None if name == "" else parse_dtype(name) for name in (entry.compute, entry.parameter, entry.reduce)]
    links = Links(parse_cluster(entry.cluster, "the plan's cluster"), plan.mesh)
    prices = Prices(links, plan.optimizer, Precision(*dtypes))
    axes = Axes.of(plan.mesh, frozenset(entry.separate))
    parameters = frozenset(source.value for source in graph.sources if source.kind == "parameter")
    return Router(axes, prices, factored.atoms, parameters)


def value_name(value: str, graph: Graph) -> str:
    """A value as a reader knows it: the parameter or input, or the operator that computes it (which result, if
    several)."""
    producer = graph.producer.get(value)
    if producer is None:
        return graph.source_of[value].names[0]
    return producer.name if len(producer.results) == 1 else f"{producer.name}[{producer.results.index(value)}]"


def _parse(text: str, rule: OpRule, mesh: Mesh) -> dict[str, str]:
    """All axes of a strategy's text: those not named are invariant. Raises unless the rule allows it."""
    choices = parse_choices(text, mesh)
    check_strategy(rule, replace(Strategy.of(choices), cuts=tuple(parse_cuts(text).items())), mesh)
    for axis, choice in choices.items():
        if not is_rest(choice) and rule.factor(choice).size < 2:
            raise LayoutError(f"factor {choice} has size {rule.factor(choice).size}: nothing to split over {axis}")
    return {**choices, **{axis: "I" for axis in mesh.sub_axes if axis not in choices}}


def same_inputs(plan: Plan, graph: Graph) -> bool:
    """Whether the graph is for the inputs that the plan was made for."""
    have = tuple(
        (source.names[0], graph.by_name[source.value].shape) for source in graph.sources if source.kind == "input"
    )
    return have == tuple((entry.name, entry.shape) for entry in plan.inputs)


def _check_sources(plan: Plan, graph: Graph, widened: bool) -> None:
    """Parameters and buffers must be those of the plan; inputs must have its dtypes and ranks."""
    faults: list[str] = []
    for kind, entries in (("parameter", plan.parameters), ("buffer", plan.buffers)):
        have = {s.names[0]: graph.by_name[s.value] for s in graph.sources if s.kind == kind}
        want = {entry.name: entry for entry in entries}
        for name in want.keys() - have.keys() if kind == "parameter" else ():
            faults.append(f"{kind} {name} of the plan is missing in the model{_near(name, have.keys() - want.keys())}")
        for name in have.keys() - want.keys() if kind == "parameter" else ():
            faults.append(f"{kind} {name} of the model is not in the plan")
        for name in have.keys() & want.keys():
            own, planned = have[name], want[name]
            texts = [str(list(shape)) for shape in (own.shape, planned.shape)]
            if not widened:
                texts = [format_dtype(own.dtype) + texts[0], planned.dtype + texts[1]]
            if texts[0] != texts[1]:
                faults.append(f"{kind} {name} is {texts[0]} in the model and {texts[1]} in the plan")
    inputs = {s.names[0]: graph.by_name[s.value] for s in graph.sources if s.kind == "input"}
    _raise_faults(faults + input_faults(plan, {n: (v.dtype, v.shape) for n, v in inputs.items()}, widened))


def _check_operators(plan: Plan, graph: Graph) -> None:
    """The operators must be those of the plan."""
    have = {op.name: op for op in graph.ops}
    want = {entry.name: entry for entry in plan.operators}
    faults = [
        f"operator {name} ({want[name].source}) of the plan is missing in the model{near}"
        for name in want.keys() - have.keys()
        for near in (_near(name, have.keys() - want.keys()),)
    ]
    for name, op in have.items():
        if name not in want:
            faults.append(f"operator {name} ({op.source}) of the model is not in the plan")
        elif str(op.target) != want[name].target:
            faults.append(
                f"operator {name} ({op.source}) is {op.target} in the model and {want[name].target} in the plan"
            )
    _raise_faults(faults)


def _near(name: str, names: Iterable[str]) -> str:
    found = get_close_matches(name, list(names), 1)
    return f"; the model has {found[0]}" if found else ""


def _raise_faults(faults: list[str]) -> None:
    if faults:
        shown = sorted(faults)[:8]
        more = [f"  and {len(faults) - len(shown)} more"] if len(faults) > len(shown) else []
        fix = "  fix:    make a plan for this model and these inputs with sw.plan"
        raise PlanError(
            "\n".join(["the plan is for another model or other inputs:", *(f"  {f}" for f in shown), *more, fix])
        )


def input_faults(
    plan: Plan, inputs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], widened: bool = False
) -> list[str]:
    """What is wrong with the inputs (name -> dtype and shape) of a call under a plan. An input that the plan has and
    the call has not is no fault: evaluation goes without labels."""
    faults: list[str] = []
    for entry in plan.inputs:
        if entry.name not in inputs:
            continue
        dtype, shape = inputs[entry.name]
        if format_dtype(dtype) != entry.dtype and not (widened and dtype == torch.float64):
            faults.append(f"input {entry.name} has dtype {format_dtype(dtype)}; the plan was made for {entry.dtype}")
        elif len(shape) != len(entry.shape):
            faults.append(
                f"input {entry.name} has {len(shape)} dims {list(shape)}; the plan was made for {list(entry.shape)}"
            )
    return faults


def _storage(
    plan: Plan, names: tuple[str, ...], atoms: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> dict[str, Where]:
    """Where the plan keeps a source, over the graph's atoms; an input of another size is split over the same axes of
    the same dims."""
    layout = plan.layouts.get(names[0])
    if layout is None:
        return dict.fromkeys(plan.mesh.sub_axes, "I")
    if layout.shape == shape:
        try:
            return where_of(layout.canonical().refine(atoms))
        except LayoutError:
            return where_of(layout)
    where: dict[str, Where] = dict.fromkeys(plan.mesh.sub_axes, "I")
    for dim, own in enumerate(layout.dims):
        axes = [axis for atom in own for axis in atom.axes]
        if axes and shape[dim] > 1:
            spread = spread_axes(atoms, dim, axes, plan.mesh)
            where = spread | {axis: own for axis, own in where.items() if axis not in spread}
    return where
