"""The printed form of a plan: operators with their strategies, conversions with their collectives; equal layers once.

    blocks.0-1.mlp.down/linear    b@dp k@tp       b m k, n k -> b m n  k:sum
      weight: f32[32, 128@tp] -> f32[32, 128@tp] replicated(dp)    none / all_reduce(dp, 4 KiB)

An operator's line has its name, its strategy and its rule. Beneath it are the conversions that are first needed there:
the value, its layouts, and the collectives of forward / backward. Names that differ only in their numbers share a line
if the rest is equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from shardwise.costs.cluster import Cluster
from shardwise.costs.optimizers import is_on_host, parse_optimizer, states_of
from shardwise.costs.prediction import Prediction
from shardwise.errors import PlanError, listed
from shardwise.graph.float8 import BY_ROWS, FLOAT8_LINEAR
from shardwise.graph.step_precision import Precision
from shardwise.layouts.text import DTYPE_NAMES, parse_dtype
from shardwise.plans.entries import NO_LIMIT, ConversionEntry, Stage, TensorEntry
from shardwise.plans.file import precision_body
from shardwise.plans.plan_data import PlanData
from shardwise.plans.price_scope import default_seconds, format_step_interval, priced_cluster
from shardwise.plans.quantities import (
    format_bytes,
    format_bytes_interval,
    format_interval_seconds,
    format_ranges,
    format_seconds,
    format_seconds_interval,
)
from shardwise.programs.spmd_steps import chunk_of
from shardwise.programs.state_groups import is_offloaded
from shardwise.untrusted_text import shorten_repr

_COMPILED = "the step is compiled, the default on CUDA (which kernels the compiler joins is assumed)"
_NUMBER = re.compile(r"(?<![^./\['\"])\d+(?![^./\]'\"])")  # a whole part of a path: blocks.0.mlp, args[1]
_WIDEST_NAME = 56
_OUTPUTS = 4  # named outputs
# Shares of a step from which waiting for the host, or for messages or copies, is worth a sentence.
ADVISED_HOST_SHARE, _ADVISED_SHARE = 0.1, 0.25


def format_plan(plan: PlanData) -> str:
    """Return the printed form."""
    meshes, figures = ", ".join(str(stage.mesh) for stage in plan.stages), format_figures(plan)
    lines = [
        f"plan for {meshes}, {plan.num_ranks} devices",
        *([f"  {figures}"] if figures else []),
        *(f"  {line}" for line in advice(plan)),
        f"  mode {plan.mode}, search {plan.search}, optimizer {plan.optimizer}; "
        f"model {plan.model}, plan {plan.digest[:12]}",
        f"  {len(plan.operators)} operators, {len(plan.conversions)} conversions; parameters {_parameter_bytes(plan)}",
        *([f"  a step is {plan.micro_batches} passes over {plan.micro_batch} samples"] * (plan.micro_batches > 1)),
        *([f"  {_chunks(plan)}"] * (plan.row_chunks != 1)),
        *_terms(plan),
        f"  communication per {'step' if plan.micro_batches == 1 else 'pass'} and device:",
        *(f"    {direction:9} {text}" for direction, text in format_communication(plan).items()),
        *(f"    {line}" for line in of_outputs(plan)),
    ]
    if any(collective.kind == "row_exchange" for collective in plan.collectives()):
        lines.append(f"    rows at experts: {plan.imbalance:g} times the mean planned for on the busiest device")
    if not plan.precision.is_models:
        lines.insert(2 + bool(figures) + len(advice(plan)), f"  precision {format_precision(plan.precision)}")
    lines += _not_kept(plan)
    if plan.predicted is not None:
        lines += _predicted(plan, plan.predicted)
    if plan.is_pipeline:
        lines += _pipeline(plan)
    for number, stage in enumerate(plan.stages):
        if len(plan.stages) > 1:
            lines.append(f"stage {number}: {stage.mesh} on ranks {format_ranges(stage.placement.ranks)}")
        lines += _stage(stage)
    return "\n".join(lines)


def _chunks(plan: PlanData) -> str:
    if plan.row_chunks == "fused":
        kinds = {one.kind for entry in plan.conversions for one in (*entry.forward, *entry.backward)}
        if kinds.isdisjoint(("all_gather", "reduce_scatter")):
            return "row_chunks=fused joins nothing: no message gathers or scatters rows between products"
        return "row_chunks=fused: gathers and scatters of rows run within products, where GPUs have symmetric memory"
    if any(chunk_of(conversion.value) for conversion in plan.conversions):
        return f"rows in {plan.row_chunks} chunks: a chunk's messages travel beside others' products"
    return f"row_chunks={plan.row_chunks} divides nothing: no rows between products and messages can be divided so"


def _terms(plan: PlanData) -> list[str]:
    names = ", ".join(plan.terms)
    return [f"  per micro-batch, averaged as in gradient accumulation on one device: {names}"] if names else []


def _pipeline(plan: PlanData) -> list[str]:
    places = {stage.placement.ranks for stage in plan.stages}
    cost, cluster, takes = plan.pipeline, priced_cluster(plan), ""
    if cost is not None:
        eager = "an eager step" if cost.compiled_seconds else "a step"
        seconds = format_seconds_interval(cost.step_seconds, cluster)
        takes = f": {eager} takes {seconds}, in {cost.bubble:.1%} of it devices wait (bubble)"
        if cost.bound_seconds:
            takes += f"; no order of these stages takes less than {format_seconds(cost.bound_seconds)}"
    lines = [f"  pipeline of {len(plan.stages)} stages on {len(places)} places, {plan.schedule}{takes}"]
    rows = []
    for number, stage in enumerate(plan.stages):
        paths = [entry.name.partition("/")[0] for entry in stage.operators]
        within = [path for path in paths if path] or ["the module itself"]
        row = [f"  stage {number}", f"ranks {format_ranges(stage.placement.ranks)}", f"{within[0]} to {within[-1]}"]
        if cost is not None:
            stage_cost = cost.stages[number]
            sent = f", sends {format_bytes(int(stage_cost.sent_bytes))}" if stage_cost.sent_bytes else ""
            row.append(
                f"forward {format_seconds_interval(stage_cost.forward, cluster)}, "
                f"backward {format_seconds_interval(stage_cost.backward, cluster)}, "
                f"peak {format_bytes_interval(int(stage_cost.peak_bytes), cluster)}{sent}, bubble "
                f"{stage_cost.bubble:.1%}"
            )
        rows.append(tuple(row))
    return lines + _columns(rows)


def format_figures(plan: PlanData) -> str:
    """Return the main figures of a plan in one line: step, tokens (or samples) a second, memory of a device, gap; empty
    if nothing is predicted."""
    figures = plan_figures(plan)
    return ", ".join(f"{text} {name}" if name.endswith("/s") else f"{name} {text}" for name, text in figures)


def plan_figures(plan: PlanData) -> list[tuple[str, str]]:
    """Return (name, text) of these figures, in this order."""
    cost, pipeline = plan.predicted, plan.pipeline
    if pipeline is not None:
        size, passes, gap = pipeline.memory_bytes, plan.micro_batches, None
    elif cost is not None:
        size, passes, gap = cost.memory_bytes, cost.passes, cost.optimality_gap
    else:
        return []
    figures, seconds = [("step", format_step_interval(plan))], default_seconds(plan)
    ids = next((e for e in plan.inputs if len(e.shape) == 2 and e.dtype in ("i64", "i32")), None)
    count = prod(ids.shape) if ids is not None else plan.micro_batch
    if count and seconds:
        figures.append((f"{'tokens' if ids is not None else 'samples'}/s", f"{count * passes / seconds:,.0f}"))
    if size:
        limit = _limit(plan)
        room = f" of {limit}" if limit else ""
        figures.append(("memory", f"{format_bytes_interval(size, priced_cluster(plan))}{room} a device"))
    return [*figures, ("gap", "not known" if gap is None else f"{gap:.2%}")]


def advice(plan: PlanData) -> list[str]:
    """Return a sentence on a plan that splits nothing, on a step that is predicted compiled, and on each thing that a
    large part of a simulated step waits for, with what shortens it."""
    cost, cluster, pipeline = plan.predicted, priced_cluster(plan), plan.pipeline
    if pipeline is not None and pipeline.compiled_seconds:
        return [f"{_COMPILED}; eager it takes {format_seconds_interval(pipeline.step_seconds, cluster)}"]
    if cost is None or not cost.simulated_seconds:
        return []
    larger = "micro-batch" if plan.micro_batches > 1 else "batch"
    waits = (cost.host_wait, cost.message_wait, cost.copy_wait, cost.cast_seconds)
    host, messages, copies, casts = (cost.passes * wait / cost.default_seconds for wait in waits)
    lines = []
    if plan.splits_nothing:
        what = f"nothing is split: each of {plan.num_ranks} devices computes the whole step"
        lines.append(f"{what}: use a larger {larger}, or fewer devices")
    if cost.compiled_seconds and cluster is not None:
        eager = format_interval_seconds(cost.interval(cost.simulated_seconds, cluster))
        lines.append(f"{_COMPILED}; eager it takes {eager}")
    if host >= ADVISED_HOST_SHARE:
        graphs = f', or compile="graphs" ({format_seconds(cost.passes * cost.graph_seconds)})' * (
            cost.graph_seconds > 0
        )
        what = "of the step waits for the host to start kernels one by one"
        lines.append(f"{host:.0%} {what}: use a larger {larger}{graphs}")
        if casts >= ADVISED_HOST_SHARE:
            what = "of the step goes to casts of parameters and gradients, each a kernel to start"
            lines.append(f"{casts:.0%} {what}: a model this small may be faster without the lower precision")
    if messages >= _ADVISED_SHARE:
        lines.append(f"{messages:.0%} of the step waits for messages: use a larger {larger}, or fewer devices")
    if copies >= _ADVISED_SHARE:
        what = "of the step waits for copies from and to the host"
        lines.append(f"{copies:.0%} {what}: use a larger {larger}, or leave more on the device")
    return lines


def of_outputs(plan: PlanData) -> list[str]:
    """Return a sentence, or none, on the collectives that gather outputs which no step reads, with their sizes, the
    largest first. A value delivered as a buffer is stored (same shape, dtype and layout) counts as its new value."""
    sizes: Counter[str] = Counter()
    for stage in plan.stages:
        buffers = {entry.layout for entry in stage.buffers}
        for entry in stage.conversions or ():
            if not entry.op and entry.forward and not entry.target.endswith("[]") and entry.target not in buffers:
                sizes[entry.value] += max(collective.num_bytes for collective in entry.forward)
    if not sizes:
        return []
    ordered = sizes.most_common()
    largest = ", ".join(f"{value} {format_bytes(size)}" for value, size in ordered[:_OUTPUTS])
    more = f" and {len(ordered) - _OUTPUTS} more" if len(ordered) > _OUTPUTS else ""
    total = format_bytes(sizes.total())
    return [f"of forward, {total} deliver outputs to the caller ({largest}{more}); steps and their price exclude this"]


def _not_kept(plan: PlanData) -> list[str]:
    """Return the lines on recomputation, on what a step of several micro-batches does once, and on offloading."""
    operators = sum(entry.again for entry in plan.operators)
    parameters = {entry.name for entry in plan.parameters if entry.again}
    values = sum(entry.again and entry.value not in parameters for entry in plan.conversions)
    counts = [
        f"{count:,} of {len(of):,} {what}"
        for count, of, what in (
            (operators, plan.operators, "operators"),
            (values, plan.conversions, "conversions"),
            (len(parameters), plan.parameters, "parameters are gathered"),
        )
        if count
    ]
    lines = [f"  again in backward: {', '.join(counts)}"] if counts else []
    if once := sum(entry.once for entry in plan.parameters):
        many = f"{once:,} of {len(plan.parameters):,} parameters"
        lines.append(f"  once a step: casts and gathers of {many}, and the reductions of their gradients")
    if waiting := sum(entry.offloaded for entry in plan.operators):
        lines.append(f"  on the host until backward: results of {waiting:,} of {len(plan.operators):,} operators")
    return lines + _states_on_host(plan)


def _states_on_host(plan: PlanData) -> list[str]:
    """Return the line on optimizer states that wait on the host between steps, and on the time to fetch them. A plan
    does not record which parameters are trained, so this is the most."""
    if not is_on_host(plan.optimizer):
        return []
    sizes_of: dict[tuple[int, ...], list[int]] = {}  # ranks of a stage -> sizes on one device
    for stage in plan.stages:
        sizes_of.setdefault(stage.placement.ranks, []).extend(
            stage.layouts[entry.name].max_local_numel * parse_dtype(entry.dtype).itemsize for entry in stage.parameters
        )
    sizes = [size for place_sizes in sizes_of.values() for size in place_sizes]
    waiting = [size for size in sizes if is_offloaded(size)]
    most = max(sum(size for size in place_sizes if is_offloaded(size)) for place_sizes in sizes_of.values())
    total, cluster = states_of(plan.optimizer) * most, priced_cluster(plan)
    seconds = 0.0 if cluster is None else cluster.device.host_seconds(total)
    took = f", {format_seconds(seconds)} there and as long back" if seconds else ""
    name, _ = parse_optimizer(plan.optimizer)
    return [
        f"  on the host from step to step: states of {name} for {len(waiting):,} of {len(sizes):,} parameters, up to "
        f"{format_bytes(total)} a device{took}"
    ]


def _stage(stage: Stage) -> list[str]:
    lines = []
    for title, entries in (("inputs", stage.inputs), ("parameters", stage.parameters), ("buffers", stage.buffers)):
        if entries:
            lines += [f"{title}:", *_columns(merged_tensors(entries))]
    return [*lines, "operators:", *_operators(stage)]


def _limit(plan: PlanData) -> str:
    """Return the memory limit of a device; empty if there is none, or if it is not known."""
    listed_limit = "" if plan.pricing is None else plan.pricing.limit
    if listed_limit:
        return "" if listed_limit == NO_LIMIT else listed_limit
    cluster = priced_cluster(plan)
    return "" if cluster is None else format_bytes(cluster.device.usable_bytes)


def _reserved(plan: PlanData, cluster: Cluster | None) -> str:
    if cluster is None:
        return "" if plan.pricing is None else " of a cluster that cannot be read"
    reserve, whole = format_bytes(cluster.device.reserve_bytes), format_bytes(cluster.device.memory_bytes)
    return f" + reserve {reserve} of {whole}" if cluster.device.reserve_bytes else ""


def _predicted(plan: PlanData, cost: Prediction) -> list[str]:
    """Return the lines of the prediction: the additive price and its bound, then the simulation. Seconds and bytes that
    can be measured have intervals."""
    cluster = priced_cluster(plan)
    reserved = _reserved(plan, cluster)

    def step(seconds: float) -> str:
        return format_seconds(cost.passes * seconds)

    def measured(seconds: float) -> str:
        return step(seconds) if cluster is None else format_interval_seconds(cost.interval(seconds, cluster))

    passes = f" ({cost.passes} passes of {format_seconds(cost.pass_seconds)})" if cost.passes > 1 else ""
    lines = [
        f"  priced step {measured(cost.pass_seconds)}{passes}: compute {format_seconds(cost.compute)}, "
        f"exposed communication and update {format_seconds(cost.exposed)}, parameter traffic "
        f"{format_seconds(cost.traffic)} (overlaps with compute)",
        f"    parameters, gradients, optimizer states and saved values {format_bytes(cost.num_bytes)}",
    ]
    if cost.additive_price:
        gap = "" if cost.optimality_gap is None else f": optimality gap {cost.optimality_gap:.2%}"
        lines.append(f"    additive price {step(cost.additive_price)}, which the search minimised{gap}")
    if cost.optimality_gap is not None:
        proven = ", which the plan reaches: proven optimal" if not cost.optimality_gap else ""
        lines.append(f"    bound {step(cost.bound)}: no plan of 10^{cost.log10_plans:.0f} has a lower price{proven}")
    peak = f"peak memory {format_bytes_interval(cost.peak_bytes, cluster)}{reserved} in {cost.peak_at}"
    if cost.simulated_seconds:
        eager = "eager, " if cost.compiled_seconds else ""
        lines.append(f"    simulated step {measured(cost.simulated_seconds)}, {eager}with overlap and buckets; {peak}")
    elif cost.peak_bytes:  # too many operators to simulate
        lines.append(f"    {peak}")
    if tie := format_tie(cost):
        lines.append(f"    {tie}")
    if cost.passed_over is not None:
        other = cost.passed_over
        is_tied = cost.faster is not None and other.simulated_seconds <= cost.faster.plainer_seconds
        why = "memory limit" if not other.fits else "plainer plan" if is_tied else "simulation"
        peak = format_bytes_interval(other.peak_bytes, cluster)
        takes = f"takes {measured(other.simulated_seconds)} simulated, peak {peak}"
        lines.append(
            f"    given away for the {why} {cost.given_away:.2%}: the cheapest plan, of additive price "
            f"{step(other.additive_price)}, {takes}{'' if other.fits else ', which does not fit'}"
        )
    return lines


def format_tie(cost: Prediction) -> str:
    """Return the sentence on a faster plan that was left for this plainer one; empty if there is none."""
    faster = cost.faster
    if faster is None:
        return ""
    slower = max(faster.plainer_seconds / faster.simulated_seconds - 1, 0.0)
    kinds = f"{faster.kinds} kinds of splits" if faster.kinds != 1 else "one kind of split"
    what = f"{slower:.1%} slower than the fastest plan ({faster.mesh}, {kinds})"
    return f"{what}, within the interval: the plainer one is taken"


def merged_operators(
    stage: Stage, *, buckets: bool = True
) -> tuple[list[tuple[tuple[str, ...], list[str]]], list[str]]:
    """Return (name, strategy, rule, conversions...) of every operator, with equal ones of other layers merged, and all
    their names; and the conversions of delivered values. ``buckets``: merge only conversions of the same bucket."""
    names = {operator.name for operator in stage.operators}
    under: dict[str, list[ConversionEntry]] = {}
    for use in stage.conversions or ():
        under.setdefault(owner_of(use.op, names), []).append(use)
    blocks = []
    for operator in stage.operators:
        strategy, module = operator.strategy or "whole", operator.name.rpartition("/")[0]
        rule = f"{operator.rule}  ({operator.backward})" if operator.backward else operator.rule
        uses = under.get(operator.name, ())
        lines = [_conversion(use if buckets else replace(use, bucket=0), module) for use in uses]
        blocks.append((operator.name, "\n".join([strategy, rule, *lines])))
    merged = [((name, *text.split("\n")), names_of_row) for name, text, names_of_row in _merged(blocks)]
    return merged, [_conversion(conversion) for conversion in under.get("", ())]


def merged_tensors(entries: Iterable[TensorEntry]) -> list[tuple[str, str]]:
    """Return (name, layout) of tensors, with equal ones of other layers merged."""
    return [(name, layout) for name, layout, _ in _merged((entry.name, entry.layout) for entry in entries)]


def _operators(stage: Stage) -> list[str]:
    merged, delivered = merged_operators(stage)
    heads = _columns([row[:3] for row, _ in merged])
    lines = [line for head, (row, _) in zip(heads, merged, strict=True) for line in (head, *row[3:])]
    return lines + (["delivered:", *delivered] if delivered else [])


def format_entry(plan: PlanData, name: str) -> str:
    """Return what a plan does at an operator, or with a parameter, buffer or input: its strategy and rule, layouts and
    conversions. Raises PlanError for an unknown name."""
    for stage in plan.stages:
        names = {operator.name for operator in stage.operators}
        for entry in (*stage.parameters, *stage.buffers, *stage.inputs):
            if entry.name == name:
                uses = [c for c in stage.conversions or () if c.value == name]
                lines = [f"{_conversion(c)}  for {c.op}{_rounding(plan, stage, c)}" for c in uses]
                return "\n".join([f"{name}  {entry.layout}", *lines])
        for operator in stage.operators:
            if operator.name == name:
                conversions = [c for c in stage.conversions or () if owner_of(c.op, names) == name]
                note = "  (again in backward)" if operator.again else ""
                head = f"{name}  {operator.strategy or 'whole'}  {operator.rule}{note}"
                return "\n".join([head, f"      {operator.source}", *map(_conversion, conversions)])
    operator_names = [operator.name for operator in plan.operators]
    raise PlanError(
        f"the plan has no {shorten_repr(name)}",
        facts=[("it has", listed(operator_names))],
        fix="print(plan) shows all names",
    )


def _rounding(plan: PlanData, stage: Stage, entry: ConversionEntry) -> str:
    """Return why a weight of a product in float8 is gathered as it is (``programs.float8_gathers``)."""
    target = next((operator.target for operator in stage.operators if operator.name == entry.op), "")
    if target != str(FLOAT8_LINEAR) or not entry.forward or entry.source.startswith("f8["):
        return ""
    by_rows = plan.precision.products == BY_ROWS
    why = "backward rounds it by columns" if by_rows else "others read it as well, or its parts are summed"
    return f", rounded behind the message: {why}"


def owner_of(op: str, names: set[str]) -> str:
    """Return the operator of the plan that an operator inside a lowering belongs to: ``/cross_entropy_loss`` for
    ``/cross_entropy_loss.sum``."""
    while op and op not in names:
        op = op.rpartition(".")[0]
    return op


def _conversion(entry: ConversionEntry, module: str = "") -> str:
    """Return the line of a conversion. Values of the operator's own module are named without its path."""

    name = (
        entry.value[len(module) + 1 :]
        if module and entry.value.startswith((f"{module}.", f"{module}/"))
        else entry.value
    )
    bucket = f"  in bucket {entry.bucket}" if entry.bucket else ""
    return f"      {name}: {entry.source} -> {entry.target}    {entry.communication}{bucket}"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [
        max((len(row[i]) for row in rows if len(row[i]) <= _WIDEST_NAME), default=0) for i in range(len(rows[0]) - 1)
    ]
    return ["  " + "   ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def totals_of(plan: PlanData, *, backward: bool) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the number of collectives of each kind and axes in a pass, and their bytes."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in plan.collectives(backward=backward):
        count, size = totals.get((entry.kind, entry.axes), (0, 0))
        totals[entry.kind, entry.axes] = count + 1, size + entry.num_bytes
    return totals


def format_communication(plan: PlanData) -> dict[str, str]:
    """Return the collectives of each direction, summed by kind and axes."""
    texts = {}
    for direction in ("forward", "backward"):
        totals = totals_of(plan, backward=direction == "backward").items()
        sums = [f"{n} {kind}({axes.strip('()')}) {format_bytes(size)}" for (kind, axes), (n, size) in totals]
        texts[direction] = ", ".join(sums) or "none"
    return texts


def _parameter_bytes(plan: PlanData) -> str:
    """Return the bytes of all parameters, and of those on the fullest device (of the fullest stage)."""
    itemsize = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}

    def num_bytes(entry: TensorEntry, numel: int) -> int:
        return numel * itemsize.get(entry.dtype, 4)

    whole = sum(num_bytes(entry, prod(entry.shape)) for entry in plan.parameters)
    on_device = max(
        sum(num_bytes(entry, stage.layouts[entry.name].max_local_numel) for entry in stage.parameters)
        for stage in plan.stages
    )
    return f"{format_bytes(whole)}, of which a device holds {format_bytes(on_device)}"


