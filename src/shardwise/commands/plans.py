"""Subcommands that plan, explain, compare, verify and check.

Each imports its modules when it runs, so that ``shardwise run`` starts ranks without loading torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.command import Command, Suggestions, add_output, writing
from shardwise.commands.json_output import entry_data, explanation_data, ranking_data, show, totals
from shardwise.commands.models import add_model, load_named_object, model_of, names_plan
from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import families
from shardwise.costs.failures import FailureStatistics
from shardwise.costs.units import parse_quantity
from shardwise.errors import ShardwiseError
from shardwise.progress import show_progress
from shardwise.untrusted_text import whole_number

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan
    from shardwise.plans.result import PlanningResult

# Options whose values are those of the setting of the same name.
_PLAIN = (
    "mode",
    "search",
    "global_batch",
    "micro_batch",
    "per_micro_batch",
    "bucket_bytes",
    "row_chunks",
    "imbalance",
    "recompute",
    "offload",
    "schedule",
    "zero",
)
_PRICED = {"search": "dynamic_programming"}
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def row_chunks(text: str) -> int | str:
    return text if text == "fused" else int(text)


def add_settings(parser: argparse.ArgumentParser, *, cluster: bool = True) -> None:
    """Add the model, and one option per setting. ``cluster``: whether ``--cluster`` is required."""
    add_model(parser)
    add = parser.add_argument
    add(
        "--cluster",
        required=cluster,
        choices=Suggestions(families()),
        metavar="CLUSTER",
        help="a bundled name, a file, or a number of devices like those here, without a memory limit",
    )
    modes = ("auto", "semi_auto", "data_parallel", "stand_alone")
    add("--mode", choices=modes, metavar="MODE", help="auto, semi_auto, data_parallel or stand_alone (auto)")
    add("--search", metavar="SEARCH", help="dynamic_programming, recursive_programming or sharding_propagation")
    add("--mesh", metavar="AXES", help="such as dp=16,tp=8 (chosen by the search)")
    add("--max-mesh-axes", type=int, default=2, metavar="N", help="largest number of axes of the tried meshes (2)")
    add("--global-batch", type=int, metavar="N", help="samples of an optimizer step (those of the example inputs)")
    add("--micro-batch", type=int, metavar="N", help="samples of a micro-batch (chosen by the search)")
    add("--per-micro-batch", action="append", metavar="NAME", help="term of the loss averaged over micro-batches")
    add(
        "--precision",
        choices=Suggestions(_DTYPES),
        metavar="DTYPES",
        help="bf16 to compute in it, or compute=bf16,parameter=f32,reduce=f32 (the model's own)",
    )
    add("--memory", metavar="BYTES", help='memory limit of a device, such as "60 GiB" (all but its reserve)')
    add("--optimizer", default="adamw", help="whose states count as memory (adamw); 'adamw on host': in host memory")
    add("--strategy", action="append", metavar="NAME=TEXT", help="of submodules: 'blocks.*.up=n@tp'; repeatable")
    add("--layout", action="append", metavar="NAME=TEXT", help="of an input, parameter or buffer: 'x=[32@dp, 512]'")
    add("--bucket-bytes", type=int, metavar="N", help="size of gradient buckets (by price)")
    chunks = "chunks of rows, for messages beside products; fused: messages within products (by price)"
    add("--row-chunks", type=row_chunks, metavar="N", help=chunks)
    add("--imbalance", type=float, metavar="FACTOR", help="rows on the busiest owner of experts over the mean (1.2)")
    policies = Suggestions(("auto", "none", "gathers", "cheap", "cheap+gathers", "full", "all"))
    add("--recompute", choices=policies, metavar="HOW", help="auto, none, gathers, cheap, cheap+gathers or full (auto)")
    add("--offload", choices=("auto", "none", "all"), help="saved tensors that wait in host memory (auto)")
    add("--stages", metavar="N", help="pipeline stages: a number, marked (sw.stage), or auto")
    schedules = "GPipe 1F1B LoopedBFS Interleaved1F1B InterleavedZeroBubble ZBVZeroBubble DualPipeV Solved"
    says = "pipeline schedule: 1F1B, GPipe, ZBVZeroBubble, Solved, ... (1F1B)"
    add("--schedule", choices=Suggestions(schedules.split()), metavar="NAME", help=says)
    add("--zero", type=int, choices=(1, 2, 3), help="ZeRO stage: shard parameters, gradients and states")
    add("--no-cache", dest="cache", action="store_false", help="neither read nor keep plans in the cache folder")
    add("--seconds", type=float, metavar="S", help="end with the best plan so far, and after these no suggestion (30)")


def settings_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of ``sw.plan`` that the options give. Raises ShardwiseError for text that does not parse."""
    from shardwise.costs.units import parse_quantity
    from shardwise.layouts.mesh import Mesh

    settings: dict[str, Any] = {"max_mesh_axes": chosen.max_mesh_axes, "optimizer": chosen.optimizer}
    settings |= {name: getattr(chosen, name) for name in _PLAIN if getattr(chosen, name) is not None}
    if chosen.stages is not None:
        number = whole_number(chosen.stages)
        settings["stages"] = chosen.stages if number is None else number
    if chosen.mesh is not None:
        settings["mesh"] = Mesh.parse(chosen.mesh)
    if chosen.memory is not None:
        try:
            settings["memory_bytes"] = parse_quantity(chosen.memory, "B")
        except ValueError as error:
            raise ShardwiseError(f"--memory: {error}", fix='such as --memory "60 GiB"') from error
    if chosen.precision is not None:
        settings["precision"] = _precision(chosen.precision)
    for option, name in (("strategy", "strategies"), ("layout", "layouts")):
        if getattr(chosen, option):
            settings[name] = _pairs(getattr(chosen, option), f"--{option}")
    return settings


