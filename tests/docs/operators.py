"""Generate docs/operators.md from the rule tables: the splits of every operator, and their collectives.

``make operators`` (``python -m docs.operators`` in tests/) writes it. A rule learns its dims from a call, so the page
takes the sample calls of the rules' tests. Every splittable factor of a sample is split over two devices, with the
operands stored as the split needs them. The page lists the collectives of the resulting program.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch._ops import OpOverload

from rules.harness import make_case
from rules.samples import SAMPLES
from shardwise.graph.composites import COMPOSITES
from shardwise.graph.ir import Graph, Op, Source
from shardwise.graph.normalize import NORMALIZATIONS
from shardwise.graph.simplify import SIMPLIFICATIONS
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.plans.quantities import format_bytes
from shardwise.programs.builder import Choice
from shardwise.programs.spmd import build_spmd
from shardwise.rules import RULES, tables
from shardwise.rules.atoms import factor_graph
from shardwise.rules.binding import RuleTable
from shardwise.rules.notation import format_dims
from shardwise.rules.rule import Dims, OpRule

PAGE = Path(__file__).parents[2] / "docs/operators.md"
NUM_DEVICES = 2
MOST_RULES = 3  # per operator; further ones mostly differ in the number of dims

# The publication of a way of splitting, by the file of the rule or the function of the lowering.
SOURCES = {
    "matmul": "Shoeybi et al., Megatron-LM (2019), section 3",
    "convolution": "Dryden et al., Improving strong-scaling of CNN training (2019): halo exchange",
    "pooling": "Dryden et al. (2019): halo exchange",
    "label_terms": "Shoeybi et al., Megatron-LM (2019), section 3: vocabulary-parallel cross entropy",
    "experts": "Lepikhin et al., GShard (2020)",
    "dropout": "Steele, Lea, Flood, Splittable pseudorandom number generators (2014): the mask is a hash",
    "softmax": "Milakov, Gimelshein, Online normalizer calculation for softmax (2018)",
    "log_softmax": "Milakov, Gimelshein (2018)",
    "attention": "Vaswani et al. (2017), section 3.2.1, with the softmax of Milakov, Gimelshein (2018)",
}


@dataclass(frozen=True, slots=True)
class SplitRow:
    """A factor that can be split. ``forward``, ``backward``: the collectives of the split on the sample."""

    factor: str
    how: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    def __str__(self) -> str:
        sent = [f"forward {', '.join(self.forward)}"] if self.forward else []
        sent += [f"backward {', '.join(self.backward)}"] if self.backward else []
        return f"`{self.factor}` {self.how}" + (f" ({'; '.join(sent)})" if sent else "")


@dataclass(frozen=True, slots=True)
class OperatorRow:
    operator: str
    shapes: str
    rule: str
    splits: tuple[SplitRow, ...]
    whole: tuple[str, ...]
    source: str


def entry_of(op: Op, graph: Graph) -> OperatorRow | None:
    """Return the table row of a sample call; None if the operator has no rule for it."""
    rule = tables.rule_of(op, graph)
    if rule is None:
        return None
    seen = {name for name, _ in rule.windows}
    opened = [factor for factor in rule.factors if factor.kind != "whole" and factor.size > 1]
    splits = tuple(_split(factor.name, factor.kind, rule, op, graph) for factor in opened)
    whole = tuple(f.name for f in rule.factors if f.kind == "whole" and f.name not in seen)
    shapes = ", ".join(str(list(graph.by_name[name].shape)) for name in op.operands)
    dims = ", ".join(map(format_dims, rule.operands)) + " -> " + ", ".join(map(format_dims, rule.results))
    return OperatorRow(str(op.target).removesuffix(".default"), shapes, dims.strip(), splits, whole, _source(op, rule))


def _split(name: str, kind: str, rule: OpRule, op: Op, graph: Graph) -> SplitRow:
    how = {"parallel": "parallel", "lowered": f"lowered to `{getattr(rule.lowering, '__name__', '')}`"}.get(kind, kind)
    if kind == "parallel" and any(window.factor == name for _, window in rule.windows):
        how = "parallel, operands through windows"
    if kind == "sum":
        how = "sum: the result is partial"
    forward, backward = _communicated(name, rule, op, graph)
    return SplitRow(name, how, forward, backward)


def _communicated(name: str, rule: OpRule, op: Op, graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the (forward, backward) collectives of a split over two devices; the result is not converted."""
    mesh = Mesh(x=NUM_DEVICES)
    rules = factor_graph(graph, {op.name: rule}).rules
    factored = rules[op.name]
    chosen = next((f.name for f in factored.factors if f.name.partition(".")[0] == name and f.size > 1), name)
    strategy = Strategy.parse(f"{chosen}@x", mesh)
    stored: dict[str, Layout] = {}
    for value, layout in zip(op.operands, apply_strategy(factored, strategy, mesh).operands, strict=True):
        kept = {axis: "I" for axis, state in layout.states}
        stored.setdefault(value, layout.without_windows.moved(kept))
    choice = Choice({op.name: strategy}, stored)
    spmd = build_spmd(replace(graph, outputs=()), rules, choice, mesh, bucket_bytes=0)
    sizes = dict(zip(op.operands, rule.operands, strict=True))
    flows = any(graph.by_name[name].requires_grad for name in op.results)
    forward: list[str] = []
    backward: list[str] = []
    for conversion in spmd.conversions:
        dims = sizes.get(conversion.value)
        forward += [_format_collective(c, dims) for c in conversion.collectives()]
        if conversion.differentiable and flows:
            backward += [_format_collective(c, dims) for c in conversion.collectives(backward=True)]
    return _counted(forward), _counted(backward)


