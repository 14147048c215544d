"""The zoo: real models go through capture, data parallelism, a tensor-parallel plan, the cheapest plan of a described
cluster, and random legal plans.

``make zoo``, or ``python -m models.zoo --plans 10 gpt2 swin`` in tests/. Every plan is verified on the virtual cluster
against one device, in float64: loss, outputs, every gradient, buffers, and parameters after a step of SGD (Adam would
divide the noise of gradients that are zero by mathematics by its size). What fails and is not listed in ``KNOWN``
makes the exit code 1.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import shardwise as sw
from layouts.placing import random_layout
from models.share import SplitShare, share_of_plan
from models.tiny_models import TinyModel
from models.zoo_own import OWN
from models.zoo_transformers import TRANSFORMERS
from programs.running import random_strategy
from shardwise.costs.units import Figures
from shardwise.graph.capture import Capture, capture
from shardwise.layouts.text import format_layout
from shardwise.plans.plan import Plan
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.tables import rule_of
from shardwise.search.user_choices import rules_of

ZOO = {**TRANSFORMERS, **OWN}
DATA = sw.Mesh(dp=8)
DATA_BY_TENSOR = sw.Mesh(dp=2, tp=4)
# Devices in several shapes, one of them not a power of two: no dim of most models divides by 3.
RANDOM_MESHES = (DATA_BY_TENSOR, sw.Mesh(a=2, b=2, c=2), sw.Mesh(a=2, b=3), sw.Mesh(x=4), sw.Mesh(x=5))

# Two nodes of four, without latencies and slow at computing beside their links: dividing the work of a tiny model pays.
_H100 = sw.Cluster.load("h100-2x4")
DESCRIBED = replace(
    _H100,
    device=replace(
        _H100.device,
        kernel_latency=0.0,
        matmul_half_flops=0.0,
        flops=Figures({dtype: flops * 1e-6 for dtype, flops in _H100.device.flops.items()}),
        memory_bandwidth=_H100.device.memory_bandwidth * 1e-4,
    ),
    levels=tuple(replace(level, latency=0.0, launch=0.0, bandwidth=level.bandwidth * 1e-3) for level in _H100.levels),
)

# Model -> why it fails today. A model that is listed and passes is reported too.
KNOWN: dict[str, str] = {}


@dataclass
class Outcome:
    """What became of a model. ``failures``: one line each; ``share``: of the tensor-parallel plan."""

    model: str
    num_operators: int = 0
    without_rule: Counter[str] = field(default_factory=Counter)
    share: SplitShare | None = None
    passed: int = 0
    plans: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def attempt(
    name: str, tiny: TinyModel, *, num_plans: int, seed: int = 0, batch: int = 8, debug: bool = False
) -> Outcome:
    """All plans of one model; what is raised on the way is a failure of that plan."""
    outcome = Outcome(name)
    start = time.perf_counter()
    try:
        torch.manual_seed(seed)
        model, inputs = tiny.build().train(), tiny.inputs(batch)
        captured = capture(model, (), inputs)
    except Exception as error:
        _note(outcome, "capture", error, debug)
    else:
        outcome.num_operators = len(captured.graph.ops)
        with captured_once(captured):
            for label, plan in _plans(tiny, model, inputs, captured, num_plans, seed, outcome, debug):
                try:
                    report = sw.verify(model, (), plan, kwargs=inputs, steps=1)
                except Exception as error:
                    _note(outcome, label, error, debug)
                    continue
                outcome.worst = max(outcome.worst, report.max_error)
                if report.ok and not report.untraceable:
                    outcome.passed += 1
                else:
                    outcome.failures.append(f"{label}: {' '.join(str(report).split())}")
    outcome.seconds = time.perf_counter() - start
    return outcome


def _plans(
    tiny: TinyModel,
    model: nn.Module,
    inputs: dict[str, Any],
    captured: Capture,
    num_plans: int,
    seed: int,
    outcome: Outcome,
    debug: bool,
) -> Iterator[tuple[str, Plan]]:
    """Label and plan: data parallel, tensor parallel, the cheapest, random ones."""
    outcome.plans = 3 + num_plans
    graph = captured.graph
    outcome.without_rule.update(str(op.target) for op in graph.ops if rule_of(op, graph) is None)
    factored = factor_graph(graph, rules_of(graph))
    try:
        yield (
            "data parallel",
            sw.plan(model, (), 8, kwargs=inputs, mesh=DATA, optimizer="sgd", search="sharding_propagation"),
        )
    except Exception as error:
        _note(outcome, "data parallel", error, debug)
    try:
        with mock.patch("shardwise.planning.execute.capture", capture):  # with strategies: another graph to annotate
            plan = sw.plan(
                model, (), 8, kwargs=inputs, mesh=DATA_BY_TENSOR, strategies=tiny.strategies, optimizer="sgd"
            )
        outcome.share = share_of_plan(plan, graph)
        yield "tensor parallel", plan
    except Exception as error:
        _note(outcome, "tensor parallel", error, debug)
    try:
        yield (
            "cheapest",
            sw.plan(model, (), DESCRIBED, kwargs=inputs, search="dynamic_programming", optimizer="sgd"),
        )
    except Exception as error:
        _note(outcome, "cheapest", error, debug)
    for number in range(num_plans):
        label = f"random plan {number}"
        try:
            yield (
                label,
                random_plan(model, inputs, captured, factored, random.Random(f"{seed} {outcome.model} {number}")),
            )
        except Exception as error:
            _note(outcome, label, error, debug)


def random_plan(
    model: nn.Module,
    inputs: dict[str, Any],
    captured: Capture,
    factored: Factored,
    rng: random.Random,
    *,
    args: tuple[Any, ...] = (),
    meshes: Sequence[sw.Mesh] = RANDOM_MESHES,
) -> Plan:
    """A plan with a random legal strategy for every operator and a random layout of every parameter, buffer and
    input."""
    mesh = rng.choice(meshes)
    graph = captured.graph
    plan = sw.plan(model, args, mesh.num_devices, kwargs=inputs, mesh=mesh, mode="stand_alone", optimizer="sgd")
    strategies = {
        op.name: random_strategy(rng, factored.rules[op.name], op, graph, mesh).format(mesh) for op in graph.ops
    }
    layouts = {}
    for source in graph.sources:
        value = graph.by_name[source.value]
        layouts[source.names[0]] = format_layout(
            random_layout(rng, mesh, factored.atoms[source.value], "I"), value.dtype
        )

    def laid_out(entries: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(replace(entry, layout=layouts[entry.name]) for entry in entries)

    edited = plan.revised(
        inputs=laid_out(plan.inputs),
        parameters=laid_out(plan.parameters),
        buffers=laid_out(plan.buffers),
        operators=tuple(replace(entry, strategy=strategies[entry.name]) for entry in plan.operators),
        conversions=None,
    )
    return replace(edited, mode="auto")


@contextmanager
def captured_once(captured: Capture) -> Iterator[None]:
    """``sw.plan`` and ``sw.verify`` would capture the same module for every plan: half of the zoo's time."""
    with ExitStack() as stack:
        for place in ("shardwise.planning.execute.capture", "shardwise.proof.verify.capture"):
            stack.enter_context(mock.patch(place, return_value=captured))
        yield