def cluster_of(text: str) -> Cluster | int:
    """Return the cluster of a name or a file, or a number of devices as an int."""
    number = whole_number(text)
    return Cluster.load(text) if number is None else number


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ShardwiseError(f"{option} {text!r} has no =", fix=f"{option} NAME=TEXT")
        pairs[name] = value
    return pairs


def _precision(text: str) -> Any:
    import torch

    from shardwise.graph.step_precision import Precision

    pairs = _pairs(text.split(","), "--precision") if "=" in text else {"compute": text}
    products = pairs.pop("products", None)
    wrong = [f"{key}={value}" for key, value in pairs.items() if value not in _DTYPES and value not in _DTYPES.values()]
    if wrong or pairs.keys() - {"compute", "parameter", "reduce"}:
        raise ShardwiseError(
            f"cannot parse --precision {text!r}",
            fix=f"compute=, parameter=, reduce=, each {', '.join(_DTYPES)}; products=float8: compute=bf16,reduce=f32",
        )
    dtypes: dict[str, Any] = {key: getattr(torch, _DTYPES.get(value, value)) for key, value in pairs.items()}
    return Precision(**dtypes, products=products)


# -- plan --------------------------------------------------------------------------------------------------------------


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument("--compare", action="store_true", help="plan with every search and print a table")
    add_output(parser, "write the plan (with --compare the fastest one) as JSON", required=False)


def _plan(chosen: argparse.Namespace) -> int:
    from shardwise.api import compare

    if chosen.compare and (chosen.search or chosen.seconds is not None):
        fix = f"leave out {'--search' if chosen.search else '--seconds'} or --compare"
        raise ShardwiseError("--compare plans with every search, to its end", fix=fix)
    planned: Plan | None
    shown: Any
    data: Callable[[], Any]
    if chosen.compare:
        cluster, settings = cluster_of(chosen.cluster), settings_of(chosen)
        module, inputs, loss = model_of(chosen)
        with show_progress("planning with every search", lines=True):
            comparison = compare(module, inputs, cluster, loss=loss, **settings)
        best = comparison.best
        planned = None if best is None else best.plan
        rows = [
            {
                "search": row.search,
                "planning_seconds": row.planning_seconds,
                "step_seconds": None if row.step is None else row.step.seconds,
                "error": row.error or None,
            }
            for row in comparison
        ]
        shown, data = comparison, lambda: rows
    else:
        has_search = chosen.search or chosen.mode or chosen.strategy
        planned = _planned(chosen, {} if has_search else _PRICED, cache=chosen.cache).plan
        shown, data = planned, partial(_as_json, planned)
    if chosen.output and planned is not None:  # before it is shown: head ends the program
        with writing(chosen.output):
            planned.save(chosen.output)
    show(shown, chosen, data)
    if planned is None:
        return 1
    if chosen.output and not chosen.json:
        print(f"\nwritten to {chosen.output}: sw.Plan.load({chosen.output!r})")
    return 0


