"""Predicted against published seconds of training, family by family: ``make bench-published-runs``.

``--data`` is a file of published runs (``published_runs.json``: a list of objects with ``family``). A row is priced
with its own settings. The model is Megatron's GPT as in ``published_memory.py``; its layers are planned with columns
and rows split over ``tp`` (sequence parallelism where the row has it), and one pass of one and of two layers is
simulated, so that their difference is a layer and the rest embedding, head and loss. The rest is closed form:

* stages: one pass after the other (1F1B): ``passes`` times the slowest, with the head, and ``(pp - 1) / vpp`` times
  the others, with their messages;
* full recompute: forward once more; selective: attention's scores once more, which is counted as nothing;
* data parallelism: the gradients of a stage, reduced after the last pass (Megatron), or parameters gathered and
  gradients scattered beside each layer's computation (FSDP), of which the longer counts;
* the update, of the stage's parameters, or of a rank's part of them (ZeRO).

Megatron's fused kernels are priced as compiled ones; Composer is eager, without dropout, with FlashAttention of
their time. Of a family, per hardware and software, one factor (the median of
measured / predicted) is taken from a quarter of the groups (equal model, hardware and length); errors, order and
coverage are those of the other groups. The interval is the factor's: the spread of the ratios in that quarter.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from published_memory import MEGATRON, WHOLE, Gpt, Shape

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.kernels import Work
from shardwise.costs.memory import busiest_program
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import simulate_program
from shardwise.costs.units import Figures
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.vjp import Kinds
from shardwise.runtime.compiled import compiled_program, priced

GPUS = {
    "A100-80GB": "a100-80",
    "A100-40GB": "a100-40",
    "H100-80GB": "h100",
    "V100-32GB": "v100",
    "L4-24GB": "l4",
}
REACHED = 0.92  # of a network card, as in the bundled clusters
# Part of the peak that attention reached in the software of the runs (recalled): FlashAttention on A100 .25 to .40
# (Dao, "FlashAttention-2", 2023), FlashAttention-2 on H100 .35 (Shah and others, "FlashAttention-3", 2024).
FLASH = 0.35
Row = Mapping[str, Any]


@cache
def cluster_of(gpu: str, gpus: int, per_node: int, interconnect: str) -> Cluster:
    """The hardware of a row: a bundled cluster, with the network that the row states."""
    name = GPUS[gpu]
    inside = min(per_node, 8, gpus)
    cluster = Cluster.load(f"{name}-{max(gpus // inside, 1)}x{inside}")
    per_node_rate = None
    if match := re.search(r"(\d+) Gb/s per node", interconnect):
        per_node_rate = float(match[1])
    elif match := re.search(r"(\d+)x (?:HDR|Omni-Path )(\d+)", interconnect):
        per_node_rate = float(match[1]) * float(match[2])
    if per_node_rate is None or len(cluster.levels) < 2:
        return cluster
    node, network = cluster.levels
    return replace(cluster, levels=(node, replace(network, bandwidth=per_node_rate * 1e9 / 8 / inside * REACHED)))


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of forward and backward of one pass."""

    forward: float
    backward: float


def composers(cluster: Cluster) -> Cluster:
    """A cluster whose attention is as fast as Composer's was."""
    kernels = Figures({**cluster.device.kernels, "attention": FLASH, "attention_backward": FLASH})
    return replace(cluster, device=replace(cluster.device, kernels=kernels))


@cache
def one_pass(shape: Shape, tp: int, gpu: str, composer: bool) -> Pass:
    """A pass of a model whose layers are split over ``tp`` devices of one node. ``composer``: MPT, not Megatron."""
    half = torch.float16 if gpu.startswith("V100") else torch.bfloat16  # which take as long where both exist
    with torch.device("meta"):
        model = Gpt(shape).to(half)
        for module in model.modules():
            if composer and isinstance(module, nn.Dropout):
                module.p = 0.0
        ids = torch.empty(shape.batch, shape.sequence, dtype=torch.int64)
    cluster, precision = cluster_of(gpu, tp, 8, ""), sw.Precision(half, torch.float32)
    cluster = composers(cluster) if composer else cluster
    strategies = MEGATRON | ({} if shape.splits_sequence or composer else WHOLE) | {"tokens": "v@tp"}
    plan = sw.plan(
        model, (ids, ids), cluster, mesh=sw.Mesh(tp=tp), strategies=strategies, search="sharding_propagation",
        precision=precision, recompute="none",
    )  # fmt: skip
    spmd = program_of(plan, capture(model, (ids, ids), {}, precision=precision).graph, training=True)
    program = busiest_program(spmd, Kinds())
    if not composer:
        # What is sent stays outside of what is compiled; of the ranks only the place is asked.
        nobody: Any = SimpleNamespace(coordinates=spmd.mesh.coordinates(program.rank))
        program = compiled_program(program, nobody, torch.device("cpu"), generate=priced)
    # Casts of weights happen once a step: they are part of the update.
    prices = Prices(Links(cluster, plan.mesh), "none")
    step = simulate_program(program, prices)
    return Pass(step.forward, step.seconds - step.forward)


