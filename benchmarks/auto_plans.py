"""Plans chosen by price, measured: searches against data parallelism, and predicted against measured order of plans.

The first table trains models whose best plans are known (``tests/models/paper_models.py``) on real ranks, gloo on this
machine with one thread each. Plans that are the same run once. All plans of a model take turns, step by step, in an
order that changes from round to round (as ``step_time.py``); a ratio is that of the medians over all rounds of the
slowest rank, and its spread that of the quartiles of the ratios within rounds. Data parallelism runs twice: how far
"again" is from 1 tells what a run cannot resolve. Before anything is timed the losses of two steps are compared.

The second table takes one model and many plans: data and tensor parallel ones, those of the searches, and random legal
assignments of the cost graph; it shows Spearman's correlation between the predicted seconds and the measured
ratios to data parallelism.

Prices are those of ``--cluster``: a file of ``shardwise calibrate`` (by default the bundled ``local``). Run
``python benchmarks/auto_plans.py [--ranks 2] [--models reid dlrm] [--orders 24] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every rank
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import start_processes

import shardwise as sw
from models import paper_models
from models.paper_models import Case
from shardwise.costs.cluster_file import format_cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import price_program
from shardwise.graph.capture import capture
from shardwise.layouts.routes import Axes
from shardwise.plans.bind import program_of
from shardwise.plans.entries import PricingEntry
from shardwise.plans.listing import stage_of
from shardwise.plans.plan import Plan
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.programs.spmd import build_spmd
from shardwise.rules.atoms import factor_graph
from shardwise.search.auto import PRICED_SEARCHES, best_completion, choice_of
from shardwise.search.cost_graph import SharedVariable
from shardwise.search.cost_tables import Tables
from shardwise.search.domains import Domains, SearchSpace
from shardwise.search.memory_policy import PricedPolicy
from shardwise.search.user_choices import rules_of

TIMEOUT = timedelta(minutes=5)
LOSS_TOLERANCE = 1e-3  # of float32 losses after one step, whose order of summation differs
BASELINE = "data parallel"
OPTIMIZER = "adamw fused"  # measured and priced: one pass over memory, where AdamW's default on CPUs makes twenty

CASES: dict[str, Case] = {
    "reid": paper_models.reid(32, 128, 128, 50_000),
    "dlrm": paper_models.dlrm(256, 4, 100_000, 16),
    "wide & deep": paper_models.wide_and_deep(256, 8, 100_000, 16, 128),
    "transformer, wide": paper_models.transformer(2, 32, 2, 512, 8),
    "transformer, narrow": paper_models.transformer(32, 64, 2, 64, 4),
    "resnet": paper_models.resnet(8, (1, 1, 1, 1), 16, 1000, 64),
    "bert": paper_models.bert(8, 64, 2, 128, 4, 30_522),
}


@dataclass(frozen=True)
class Job:
    """One run: the plans (as JSON, by name) of a model, whose steps take turns."""

    model: str
    num_ranks: int
    plans: dict[str, str]
    rounds: int


# -- in a rank ---------------------------------------------------------------------------------------------------------


def rank_main(rank: int, job: Job, folder: str) -> None:
    """What every rank does; rank 0 leaves seconds per plan and round in ``folder``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=job.num_ranks, timeout=TIMEOUT
    )
    case = CASES[job.model]
    torch.manual_seed(1)
    inputs = case.inputs()
    steps, losses = {}, {}
    for name, text in job.plans.items():
        torch.manual_seed(0)
        model = sw.parallelize(case.build(), sw.Plan.from_json(text))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(model: Any = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            loss = model.step(*inputs)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        losses[name] = [step(), step()]
        steps[name] = step
    expected = losses[next(iter(losses))]
    for name, found in losses.items():
        if any(abs(a - b) > LOSS_TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"{job.model}, {name}: the losses are {found}, not {expected}")
    gc.collect()
    gc.freeze()
    names = list(steps)
    taken = torch.zeros(job.rounds, len(names), dtype=torch.float64)
    for index in range(job.rounds):
        order = names[index % len(names) :] + names[: index % len(names)]
        for name in order if index % 2 == 0 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            taken[index, names.index(name)] = time.perf_counter() - start
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save({name: taken[:, i].tolist() for i, name in enumerate(names)}, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


# -- in the script -----------------------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, list[float]]:
    """Seconds of the steps of every plan, on the slowest rank."""
    get_context("forkserver").set_forkserver_preload(["shardwise"])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(rank_main, (job, folder), nprocs=job.num_ranks, start_method="forkserver")
        result: dict[str, list[float]] = torch.load(f"{folder}/result", weights_only=False)
    return result


class Planner:
    """Plans of one model on meta tensors, with the seconds that their programs are predicted to take."""

    def __init__(self, case: Case, cluster: sw.Cluster) -> None:
        self.cluster, self.mesh = cluster, sw.Mesh(x=cluster.num_devices)
        with torch.device("meta"):
            self.module, self.inputs = case.build(), case.inputs()
        self.graph = capture(self.module, self.inputs).graph
        self.prices = Prices(Links(cluster, self.mesh), OPTIMIZER)

    def plan(self, **options: Any) -> sw.Plan:
        return sw.plan(self.module, self.inputs, self.cluster, mesh=self.mesh, optimizer=OPTIMIZER, **options)

    def seconds(self, plan: sw.Plan) -> float:
        """Predicted, from the program that the plan is emitted as."""
        price = price_program(program_of(plan, self.graph), self.prices)
        return price.exposed + max(price.compute + price.update, price.traffic)

    def named(self) -> dict[str, sw.Plan]:
        """Data parallelism and what the searches find."""
        found = {BASELINE: self.plan(mode="data_parallel")}
        for search in (*PRICED_SEARCHES, "sharding_propagation"):
            found[search] = self.plan(search=search)
        return found

    def random(self, count: int, seed: int) -> dict[str, sw.Plan]:
        """Some random operators and parameters have random strategies and layouts, the rest is the best with these."""
        factored = factor_graph(self.graph, rules_of(self.graph))
        domains = Domains(SearchSpace(self.graph, factored), Axes.of(self.mesh), self.prices)
        cost = Tables(domains, {}).priced(PricedPolicy())
        generator = np.random.default_rng(seed)
        pricing = PricingEntry(format_cluster(self.cluster), "", "", "", ())
        found: dict[str, sw.Plan] = {}
        free = [
            v
            for v, variable in enumerate(cost.variables)
            if not isinstance(variable, SharedVariable) and variable.size > 1
        ]
        while len(found) < count:
            chosen = generator.choice(free, size=min(len(free), int(generator.integers(1, 12))), replace=False)
            fixed = {int(v): int(generator.integers(cost.variables[v].size)) for v in chosen}
            choice = choice_of(cost, best_completion(cost, fixed))
            spmd = build_spmd(self.graph, factored.rules, choice, self.mesh)
            stage = stage_of(self.graph, factored.rules, choice, spmd)
            settings = ("auto", "dynamic_programming", OPTIMIZER, True, BUCKET_BYTES)
            found[f"random {len(found)}"] = Plan((stage,), *settings, pricing)
        return found


def distinct(plans: dict[str, sw.Plan]) -> tuple[dict[str, sw.Plan], dict[str, str]]:
    """The plans that differ, and per name the first plan that is the same."""
    first: dict[Any, str] = {}
    same = {
        name: first.setdefault((plan.parameters, plan.operators, plan.conversions), name)
        for name, plan in plans.items()
    }
    return {name: plan for name, plan in plans.items() if same[name] == name}, same


@dataclass(frozen=True)
class Row:
    """A plan of a model: predicted and median measured seconds, and the quartiles of its ratio to the baseline."""

    model: str
    num_ranks: int
    plan: str
    same_as: str
    predicted: float
    measured: float
    ratio: tuple[float, float, float]


def compare(model: str, num_ranks: int, cluster: sw.Cluster, plans: dict[str, sw.Plan], rounds: int) -> list[Row]:
    """Measure the plans of a model."""
    planner = Planner(CASES[model], cluster)
    own, same = distinct(plans)
    again = f"{BASELINE}, again"
    jobs = {name: plan.to_json() for name, plan in own.items()} | {again: plans[BASELINE].to_json()}
    taken = run(Job(model, num_ranks, jobs, rounds))
    base = np.array(taken[BASELINE])
    rows = []
    for name in [BASELINE, again, *(name for name in plans if name != BASELINE)]:
        own_name = same.get(name, name)
        seconds = np.array(taken[own_name])
        low, middle, high = np.quantile(seconds / base, [0.25, 0.5, 0.75]).tolist()
        predicted = planner.seconds(plans.get(name, plans[BASELINE]))
        rows.append(Row(model, num_ranks, name, own_name, predicted, median(seconds.tolist()), (low, middle, high)))
    return rows


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """The correlation of the ranks of two series without ties."""
    ranks = [np.argsort(np.argsort(np.array(series))) for series in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=title)
    for heading in ("model", "plan", "predicted ms", "measured ms", "ratio", "quartiles"):
        shown.add_column(heading, justify="left" if heading in ("model", "plan") else "right", no_wrap=True)
    last = None
    for row in rows:
        key = f"{row.model}, {row.num_ranks} ranks"
        if key != last and last is not None:
            shown.add_section()
        low, middle, high = row.ratio
        same = "" if row.same_as == row.plan else f" (= {row.same_as})"
        shown.add_row(
            key if key != last else "",
            row.plan + same,
            f"{1000 * row.predicted:.2f}",
            f"{1000 * row.measured:.2f}",
            f"{middle:.2f}",
            f"{low:.2f} - {high:.2f}",
        )
        last = key
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="*", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=30, help="steps of every plan")
    parser.add_argument("--cluster", default="local", help="what prices are taken from: a file of shardwise calibrate")
    parser.add_argument("--orders", type=int, default=24, help="random plans whose order is compared; 0: none")
    parser.add_argument("--order-model", choices=tuple(CASES), default="transformer, wide")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep everything measured")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows: list[Row] = []
    orders: list[Row] = []
    for num_ranks in options.ranks:
        cluster = sw.Cluster.load(options.cluster).with_devices(num_ranks)
        for model in options.models:
            rows += compare(model, num_ranks, cluster, Planner(CASES[model], cluster).named(), options.rounds)
            print(f"{model}, {num_ranks} ranks: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        if options.orders:
            planner = Planner(CASES[options.order_model], cluster)
            plans = planner.named() | planner.random(options.orders, seed=0)
            found = compare(options.order_model, num_ranks, cluster, plans, options.rounds)
            orders += sorted((row for row in found if row.same_as == row.plan), key=lambda row: row.predicted)
    if rows:
        console.print(table(rows, "seconds of a training step, and its ratio to data parallelism"))
    if orders:
        console.print(table(orders, "plans of one model, fastest predicted first"))
    for num_ranks in options.ranks if orders else ():
        own = [row for row in orders if row.num_ranks == num_ranks and "again" not in row.plan]
        value = spearman([row.predicted for row in own], [row.ratio[1] for row in own])
        console.print(f"{num_ranks} ranks: rank correlation of prediction {value:.3f} over {len(own)} plans")
    console.print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows + orders], indent=1))


if __name__ == "__main__":
    main()