def _as_json(plan: Plan) -> Any:
    return json.loads(plan.to_json())


def _planned(chosen: argparse.Namespace, defaults: Mapping[str, Any], *, cache: bool) -> PlanningResult:
    """Plan the model. ``defaults``: of settings that the options do not give."""
    from shardwise.api import plan

    if chosen.cluster is None:
        raise ShardwiseError("a model needs a cluster", fix="add --cluster h100-1x8, or give a plan file")
    cluster, settings = cluster_of(chosen.cluster), {**defaults, **settings_of(chosen)}
    module, inputs, loss = model_of(chosen)
    with show_progress(f"planning for {chosen.cluster}", lines=True):
        return plan(module, inputs, cluster, loss=loss, seconds=chosen.seconds, cache=cache, **settings)


def _searched(chosen: argparse.Namespace) -> PlanningResult:
    """Plan the model by price, for its search: a plan of the cache has none."""
    return _planned(chosen, _PRICED, cache=False)


# -- fits --------------------------------------------------------------------------------------------------------------


def _add_fits(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument("--price", type=float, metavar="X", help="price of a device-hour, for the price of 1e9 tokens")
    parser.add_argument("--days", type=float, metavar="N", help="also say how much of N days trains")
    parser.add_argument(
        "--mtbf", type=float, metavar="HOURS", help="hours of a device between interruptions (of the cluster file)"
    )
    parser.add_argument("--restart", type=float, metavar="SECONDS", help="to begin again behind an interruption")
    parser.add_argument("--store", metavar="RATE", help='of checkpoints, by device: "100 MB/s"')


def _fits(chosen: argparse.Namespace) -> int:
    from shardwise.planning.fits import fits

    cluster, settings = _with_failures(cluster_of(chosen.cluster), chosen), settings_of(chosen)
    settings |= {"seconds": chosen.seconds, "cache": chosen.cache, "price_per_hour": chosen.price, "days": chosen.days}
    module, inputs, loss = model_of(chosen)
    with show_progress(f"planning for {chosen.cluster}, with suggestions", lines=True):
        answer = fits(module, inputs, cluster, loss=loss, **settings)
    show(answer, chosen, answer.as_data)
    return 0 if answer.ok else 1


def _with_failures(cluster: Cluster | int, chosen: argparse.Namespace) -> Cluster | int:
    """Return the cluster with the failure statistics that the options give."""
    options = {"hours_between": chosen.mtbf, "restart": chosen.restart}
    changes: dict[str, float] = {name: number for name, number in options.items() if number is not None}
    if chosen.store is not None:
        changes["store"] = parse_quantity(chosen.store, "B/s")
    if not changes:
        return cluster
    if chosen.days is None:
        raise ShardwiseError("--mtbf, --restart and --store are about a period", fix="add --days 30")
    for name, number in changes.items():
        if not (isfinite(number) and number > 0):
            raise ShardwiseError(f"{name} must be a positive number, got {number:g}")
    described = Cluster.of(cluster)
    failures = described.failures
    if chosen.mtbf is not None:
        failures = replace(failures or FailureStatistics(chosen.mtbf), interruptions=0.0)
    if failures is None:
        raise ShardwiseError(f"{described.name} has no failure statistics", fix="add --mtbf HOURS")
    return replace(described, failures=replace(failures, **changes))


# -- explain, top, diff ------------------------------------------------------------------------------------------------


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="an operator or a parameter, as the plan prints it")
    add_settings(parser, cluster=False)


def _explain(chosen: argparse.Namespace) -> int:
    from shardwise.plans.plan import Plan
    from shardwise.plans.printing import format_entry

    if _is_plan(chosen.model):  # a plan file has no search, so alternatives are not known
        plan = Plan.load(chosen.model)
        show(format_entry(plan, chosen.name), chosen, lambda: entry_data(plan, chosen.name))
        return 0
    explanation = _searched(chosen).report.explain(chosen.name)
    show(explanation, chosen, lambda: explanation_data(explanation))
    return 0


