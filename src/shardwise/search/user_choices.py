"""The rules of operators, and the choices of the user: annotations of submodules, calls and values."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Container, Iterable, Mapping

from shardwise.errors import LayoutError, ShardwiseError, UnsplitWarning, problem, warn_user
from shardwise.graph.annotate import SUMMED, Annotation
from shardwise.graph.ir import Graph, Op
from shardwise.graph.written_out import DROPOUT
from shardwise.layouts.choice import BY_KEY, AxisChoice, Choices, ShardPositions, Split, splits_owners, where_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import named_factors
from shardwise.layouts.text import parse_layout
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.experts import with_keyed_rows
from shardwise.rules.keyed_rows import IMBALANCE
from shardwise.rules.rule import OpRule, base_name
from shardwise.rules.tables import rule_of, whole_rule
from shardwise.search.modes import follows_operand
from shardwise.search.user_strategies import SplitCounts, choices_for, num_blockers


def annotated_rules(
    graph: Graph, annotations: tuple[Annotation, ...], imbalance: float = IMBALANCE
) -> tuple[dict[str, OpRule], Factored]:
    """Return the rules, in the variants that annotations name, and divided. ``imbalance``: see ``rules_of``."""
    rules = rules_of(graph, imbalance=imbalance)
    factored = factor_graph(graph, rules)
    if not any(rule.variants for rule in rules.values()):
        return rules, factored
    plain = dict(rules)
    for annotation in annotations:
        if isinstance(annotation.strategy, str):
            for op in annotated_ops(graph, factored, annotation):
                rules[op.name] = variant(rules[op.name], annotation.strategy)
    return rules, factored if rules == plain else factor_graph(graph, rules)


def fixed_choices(
    graph: Graph, rules: Mapping[str, OpRule], factored: Factored, annotations: Iterable[Annotation], mesh: Mesh
) -> Choices:
    """Return the user's strategies and constraints, per operator."""
    annotations = tuple(annotations)
    weight = num_blockers(graph, factored.rules) if annotations else {}
    fixed: Choices = {}
    idle = {annotation.source: annotation for annotation in annotations}
    for annotation in annotations:
        for op in annotated_ops(graph, factored, annotation):
            idle.pop(annotation.source, None)
            rule = factored.rules[op.name]
            weights = {f.name: weight[op.name, f.name] for f in rule.factors}
            fixed[op.name] = choices_for(op, rules[op.name], rule, annotation.strategy, mesh, graph, weights)
            _check_owners(op, rule, fixed[op.name], mesh)
    for annotation in idle.values():
        raise no_operator_error(annotation)
    for value, text in graph.constraints:
        if text == SUMMED:
            continue
        op = graph.producer[value]
        shape = graph.by_name[value].shape
        try:
            if text.startswith("(("):  # the split counts of an out_strategy
                weights = {f.name: 0 for f in factored.rules[op.name].factors}
                counts = literal_eval(text)
                splits = _beside_producer(op, counts, rules[op.name], factored, fixed, mesh, graph) or counts
                fixed[op.name] = choices_for(op, rules[op.name], factored.rules[op.name], splits, mesh, graph, weights)
                continue
            layout = parse_layout(text, mesh)
            if layout.shape != shape:
                raise LayoutError(f"{text} is not a layout of shape {list(shape)}: it has shape {list(layout.shape)}")
            fixed[op.name] = alias_choices(factored.rules[op.name], layout, factored.atoms[value])
        except ShardwiseError as error:
            what = f"the layout asked for does not fit: {error}"
            fix = f"a layout of shape {list(shape)} over the axes of {mesh}"
            raise type(error)(problem(what, op=op.name, source=op.source, fix=fix)) from error
    return fixed


def no_operator_error(annotation: Annotation) -> LayoutError:
    """Return the error for a strategy of no operator."""
    what = f"the strategy {annotation.strategy!r} covers no operator: none runs in this call outside submodules"
    fix = (
        "annotate the submodule or the call that computes, or remove the strategy; experts in a loop become one "
        "product: annotate the module of the loop"
    )
    return LayoutError(what, op=annotation.scope, source=annotation.source, fix=fix)


def _beside_producer(
    alias: Op, counts: SplitCounts, rule: OpRule, factored: Factored, fixed: Choices, mesh: Mesh, graph: Graph
) -> str:
    """Return the split counts of an ``out_strategy`` over the axes that its operator uses: first those that split the
    same dim of its result, then those it sums over (a reduce-scatter), then free ones; along the others the result is
    whole. Return "" if the counts do not come out."""
    producer = graph.producer.get(alias.operands[0])
    while producer is not None and producer.name not in fixed:  # a bias, say
        producer = graph.producer.get(producer.operands[0]) if producer.operands else None
    (out_counts,) = counts[:1] or ((),)
    if producer is None or len(out_counts) != len(rule.results[0]) or len(producer.results) != 1:
        return ""
    chosen, producer_rule = fixed[producer.name], factored.rules[producer.name]
    in_result = {Split(factor) for dim in producer_rule.results[0] for factor in dim}
    summed = [axis for axis in mesh.sub_axes if axis in chosen and chosen[axis] not in in_result]
    summed.sort(key=lambda axis: not isinstance(chosen[axis], Split))
    words: list[str] = []
    used: list[str] = []
    for d, count in enumerate(out_counts):
        inside = set(map(Split, producer_rule.results[0][d])) if d < len(producer_rule.results[0]) else set()
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
            used += taken
    repeated = [axis for axis in mesh.sub_axes if axis not in used]
    return " ".join([*words, *([f"I@({','.join(repeated)})"] if repeated else [])])