def _note(outcome: Outcome, label: str, error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    first, *rest = str(error).splitlines() or [""]
    where = " ".join(line.strip() for line in rest if line.strip().startswith("op:"))
    outcome.failures.append(f"{label}: {type(error).__name__}: {first} {where}".strip())


def zoo_table(outcomes: Sequence[Outcome], title: str, expected: Mapping[str, str]) -> Table:
    table = Table(show_lines=True, title=title)
    for header in ("model", "ops", "without rule", "FLOPs", "param. bytes", "passed", "worst error", "s", "notes"):
        table.add_column(header, justify="left" if header in ("model", "without rule", "notes") else "right")
    for outcome in outcomes:
        share, failures = outcome.share, outcome.failures
        more = [f"... {len(failures) - 2} more"] if len(failures) > 2 else []
        known = [f"known: {expected[outcome.model]}"] if outcome.model in expected else []
        table.add_row(
            outcome.model,
            str(outcome.num_operators),
            "\n".join(f"{target} x {count}" for target, count in sorted(outcome.without_rule.items())) or "-",
            _percent(share and share.flops),
            _percent(share and share.parameters),
            f"{outcome.passed} / {outcome.plans}",
            f"{outcome.worst:.1e}",
            f"{outcome.seconds:.0f}",
            "\n".join([*failures[:2], *more, *known, *_reasons(share)]) or "-",
        )
    return table


def _reasons(share: SplitShare | None) -> Iterator[str]:
    """What costs a share of less than 95 % the most."""
    if share is not None:
        for part, items in ((share.flops, share.operators_unsplit), (share.parameters, share.parameters_unsplit)):
            if part is not None and part < 0.95:
                yield from (f"{item.name}: {item.of_total:.1%}, {item.reason}" for item in items[:2])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _in_process(name: str, **options: Any) -> Outcome:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        return attempt(name, ZOO[name], **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *ZOO], help="default: all")
    parser.add_argument("--plans", type=int, default=10, help="random plans per model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, each in a process of its own")
    parser.add_argument("--debug", action="store_true", help="print every traceback, and the operators left whole")
    options = parser.parse_args()
    run = partial(_in_process, num_plans=options.plans, seed=options.seed, debug=options.debug)
    outcomes = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for found in pool.map(run, options.models or ZOO):
            outcomes.append(found)
            print(f"{found.model}: {found.passed} of {found.plans} plans in {found.seconds:.0f} s", flush=True)
            if options.debug and found.share:
                for item in (*found.share.operators_unsplit[:8], *found.share.parameters_unsplit[:8]):
                    print(f"  {item.name}: {item.of_total:.1%} of all, loses {item.lost:.1%}: {item.reason}")
                print(*found.failures, sep="\n")
    Console(width=180).print(zoo_table(outcomes, "The zoo", KNOWN))
    unexpected = [o.model for o in outcomes if bool(o.failures) != (o.model in KNOWN)]
    if unexpected:
        print("failed, or known to fail and passed:", ", ".join(unexpected))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
