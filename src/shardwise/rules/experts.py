"""Mixtures of experts: tokens, the rows of a token and columns are parallel; experts and the contraction are sums.

Rows may also go to the devices that have their experts (``KeyedRows``). Products by expert take them there, and so does
what computes row by row between and around these products (``with_keyed_rows``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from shardwise.graph.custom_operators import RANDOM
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, is_random
from shardwise.rules.arguments import at_pieces
from shardwise.rules.binding import RuleTable, build, single
from shardwise.rules.keyed_rows import IMBALANCE, KeyedRows, copies_of, keyed
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, OpRule, Piece


def grouped_mm_rule(op: Op, graph: Graph) -> OpRule:
    """``s k, e k n, (s r) -> (s r) n``: a part of the experts computes their rows and gives 0 for the others."""
    (tokens, _), (rows,) = (graph.by_name[op.operands[i]].shape for i in (0, 2))
    of_rows = ("s", "r") if rows != tokens else ("s",)
    operands: list[Dims] = [single(["s", "k"]), single(["e", "k", "n"]), (of_rows,)]
    kinds: dict[str, FactorKind] = {"k": "sum", "e": "sum"}
    rule = build(op, graph, operands, [(of_rows, ("n",))], kinds=kinds, linear=((0,), (1,)), localize=at_pieces("e"))
    copies, num_experts = max(rows // max(tokens, 1), 1), graph.by_name[op.operands[1]].shape[0]
    follow = KeyedRows((f"K{copies}", "e", "K1"), ("K1",), op.operands[2], num_experts, arguments(op)["skips"], copies)
    return replace(rule, keyed=follow)


def with_keyed_rows(graph: Graph, rules: Mapping[str, OpRule], imbalance: float = IMBALANCE) -> dict[str, OpRule]:
    """Return the rules, with what each operator between products by expert does with keyed rows.

    Behind the last product rows return: what is computed with them there needs no other values at the experts.
    ``imbalance``: the rows that are planned for on the busiest owner of experts, over the mean.
    """
    marked = dict(rules)
    products = [op for op in graph.ops if op.target is grouped_mm._opoverload]
    by_keys: dict[str, KeyedRows] = {}  # keys -> the first product that reads them, which is the one that reads tokens
    for op in products:
        follow = marked[op.name].keyed
        assert follow is not None, "a product by expert"
        by_keys.setdefault(follow.keys, follow)
    follows = {keys: keys for keys in by_keys}  # value with one row per key -> the keys
    behind: dict[str, tuple[str, str]] = {}  # value computed from such rows together -> the keys and the operator
    for op in graph.ops if products else ():
        rule = marked[op.name]
        keys = {follows[name] for name in op.operands if name in follows}
        first = by_keys[keys.pop()] if len(keys) == 1 else None
        follow = first and (rule.keyed or _row_by_row(op, rule, graph, follows))
        mixed = [behind[name] for name in op.operands if name in behind]
        if first is not None and follow is None:
            mixed = [(first.keys, op.name)]
        behind.update(dict.fromkeys(op.results, mixed[0]) if mixed else {})
        if first is None or follow is None:
            marked[op.name] = replace(rule, keyed=None)
            continue
        follow = replace(
            follow,
            operands=tuple(keyed(copies_of(at), imbalance) if copies_of(at) else at for at in follow.operands),
            results=tuple(keyed(copies_of(at), imbalance) for at in follow.results),
            keys=first.keys,
            num_keys=first.num_keys,
            skips=first.skips,
            copies=first.copies,
            imbalance=imbalance,
            is_first=rule.keyed is first,
            behind=next((name for keys, name in mixed if keys == first.keys), ""),
        )
        marked[op.name] = replace(rule, keyed=follow)
        follows.update(dict.fromkeys(op.results, first.keys))
    needed: set[str] = set()
    for op in reversed(graph.ops):
        rule = marked[op.name]
        if op.target is grouped_mm._opoverload or needed.intersection(op.results):
            needed.update(op.operands if rule.keyed is not None else ())
        elif rule.keyed is not None:
            marked[op.name] = replace(rule, keyed=None)
    return marked


def _row_by_row(op: Op, rule: OpRule, graph: Graph, keyed: Container[str]) -> KeyedRows | None:
    """Return what an operator does with keyed rows if it computes every row of its operands and results by itself,
    however many there are; else None."""
    dims = [*rule.operands, *rule.results]
    rows = next(d[0] for name, d in zip(op.operands, rule.operands, strict=True) if name in keyed)
    if is_random(op.target) or op.target in RANDOM or rule.windows or not rows:
        return None
    if any(rule.factor(name).kind != "parallel" for name in rows) or not _is_free_of(op, rule, rows, graph):
        return None
    where = ["K1" if d and d[0] == rows else "R" for d in dims]
    inside = {name for d, at in zip(dims, where, strict=True) for dim in d[at == "K1" :] for name in dim}
    results = where[len(op.operands) :]
    if "R" in results or not inside.isdisjoint(rows):
        return None
    return KeyedRows(tuple(where[: len(op.operands)]), tuple(results))


def _is_free_of(op: Op, rule: OpRule, rows: tuple[str, ...], graph: Graph) -> bool:
    """Return whether the arguments of the operator are the same for any number of rows."""
    if rule.localize is None:
        return True

    def call(length: int) -> LocalOpCall:
        def shape(name: str, dims: Dims) -> tuple[int, ...]:
            whole = graph.by_name[name].shape
            return (length, *whole[1:]) if dims and dims[0] == rows else whole

        sizes = {factor.name: factor.size for factor in rule.factors}
        pieces: dict[str, tuple[Piece, ...]] = {
            name: (Piece(size, 0, length if (name,) == rows else size),) for name, size in sizes.items()
        }
        shapes = [
            tuple(map(shape, names, tensors))
            for names, tensors in ((op.operands, rule.operands), (op.results, rule.results))
        ]
        assert rule.localize is not None, "the rule has one"
        return rule.localize(op, LocalContext(shapes[0], shapes[1], pieces))

    return len(rows) == 1 and call(1) == call(2)


EXPERTS: RuleTable = {grouped_mm._opoverload: grouped_mm_rule}