def alias_choices(rule: OpRule, layout: Layout, atoms: tuple[tuple[int, ...], ...]) -> dict[str, AxisChoice]:
    """Return the choices of an identity operator whose result is in ``layout``. Raises LayoutError if none makes it."""
    places = ShardPositions.of(rule)
    choices: dict[str, AxisChoice] = {}
    for axis, where in where_of(layout.canonical().refine(atoms)).items():
        choice = places.choice_of_operand(0, where)
        if choice is None:
            raise LayoutError(f"{layout} is no layout of {rule} on {axis}")
        choices[axis] = choice
    return choices


def annotated_ops(graph: Graph, factored: Factored, annotation: Annotation) -> list[Op]:
    """Return the operator that an annotation applies to: the one in its scope that does the work; several if they are
    the same operator on parameters of the same module. Of several that have the factors of a text, return those that
    read parameters.

    Views, casts and the sum with a bias that normalisation split off are not counted.
    """
    inside = [op for op in graph.ops if op.scope == annotation.scope]
    if not inside:
        return []
    working = [
        op for op in inside if not follows_operand(op, factored) and not _is_split_off(op, inside, graph)
    ] or inside
    if isinstance(annotation.strategy, str) and len(working) > 1:
        names = named_factors(annotation.strategy)
        working = [op for op in working if names <= _factor_names(factored.rules[op.name])] or working
        working = [op for op in working if _owners(op, graph, factored)] or working
    keyed = {op.name: factored.rules[op.name].keyed for op in working}
    by_key = {name: at.keys for name, at in keyed.items() if at is not None and at.owned}  # products of one mixture
    if len({(op.target, by_key.get(op.name) or _owners(op, graph, factored) or op.name) for op in working}) > 1:
        listed = ", ".join(op.name for op in working[:6]) + (", ..." if len(working) > 6 else "")
        fix = "annotate the operator it is meant for: a smaller submodule, or the call inside forward"
        if "/scaled_dot_product_attention" in annotation.scope and any(op.target == DROPOUT for op in inside):
            fix = (
                "attention that drops probabilities is computed as these operators, and has no strategy of its own: "
                "pass dropout_p=0, or leave the call to the search"
            )
        what = f"the strategy {annotation.strategy!r} covers {len(working)} operators: {listed}"
        raise LayoutError(what, op=annotation.scope, source=annotation.source, fix=fix)
    return working


def _check_owners(op: Op, rule: OpRule, choices: Mapping[str, AxisChoice], mesh: Mesh) -> None:
    """Raise LayoutError if a device would have more rows than there are, by the imbalance that is planned for."""
    keyed = rule.keyed
    if keyed is not None:
        owning = tuple(axis for axis, choice in choices.items() if choice == BY_KEY or splits_owners(choice, rule))
        if 1 < (owners := mesh.size_of(owning)) < keyed.imbalance:
            what = f"imbalance is {keyed.imbalance:g}, and {owners} devices along {mesh.format_axes(owning)} own the "
            what += f"experts: the busiest has all rows at most, {owners} times the mean"
            raise LayoutError(what, op=op.name, source=op.source, fix=f"imbalance= from 1 to {owners}, or more owners")


def _factor_names(rule: OpRule) -> set[str]:
    rules = (rule, *(variant for _, variant in rule.variants))
    names = {base_name(factor.name) for member in rules for factor in member.factors}
    return names | {"K"} if rule.keyed is not None and rule.keyed.owned else names


def _owners(op: Op, graph: Graph, factored: Factored) -> tuple[str, ...]:
    """Return the modules whose parameters the operator reads, through views: the same in two calls of a module, and for
    all experts of a mixture."""
    owners = []
    for name in op.operands:
        while (
            name in graph.producer and follows_operand(graph.producer[name], factored) and graph.producer[name].operands
        ):
            name = graph.producer[name].operands[0]
        source = graph.source_of.get(name)
        if source is not None and source.kind == "parameter":
            owners.append(source.names[0].rpartition(".")[0])
    return tuple(owners)


def _is_split_off(op: Op, inside: list[Op], graph: Graph) -> bool:
    """Return whether the operator adds a parameter to the result of another operator of the same scope (a bias)."""
    names = {result for other in inside for result in other.results}
    sources = [name for name in op.operands if name in graph.source_of and graph.source_of[name].kind == "parameter"]
    return str(op.target) == "aten.add.Tensor" and len(sources) == 1 and any(name in names for name in op.operands)


def rules_of(graph: Graph, *, known: Container[str] = (), imbalance: float = IMBALANCE) -> dict[str, OpRule]:
    """Return the rule of every op; operators without one are kept whole, with one warning that names them all, once per
    kind. ``known``: ops that a plan has decided already; they cause no warning. ``imbalance``: the rows that are
    planned for on the busiest owner of experts, over the mean."""
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
        where = {target: ", ".join(filter(None, (op.name, op.source))) for target, op in missing.items()}
        named = ", ".join(f"{target} ({place})" for target, place in where.items())
        warn_user(
            f"no rule for {named}: they run unsplit on gathered operands (sw.rule gives an operator one)",
            UnsplitWarning,
        )
    return with_keyed_rows(graph, rules, imbalance)


def variant(rule: OpRule, strategy: str) -> OpRule:
    """Return the variant of a rule that has the factors of a strategy's text; the rule itself if none is named."""
    named = set(map(base_name, named_factors(strategy)))
    return next((variant for name, variant in rule.variants if name in named), rule)
