"""The rule of every operator of a graph, as plans use them."""

from __future__ import annotations

from collections.abc import Container

from shardwise.errors import UnsplitWarning, warn_user
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.strategy import named_factors
from shardwise.rules.experts import with_keyed_rows
from shardwise.rules.rule import OpRule, base_name
from shardwise.rules.tables import rule_of, whole_rule


def rules_of(graph: Graph, *, known: Container[str] = ()) -> dict[str, OpRule]:
    """Return the rule of every op; operators without one are kept whole, with one warning that names them all, once per
    kind. ``known``: ops that a plan has decided already; they cause no warning."""
    rules: dict[str, OpRule] = {}
    missing: dict[str, Op] = {}
    for op in graph.ops:
        rule = rule_of(op, graph)
        if rule is None:
            rule = whole_rule(op, graph)
            if op.name not in known:
                missing.setdefault(str(op.target), op)
        rules[op.name] = rule
    rules = with_keyed_rows(graph, rules)
    if missing:
        where = {target: ", ".join(filter(None, (op.name, op.source))) for target, op in missing.items()}
        named = ", ".join(f"{target} ({place})" for target, place in where.items())
        warn_user(
            f"no rule for {named}: they run unsplit on gathered operands (sw.rule gives an operator one)",
            UnsplitWarning,
        )
    return rules


def variant(rule: OpRule, strategy: str) -> OpRule:
    """Return the variant of a rule that has the factors of a strategy's text; the rule itself if none is named."""
    named = set(map(base_name, named_factors(strategy)))
    return next((variant for name, variant in rule.variants if name in named), rule)
