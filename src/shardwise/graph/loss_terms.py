"""Terms of the loss that a step takes per micro-batch: found by name, and cut out of a graph.

The load-balancing loss of a mixture of experts is a product of two means over tokens. Over the whole batch it is no sum
over micro-batches. Megatron, torchtitan and gradient accumulation on one device compute it for every micro-batch alone
and average. ``per_micro_batch`` names the terms for which a plan does the same (``programs.micro_batches``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardwise.errors import ShardwiseError, listed
from shardwise.graph.ir import Graph, Op, Ref, Source, needed_for
from shardwise.graph.trees import bytes_of

LOSS = "loss"  # names the loss of a module that returns nothing else


def with_terms(
    graph: Graph, patterns: Sequence[str], outputs: Sequence[str], constants: Mapping[str, torch.Tensor]
) -> Graph:
    """Return a graph with the terms that the user names.

    Args:
        graph: A graph as it was captured.
        patterns: Names of outputs, operators or modules, or shell-style patterns of such. A module stands for the
            scalars that it computes and operators outside of it read.
        outputs: The names of the outputs of the graph.
        constants: The data of its constants.

    Raises:
        ShardwiseError: A name matches nothing, or what it matches is no term of the loss.
    """
    if not patterns:
        return graph
    terms: dict[str, str] = {}
    for pattern in patterns:
        for value, name in _matched(graph, pattern, outputs):
            _check_term(graph, value, name)
            terms.setdefault(value, name)
    digests = {name: hashlib.sha256(bytes_of(data)).hexdigest() for name, data in constants.items()}
    sources = tuple(replace(source, digest=digests.get(source.value, "")) for source in graph.sources)
    marked = replace(graph, terms=tuple(terms.items()), sources=sources)
    rest, _ = cut_terms(marked)
    for value, name in terms.items():
        if value != graph.loss and not rest.consumers[value]:
            others = listed([other for other in terms.values() if other != name])
            raise ShardwiseError(f"per_micro_batch: {name} is a part of {others}", fix=f"leave {name} out")
    return marked


def _matched(graph: Graph, pattern: str, outputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Iterate over the values that a pattern names, with the full name of each. Raises ShardwiseError if there are
    none."""
    named = {name or LOSS: out for name, out in zip(outputs, graph.outputs, strict=True)}
    paths = dict.fromkeys(path for op in graph.ops for path in _paths(op.module))
    kinds: tuple[Mapping[str, Any], ...] = (named, graph.op_by_name, paths)
    for names in kinds:
        if matched := [name for name in names if name == pattern or fnmatchcase(name, pattern)]:
            break
    else:
        near = get_close_matches(pattern, [*named, *graph.op_by_name, *paths], n=3, cutoff=0.4)
        have = f"the outputs are {', '.join(named)}" + (f"; near: {', '.join(near)}" if near else "")
        fix = f"name an output, operator or module of the model: {have}"
        raise ShardwiseError(f"per_micro_batch: nothing is called {pattern!r}", fix=fix)
    for name in matched:
        if names is named:
            if not isinstance(named[name], Ref):
                raise ShardwiseError(
                    f"per_micro_batch: the output {name} is {named[name]!r}, no tensor",
                    fix="have the model compute it (Mixtral: output_router_logits=True), or leave it out",
                )
            yield named[name].name, name
        elif names is paths:
            yield from _scalars_of(graph, name)
        else:
            op = graph.op_by_name[name]
            if len(op.results) > 1:
                raise _no_term(f"{name} has {len(op.results)} results", op)
            yield op.results[0], name


def _paths(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def _scalars_of(graph: Graph, path: str) -> Iterator[tuple[str, str]]:
    """Iterate over the scalars that a module computes and operators outside of it read."""
    inside = [op for op in graph.ops if path in _paths(op.module)]
    names = {op.name for op in inside}
    found = 0
    for op in inside:
        for value in op.results:
            is_scalar = graph.by_name[value].shape == () and graph.by_name[value].dtype.is_floating_point
            is_read = value == graph.loss or any(reader.name not in names for reader in graph.consumers[value])
            if is_scalar and is_read:
                found += 1
                yield value, op.name
    if not found:
        raise ShardwiseError(
            f"per_micro_batch: the module {path} computes no scalar that operators outside of it read",
            op=path,
            fix="name a module that returns the term, or the operator that computes it",
        )


def _check_term(graph: Graph, value: str, name: str) -> None:
    """Raise ShardwiseError unless a value is computed, is floating, and reaches the loss."""
    op = graph.producer.get(value)
    if op is None:
        raise _no_term(f"{name} is {graph.source_of[value].names[0]}, which nothing computes", None)
    if not graph.by_name[value].dtype.is_floating_point:
        raise _no_term(f"{name} is of {graph.by_name[value].dtype}", op)
    if graph.loss is None or value not in needed_for([graph.loss], graph.ops)[1]:
        raise _no_term(f"the loss does not depend on {name}", op)


def _no_term(what: str, op: Op | None) -> ShardwiseError:
    return ShardwiseError(
        f"per_micro_batch: {what}",
        op="" if op is None else op.name,
        source="" if op is None else op.source,
        fix="name a term that is added to the loss",
    )


def cut_terms(graph: Graph) -> tuple[Graph, tuple[Op, ...]]:
    """Return the graph of the loss and mutations in which terms are received (activations), and the operators that only
    terms need, in order. Its other outputs are what these operators read."""
    assert graph.loss is not None, "it has terms"
    terms = dict(graph.terms)
    others = [op for op in graph.ops if terms.keys().isdisjoint(op.results)]
    ops, _ = needed_for([graph.loss, *(value for _, value in graph.mutations)], others)
    kept = {op.name for op in ops}
    inside = tuple(needed_for(terms, [op for op in graph.ops if op.name not in kept])[0])
    made = {name for op in inside for name in op.results}
    read = dict.fromkeys(name for op in inside for name in op.operands if name not in made)
    sources = (*graph.sources, *(Source(name, "activation", (name,)) for name in terms))
    exists = {source.value for source in sources} | {name for op in ops for name in op.results}
    rest = replace(
        graph,
        values=tuple(value for value in graph.values if value.name in exists),
        sources=sources,
        ops=tuple(ops),
        outputs=tuple(map(Ref, dict.fromkeys([graph.loss, *read]))),
        constraints=tuple((name, text) for name, text in graph.constraints if name in exists),
        terms=(),
    )
    return rest, inside


def term_graph(graph: Graph, boundary: Collection[str] = ()) -> Graph:
    """Return the graph of the terms alone. ``boundary``: values that are not computed in it."""
    ops, needed = needed_for(dict(graph.terms), [op for op in graph.ops if not set(boundary).intersection(op.results)])
    made = {name for op in ops for name in op.results}
    sources = [source for source in graph.sources if source.value in needed]
    given = [v.name for v in graph.values if v.name in needed and v.name not in made and v.name not in graph.source_of]
    sources += [Source(name, "activation", (name,)) for name in given]
    order = [*(source.value for source in sources), *(name for op in ops for name in op.results)]
    return replace(
        graph,
        values=tuple(graph.by_name[name] for name in order),
        sources=tuple(sources),
        ops=tuple(ops),
        outputs=tuple(Ref(name) for name, _ in graph.terms),
        loss=None,
        mutations=(),
        constraints=(),
        cotangents=None,
    )