def _format_collective(collective: Collective, dims: Dims | None) -> str:
    """Format a collective as ``all-reduce of `k n`, 80 B``; of an operand, with the factors of its dims."""
    kind = collective.kind.replace("_", "-")
    factors = " ".join(name for dim in dims for name in dim) if dims else ""
    of = f" of `{factors}`" if factors else ""
    return f"{kind}{of}, {format_bytes(collective.num_bytes)}"


def _counted(texts: list[str]) -> tuple[str, ...]:
    return tuple(f"{texts.count(t)} x {t}" if texts.count(t) > 1 else t for t in dict.fromkeys(texts))


def _source(op: Op, rule: OpRule) -> str:
    entry = RULES[op.target]
    entry = entry.func if isinstance(entry, partial) else entry
    lowering = getattr(rule.lowering, "__name__", "")
    file = home_of(op.target)[1].rpartition(".")[2]
    written = getattr(entry, "__name__", "") if inspect.isfunction(entry) else ""
    place = f"rules/{file}.py" + (f" `{written}`" if written and not written.startswith("<") else "")
    paper = SOURCES.get(lowering) or SOURCES.get(file, "")
    return f"{place}; {paper}" if paper else place


def sections() -> Mapping[str, RuleTable]:
    """Map every module of ``rules`` to its table, in the order in which ``rules/tables.py`` imports them."""
    named = {name: value for name, value in vars(tables).items() if name.isupper() and name not in ("RULES", "CUSTOM")}
    return {f"shardwise.rules.{name.lower()}": table for name, table in named.items()}


def home_of(target: OpOverload) -> tuple[str, str]:
    """Return (title, module) of the table that has an operator."""
    for module, table in sections().items():
        if target in table:
            return (import_module(module).__doc__ or "").partition("\n")[0], module
    raise KeyError(target)