def _add_top(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument("-k", type=int, default=5, help="how many plans (5)")


def _top(chosen: argparse.Namespace) -> int:
    plan = _searched(chosen)
    with show_progress("ranking plans", lines=True):
        ranking = plan.report.top(chosen.k)
    show(ranking, chosen, lambda: ranking_data(ranking))
    return 0


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    add_output(parser, "the trace file, for https://ui.perfetto.dev")


def _trace(chosen: argparse.Namespace) -> int:
    plan = _searched(chosen)
    with writing(chosen.output):
        plan.report.trace(chosen.output)
    show(f"written to {chosen.output}: open it in https://ui.perfetto.dev", chosen, lambda: {"written": chosen.output})
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, cluster=False)
    parser.add_argument("--other", metavar="PLAN", help="another plan file to compare with")
    add_output(parser, "the HTML file, such as plan.html")


def _report(chosen: argparse.Namespace) -> int:
    from shardwise.plans.plan import Plan
    from shardwise.plans.result import plan_of
    from shardwise.report.page import write_page

    other = None if chosen.other is None else Plan.load(chosen.other)
    planned = Plan.load(chosen.model) if _is_plan(chosen.model) else _searched(chosen)
    with show_progress("writing the page"), writing(chosen.output):
        if isinstance(planned, Plan) or planned.search_report is None:  # of a file, a mode or by hand: without a search
            write_page(chosen.output, plan_of(planned), other=other)
        else:
            planned.report.write(chosen.output, other=other)
    size = Path(chosen.output).stat().st_size
    show(f"written to {chosen.output}", chosen, lambda: {"written": chosen.output, "bytes": size})
    return 0


def _is_plan(text: str) -> bool:
    """Return whether a path is a plan file rather than a model or its configuration. Raises ShardwiseError for a .json
    file that is missing or does not parse."""
    path = Path(text)
    if path.suffix == ".json" and not path.exists():
        raise ShardwiseError(f"there is no file {text}", fix="check the path")
    if path.suffix != ".json" or path.is_dir():
        return False
    if names_plan(path):
        return True
    try:
        json.loads(path.read_bytes())
    except ValueError as error:
        fix = "give a plan file, a config.json on disk, or FILE:FUNCTION"
        raise ShardwiseError(f"{text} is not JSON: {str(error)[:100]}", fix=fix) from error
    return False


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument("other", metavar="OTHER", help="the plan file to compare with it")
    parser.add_argument(
        "--max-growth",
        type=float,
        metavar="PERCENT",
        help="exit with 1 if the predicted step or memory grows by more than this; with 2 if they are not predicted",
    )


def _diff(chosen: argparse.Namespace) -> int:
    from shardwise.plans.plan import Plan
    from shardwise.plans.price_scope import default_seconds, figures

    if chosen.max_growth is not None and isnan(chosen.max_growth):
        raise ShardwiseError("--max-growth is not a number", fix="give percent, such as --max-growth 5")
    first, second = Plan.load(chosen.plan), Plan.load(chosen.other)
    diff = first.diff(second)
    growth: dict[str, float] = {}
    first_figures, second_figures = figures(first), figures(second)
    if first_figures is not None and second_figures is not None:
        pairs = {"step": map(default_seconds, (first, second)), "memory": (first_figures[1], second_figures[1])}
        growth = {name: after / before - 1 if before else 0.0 for name, (before, after) in pairs.items()}
    data = {
        "growth": growth or None,
        **{title: [list(entry) for entry in getattr(diff, title)] for title in ("settings", "layouts", "strategies")},
        "cuts": [list(entry) for entry in diff.cuts],
        "communication": [totals(first), totals(second)],
    }
    lines = [f"predicted {name}: {share:+.2%}" for name, share in growth.items()]
    show("\n".join([str(diff), *lines]), chosen, lambda: data)
    if chosen.max_growth is None:
        return 0
    if not growth:
        raise ShardwiseError(
            "one of the plans has no prediction", fix="plan with a search by price, or leave out --max-growth"
        )
    return int(not all(share <= chosen.max_growth / 100 for share in growth.values()))


# -- verify, check -----------------------------------------------------------------------------------------------------


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add_model(parser, values=True)
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (3)")


def _verify(chosen: argparse.Namespace) -> int:
    from shardwise.plans.plan import Plan
    from shardwise.proof.verify import verify

    plan = Plan.load(chosen.plan)
    module, inputs, loss = model_of(chosen, values=True)
    with show_progress(f"running {plan.num_ranks} ranks and one device"):
        report = verify(module, inputs, plan, loss=loss, steps=chosen.steps)
    data = {
        "ok": report.ok,
        "max_error": report.max_error,
        "tolerance": report.tolerance,
        "first_wrong": report.first_wrong or None,
        "not_proven": report.not_proven or None,
    }
    show(report, chosen, lambda: data)
    return 0 if report.ok else 1