def parameters(row: Row) -> tuple[float, float]:
    """Of a layer, and of embedding and positions."""
    arch, width = row["arch"], row["arch"]["hidden"]
    return 4 * width**2 + 2 * width * arch["ffn"] + 13 * width, (arch["vocab"] + row["seq"]) * width


def unpriced(row: Row) -> str:
    """Why a row cannot be priced; empty where it can."""
    arch = row.get("arch")
    if row.get("status") != "ok":
        return "ran out of memory: no seconds"
    if not row.get("step_time_s"):
        return "no seconds published"
    if not arch or any(not row.get(key) for key in ("seq", "micro_batch", "global_batch", "gpus", "tp", "pp", "dp")):
        return "a field that prices need is not stated"
    if row["gpu"] not in GPUS:
        return f"no bundled device: {row['gpu']}"
    if row.get("precision", "").startswith("fp8"):
        return "fp8"
    if (row.get("cp") or 1) > 1 or (row.get("ep") or 1) > 1:
        return "context or expert parallelism on axes of their own"
    if arch.get("gated_mlp") or arch["kv_heads"] != arch["heads"]:
        return "a model of another kind than GPT"
    if str(row["recompute"]).startswith("per stage") or not isinstance(row["zero"], int):
        return "settings that differ from stage to stage"
    if arch["hidden"] % arch["heads"]:
        return "a width that its heads do not divide"
    if row["tp"] > 8 or arch["heads"] % row["tp"]:
        return "heads that tp does not divide, or tp wider than a node"
    return ""