def _merged(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """Merge entries whose names and texts differ only in the numbers of names, in the order of the first: ``blocks.0``
    and ``blocks.1`` -> ``blocks.0-1``, with the merged names. Names in a text stand before ": " on a line."""
    groups: dict[str, list[list[str]]] = {}
    for name, text in entries:
        lines = [name, *text.split("\n")]
        key = "\n".join(_NUMBER.sub("*", head) + mark + rest for head, mark, rest in _named(lines))
        groups.setdefault(key, []).append(lines)
    merged = []
    for members in groups.values():
        rows = [_named(lines) for lines in members]
        heads = [[head for head, _, _ in column] for column in zip(*rows, strict=True)]
        numbers = [tuple(map(int, _NUMBER.findall(name))) for name in heads[0]]
        spans = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if sorted(numbers) == list(product(*spans)):
            lines = [_ranged(names) + mark + rest for names, (_, mark, rest) in zip(heads, rows[0], strict=True)]
            merged.append((lines[0], "\n".join(lines[1:]), heads[0]))
        else:
            merged += [(lines[0], "\n".join(lines[1:]), [lines[0]]) for lines in members]
    return merged


def _named(lines: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (name, mark, rest) of every line. The first line is a name; a later line without ": " has none."""
    divided = [(lines[0], "", "")]
    for line in lines[1:]:
        name, mark, rest = line.partition(": ")
        divided.append((name, mark, rest) if mark else ("", "", line))
    return divided


def _ranged(names: Sequence[str]) -> str:
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = iter([format_ranges(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def format_precision(precision: Precision) -> str:
    """Format a precision: ``compute bf16, parameter f32``, or ``the model's`` if it names no dtype."""
    named = precision_body(precision).get("precision", {})
    return ", ".join(f"{name} {dtype}" for name, dtype in named.items() if dtype) or "the model's"