def _add_check(parser: argparse.ArgumentParser) -> None:
    add_model(parser, values=True)
    parser.add_argument(
        "--plan",
        default="auto",
        metavar="PLAN",
        help="auto (the tp plan that ships with a transformers model), a JSON file of {path: style}, or plan.py:NAME: "
        "a plan of parallelize_module, {'fully_shard': [...]}, a config of transformers or accelerate, or a function",
    )
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="virtual ranks (8)")
    parser.add_argument("--mesh", metavar="AXES", help="such as dp=2,tp=4 (tp over all devices)")
    parser.add_argument("--cluster", metavar="CLUSTER", help="cluster for prices (nodes of eight H100)")
    parser.add_argument("--no-price", action="store_true", help="skip prices and the comparison with shardwise's plan")


def _check(chosen: argparse.Namespace) -> int:
    from shardwise.costs.cluster import Cluster
    from shardwise.foreign.check import check
    from shardwise.layouts.mesh import Mesh

    plan: Any = chosen.plan
    if Path(plan).suffix == ".json":
        try:
            plan = json.loads(Path(plan).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ShardwiseError(f"cannot read {plan}: {error}", fix='a JSON file of {"path": "style"}') from error
    elif plan != "auto":
        text, plan = plan, load_named_object(plan)
        if plan is None:
            place, _, name = text.rpartition(":")
            raise ShardwiseError(f"{place} has no {name}", fix="define it, or name another plan")
    mesh = None if chosen.mesh is None else Mesh.parse(chosen.mesh)
    cluster = None if chosen.cluster is None else Cluster.of(cluster_of(chosen.cluster))
    module, inputs, loss = model_of(chosen, values=True)
    options: dict[str, Any] = {"mesh": mesh, "cluster": cluster, "beside": not chosen.no_price}
    outcome = check(module, inputs, plan, chosen.devices, loss=loss, **options)
    show(outcome, chosen, outcome.as_data)
    return {"equal": 0, "wrong": 1, "not run": 3}[outcome.verdict]


# -- run --alone -------------------------------------------------------------------------------------------------------


def run_rank_alone(rank: int, arguments: Sequence[str]) -> int:
    """Print the measured and the predicted step of a rank of a plan, without the others. Return the exit code."""
    parser = argparse.ArgumentParser(prog=f"shardwise run --alone {rank}")
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    add_model(parser)
    parser.add_argument("--steps", type=int, default=3, help="measured steps (3)")
    parser.add_argument("--device", metavar="DEVICE", help="device, such as cuda:1 or cpu (the GPU, if there is one)")
    graphs: dict[str, Any] = {"nargs": "?", "const": True, "default": False, "choices": ("graphs",)}
    parser.add_argument("--compile", **graphs, help="compile the program, as on GPUs; graphs: with CUDA graphs as well")
    chosen = parser.parse_args(arguments)
    from shardwise.plans.plan import Plan
    from shardwise.runtime.single_rank import run_alone

    plan = Plan.load(chosen.plan)
    module, inputs, loss = model_of(chosen)
    options: dict[str, Any] = {"device": chosen.device, "compile": chosen.compile, "steps": chosen.steps}
    with show_progress(f"running rank {rank} of {plan.num_ranks}"):
        measured = run_alone(module, inputs, plan, rank, loss=loss, **options)
    print(measured)
    return 0


PLAN_COMMANDS: tuple[Command, ...] = (
    Command("plan", "choose how to split a model over a cluster", _add_plan, _plan),
    Command("fits", "check whether a model fits a cluster, how fast, and what to change", _add_fits, _fits),
    Command("explain", "explain why an operator is split as it is", _add_explain, _explain),
    Command("top", "list the best plans of a search", _add_top, _top),
    Command("report", "write an HTML page about a plan, from a model or a plan file", _add_report, _report),
    Command("trace", "write a simulated step as a trace for Perfetto", _add_trace, _trace),
    Command("diff", "compare two plans", _add_diff, _diff),
    Command("verify", "prove that a plan computes what one device computes", _add_verify, _verify),
    Command("check", "prove or refute a plan of another tool", _add_check, _check),
)