def seconds_of(row: Row) -> float:
    """The predicted step."""
    arch, tp, pp, dp = row["arch"], row["tp"], row["pp"], row["dp"]
    vpp, sharded = row.get("vpp") or 1, row["zero"] >= 2
    multiple = 128 * tp
    vocab = -(-arch["vocab"] // multiple) * multiple
    composer = row["framework"].startswith("Composer")
    fields = {"sequence": row["seq"], "batch": row["micro_batch"], "scores": not composer, "vocab": vocab}
    sequence = bool(row.get("sequence_parallel"))
    one, two = (
        one_pass(
            Shape(arch["hidden"], arch["heads"], layers, splits_sequence=sequence, **fields), tp, row["gpu"], composer
        )
        for layers in (1, 2)
    )
    layer = Pass(two.forward - one.forward, two.backward - one.backward)
    rest = one.forward + one.backward - layer.forward - layer.backward
    again = layer.forward if row["recompute"] == "full" else 0.0
    cluster = cluster_of(row["gpu"], row["gpus"], row.get("gpus_per_node") or 8, row["interconnect"] or "")
    links = Links(
        cluster, sw.Mesh({name: size for name, size in (("pp", pp), ("dp", dp), ("tp", tp)) if size > 1} or {"dp": 1})
    )
    passes = row["global_batch"] // (row["micro_batch"] * dp)
    per_layer, ends = parameters(row)
    layers = -(-arch["layers"] // pp)  # of the slowest stage
    held = (per_layer * layers + ends / (1 if pp == 1 else 2)) / tp
    over = tuple(name for name in links.mesh.expand("dp")) if dp > 1 else ()
    if sharded:
        gather = links.seconds("all_gather", over, 2 * per_layer) if over else 0.0
        scatter = links.seconds("reduce_scatter", over, 2 * per_layer) if over else 0.0
        forward, backward = max(layer.forward, gather), max(layer.backward + again, gather + scatter)
        outer = 3 * links.seconds("all_gather", over, 2 * ends) if over else 0.0
        return passes * (layers * (forward + backward) + rest + outer) + _update(cluster, held / dp)
    stage = layers * (layer.forward + layer.backward + again)
    sent = 2 * row["micro_batch"] * row["seq"] * arch["hidden"] / tp  # scattered over tp on its way, as Megatron does
    message = 2 * vpp * links.seconds("collective_permute", links.mesh.expand("pp"), sent) if pp > 1 else 0.0
    reduce = links.seconds("all_reduce", over, 2 * held) if over else 0.0
    update = _update(cluster, held / (dp if row["zero"] else 1))
    return passes * (stage + rest + message) + (pp - 1) / vpp * (stage + message) + reduce + update


def _update(cluster: Cluster, numel: float) -> float:
    """AdamW on float32 weights and moments, from gradients of two bytes, which writes weights of two bytes."""
    return Prices(Links(cluster, sw.Mesh(dp=cluster.num_devices))).kernel(Work("update", num_bytes=numel * 28))


# ------------------------------------------------------------------------------------------------------------ reporting


@dataclass(frozen=True, slots=True)
class Found:
    """A published row and its predicted seconds."""

    row: Row
    seconds: float

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return float(self.row["step_time_s"]) / self.seconds

    @property
    def group(self) -> tuple[Any, ...]:
        row = self.row
        return row["arch"]["layers"], row["arch"]["hidden"], row["gpus"], row["gpu"], row["seq"]

    @property
    def software(self) -> tuple[Any, ...]:
        return self.row["gpu"], self.row["framework"], self.row["interconnect"]


def calibrated(found: Sequence[Found]) -> tuple[list[tuple[Found, float, float, float]], int]:
    """Of the groups that no factor was taken from: rows with factor and interval (factors as well); and how many rows
    the factors come from."""
    judged, used = [], 0
    by_software: dict[Any, list[Found]] = defaultdict(list)
    for one in found:
        by_software[one.software].append(one)
    for rows in by_software.values():
        groups = sorted({one.group for one in rows}, key=str)
        chosen = set(groups[::4]) if len(groups) >= 4 else set()
        taken = [log(one.ratio) for one in rows if one.group in chosen]
        used += len(taken)
        factor = exp(median(taken)) if taken else 1.0
        cuts = quantiles(taken, n=20, method="inclusive") if len(taken) >= 2 else [log(0.8), log(1.25)]
        judged += [(one, factor, exp(cuts[0]), exp(cuts[-1])) for one in rows if one.group not in chosen]
    return judged, used


def order(judged: Iterable[tuple[Found, float, float, float]]) -> tuple[int, int, list[float]]:
    """Pairs of plans of one group and batch, how many of them are predicted in their order, and per set the regret of
    the plan that would be picked."""
    sets: dict[Any, list[Found]] = defaultdict(list)
    for one, *_ in judged:
        sets[one.group, one.row["global_batch"]].append(one)
    pairs = right = 0
    regrets = []
    for rows in sets.values():
        if len(rows) < 2:
            continue
        for a, b in combinations(rows, 2):
            pairs += 1
            right += (a.seconds < b.seconds) == (a.row["step_time_s"] < b.row["step_time_s"])
        picked = min(rows, key=lambda one: one.seconds)
        regrets.append(picked.row["step_time_s"] / min(one.row["step_time_s"] for one in rows) - 1)
    return pairs, right, regrets


def report(family: str, rows: Sequence[Row], show: bool) -> None:
    found, missing = [], Counter[str]()
    for row in rows:
        if reason := unpriced(row):
            missing[reason] += 1
        else:
            found.append(Found(row, seconds_of(row)))
            if show:
                one = found[-1]
                print(f"|   {row['id']} | {one.seconds:.3f} s | {row['step_time_s']:.3f} s | {1 / one.ratio:.3f} |")
    raw = [1 / one.ratio for one in found]
    cells = [f"{len(found)} of {len(rows)}"]
    cells.append(f"{median(raw):.2f} ({min(raw):.2f}-{max(raw):.2f})" if raw else "")
    judged, used = calibrated(found)
    errors = [abs(factor / one.ratio - 1) for one, factor, _, _ in judged]
    inside = [low <= one.ratio <= high for one, _, low, high in judged]
    pairs, right, regrets = order(judged)
    cells.append(f"{median(errors):.1%}, {mean(errors):.1%} (factors from {used} rows)" if errors else "")
    cells.append(f"{right / pairs:.3f} of {pairs}" if pairs else "")
    cells.append(f"{mean(regrets):.1%}, most {max(regrets):.1%}" if regrets else "")
    cells.append(f"{mean(inside):.0%}" if inside else "")
    print(f"| {family} | {' | '.join(cells)} |", flush=True)
    for reason, count in missing.most_common():
        print(f"| {family} | not: {count}: {reason} | | | | | |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="published_runs.json")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--all", action="store_true", help="a line per row")
    options = parser.parse_args(arguments)
    families: dict[str, list[Row]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    for row in json.loads(options.data.read_text(encoding="utf-8")):
        if "step_time_s" not in row:  # another schema, whose seconds are not those of the hardware
            skipped[row["family"]] += 1
        elif not options.families or row["family"] in options.families:
            families[row["family"]].append(row)
    print(
        "| family | rows priced | predicted / measured: median (range) | error with one factor: median, mean | pairs "
        "in order | regret: mean | in the 90 % interval |\n|---|---|---|---|---|---|---|"
    )
    for family, rows in families.items():
        report(family, rows, options.all)
    for family, count in skipped.items():
        print(f"| {family} | not: {count}: times that differ by environment; memory: published_memory.py | | | | | |")


if __name__ == "__main__":
    main()