def page(calls: Iterable[tuple[Op, Graph]]) -> str:
    """Return the text of docs/operators.md. ``calls``: sample calls, each the only operator of its graph."""
    entries: dict[OpOverload, list[OperatorRow]] = {}
    for op, graph in calls:
        entry = entry_of(op, graph)
        rows = entries.setdefault(op.target, [])
        if entry is not None and entry.rule not in [row.rule for row in rows] and len(rows) < MOST_RULES:
            rows.append(entry)
    lines = [*_HEAD, f"{len(RULES)} operators have rules.", ""]
    for module, table in sections().items():
        doc = (import_module(module).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        lines += [f"## {module.rpartition('.')[2].replace('_', ' ').capitalize()}", "", doc, "", *_TABLE_HEAD]
        for group in _group_equal([entries.get(target, []) for target in table]):
            lines.append(row_of(group))
        lines.append("")
    others = {target for table in (SIMPLIFICATIONS, NORMALIZATIONS, COMPOSITES) for target in table} - RULES.keys()
    return "\n".join([*lines, *_WRITTEN_OUT, ", ".join(sorted(map(_name_of, others)))]) + "\n"


def _name_of(target: OpOverload) -> str:
    return f"`{str(target).removesuffix('.default')}`"


_HEAD = (
    "# Operators",
    "",
    "Splits and collectives of every operator. Written by `make operators` from the rule tables and the sample",
    "calls of their tests: do not edit. [adding-a-rule.md](adding-a-rule.md) explains the notation.",
    "",
    "Every operator also runs unsplit, and operators that are not here do only that, but for those at the end, which",
    "are written as others. A factor splits in one of these ways:",
    "",
    "* *parallel*: each device computes its part. Operands that lack the factor are whole on every device, and each of",
    "  their gradients is summed: an all-reduce of that operand (none if it has no gradient).",
    "* *sum* (max, min, any): each device computes a summand of the result. Its consumer pays: an all-reduce of the",
    "  result, a reduce-scatter if it wants a part, nothing if it is linear and adds it to another partial value.",
    "* *lowered*: other operators stand in for the operator; their collectives are listed.",
    "* *through windows*: devices exchange the rows that their parts of the result need (a halo).",
    "",
    "The collectives are those of the sample call on two devices, operands stored as the split wants them, in float64;",
    "bytes are those of the whole message on the busiest device (`layouts/conversions.py`), and grow with the factors",
    "named. The last columns: what stays whole; the code and, where there is one, the publication.",
    "",
)
_WRITTEN_OUT = (
    "## Written as other operators",
    "",
    "These split as the operators that capture writes for them (`graph/simplify.py`, `graph/normalize.py`,",
    "`graph/composites.py`):",
    "",
)
_TABLE_HEAD = ("| operator | rule | sample | splits | whole | source |", "|---|---|---|---|---|---|")


def _group_equal(entries: list[list[OperatorRow]]) -> list[list[OperatorRow]]:
    """Group operators with equal rows; all point-wise ones fill one row, for example."""
    groups: dict[Any, list[OperatorRow]] = {}
    for of_operator in entries:
        for entry in of_operator:
            key = (entry.rule, entry.splits, entry.whole, entry.source, entry.shapes)
            groups.setdefault(key, []).append(entry)
    return list(groups.values())


def row_of(group: list[OperatorRow]) -> str:
    first = group[0]
    names = ", ".join(f"`{entry.operator}`" for entry in group)
    splits = "<br>".join(map(str, first.splits)) or "none"
    whole = ", ".join(f"`{name}`" for name in first.whole) or ""
    return f"| {names} | `{first.rule}` | {first.shapes} | {splits} | {whole} | {first.source} |"


def calls() -> list[tuple[Op, Graph]]:
    """The samples as graphs of one operator, with their operands as sources."""
    found = []
    for sample in SAMPLES:
        with warnings.catch_warnings(action="ignore"):
            case = make_case(sample)
        names = tuple(dict.fromkeys(case.op.operands))
        sources = tuple(Source(name, "input", (name,)) for name in names)
        found.append((case.op, Graph(case.graph.values, sources, case.graph.ops, ())))
    return found


if __name__ == "__main__":
    PAGE.write_text(page(calls()), encoding="utf-8")
    print(f"wrote {PAGE}")
