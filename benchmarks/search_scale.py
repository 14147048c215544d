"""How long planning takes, and how it grows: capture, tables and search for large language models on large clusters.

Nothing is allocated and no devices are needed. Prints per case seconds of capture, of everything between capture and
search (rules, atoms), of building the tables, of the search, and of building the program; the peak memory of a process
of its own, and what of it was there before capture began (torch, transformers); and what was found. Seconds are CPU
time of the one thread that works, so that other work on the machine counts little; of several mesh shapes tables and
search are the sum over all. Memory is not limited: without recomputation these batches fit nowhere.
Run ``python benchmarks/search_scale.py [case ...]``; ``--growth`` (``make bench-search BENCH_ARGS=--growth``) prints
the curves over layers, devices and mesh axes.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.graph.capture import Capture, capture
from shardwise.layouts.routes import Axes
from shardwise.programs.spmd import build_spmd
from shardwise.rules.atoms import factor_graph
from shardwise.search.auto import MeshSearch, run_search
from shardwise.search.cost_tables import Tables
from shardwise.search.domains import Domains, SearchSpace
from shardwise.search.memory_policy import PricedPolicy
from shardwise.search.mesh_shapes import candidate_meshes
from shardwise.search.user_choices import rules_of


@dataclass(frozen=True)
class Model:
    """A language model: its configuration and the tokens of one batch."""

    config: LlamaConfig | GPT2Config
    batch: int
    length: int

    def build(self) -> nn.Module:
        kind = LlamaForCausalLM if isinstance(self.config, LlamaConfig) else GPT2LMHeadModel
        with torch.device("meta"):
            return kind(self.config).to(torch.bfloat16)


def llama(layers: int, hidden: int, ffn: int, heads: int, batch: int, length: int = 8192) -> Model:
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=length,
        use_cache=False,
    )
    return Model(config, batch, length)


def gpt3(layers: int = 96) -> Model:
    config = GPT2Config(
        n_layer=layers, n_embd=12288, n_head=96, vocab_size=50257, n_positions=2048, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Model(config, 1536, 2048)


def llama_8b(layers: int = 32) -> Model:
    return llama(layers, 4096, 14336, 32, 128)


def llama_70b(layers: int = 80) -> Model:
    return llama(layers, 8192, 28672, 64, 256)


def llama_405b(layers: int = 126) -> Model:
    return llama(layers, 16384, 53248, 128, 2048)


def in_pods(num_pods: int, name: str) -> sw.Cluster:
    """A bundled cluster whose nodes are connected in pods; links between pods are half as fast."""
    cluster = sw.Cluster.load(name)
    node, network = cluster.levels
    inside, between = (
        replace(network, size=network.size // num_pods),
        replace(network, name="pods", size=num_pods, bandwidth=network.bandwidth / 2, group_bandwidths=(), lines=()),
    )
    return replace(cluster, name=f"{name} in {num_pods} pods", levels=(node, inside, between))


# Name -> model, cluster (pods, name; 1: of two levels), mesh (a number: all shapes of up to so many axes).
CASES: dict[str, tuple[Model, tuple[int, str], sw.Mesh | int]] = {
    "8b-32x8": (llama_8b(), (1, "h100-32x8"), sw.Mesh(dp=32, tp=8)),
    "8b-8x4x2": (llama_8b(), (1, "h100-8x8"), sw.Mesh(dp=8, cp=4, tp=2)),
    "8b-64": (llama_8b(), (1, "h100-8x8"), 2),
    "8b-1024": (llama_8b(), (1, "h100-128x8"), 2),
    "8b-1024-3axes": (llama_8b(), (1, "h100-128x8"), 3),
    "70b-32x8": (llama_70b(), (1, "h100-32x8"), sw.Mesh(dp=32, tp=8)),
    "gpt3-1024": (gpt3(), (1, "a100-80-128x8"), 2),
    "405b-64x32x8": (llama_405b(), (1, "h100-2048x8"), sw.Mesh(dp=64, cp=32, tp=8)),
    "405b-16384": (llama_405b(), (1, "h100-2048x8"), 2),
    "405b-16384-3axes": (llama_405b(), (1, "h100-2048x8"), 3),
    "405b-16384-3levels": (llama_405b(), (64, "h100-2048x8"), 3),
}


class Clock:
    """CPU seconds of the phases of one case, and the mesh shapes that were tried."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.shapes = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


def run(
    model: Model, cluster_name: tuple[int, str], meshes: sw.Mesh | int, captured: Capture | None = None
) -> tuple[Clock, MeshSearch]:
    """One case."""
    num_pods, name = cluster_name
    clock, cluster = Clock(), sw.Cluster.load(name) if num_pods == 1 else in_pods(num_pods, name)
    if captured is None:
        with clock.phase("capture"):
            captured = captured_graph(model)
    graph = captured.graph
    with clock.phase("rules"):
        factored = factor_graph(graph, rules_of(graph))
    chosen = candidate_meshes(cluster, meshes) if isinstance(meshes, int) else (meshes,)
    best: MeshSearch | None = None
    for mesh in chosen:
        prices = Prices(Links(cluster, mesh))
        clock.shapes += 1
        with clock.phase("tables"):
            cost = Tables(Domains(SearchSpace(graph, factored), Axes.of(mesh), prices), {}).priced(PricedPolicy())
        with clock.phase("search"):
            found = run_search(cost, "dynamic_programming", None)
        if best is None or found.outcome.seconds < best.outcome.seconds:
            best = found
    assert best is not None
    with clock.phase("program"):
        build_spmd(graph, factored.rules, best.choice(), best.mesh)
    return clock, best


def captured_graph(model: Model) -> Capture:
    ids = torch.zeros(model.batch, model.length, dtype=torch.int64, device="meta")
    return capture(model.build(), (), {"input_ids": ids, "labels": ids})


def table(title: str) -> Table:
    found = Table(title=title)
    for name in (
        "case",
        "capture s",
        "rules s",
        "tables s",
        "search s",
        "program s",
        "start MB",
        "peak MB",
        "shapes",
        "solves",
        "variables",
    ):
        found.add_column(name, justify="left" if name == "case" else "right")
    for name in ("mesh", "step ms", "gap", "GB/device"):
        found.add_column(name, justify="right")
    return found


def megabytes() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row(
    name: str, model: Model, cluster: tuple[int, str], meshes: sw.Mesh | int, own: Capture | None = None
) -> list[str]:
    start = megabytes()
    clock, found = run(model, cluster, meshes, own)
    seconds = [f"{clock.seconds.get(phase, 0.0):.2f}" for phase in ("capture", "rules", "tables", "search", "program")]
    outcome, prediction = found.outcome, found.prediction()
    return [
        name, *seconds, f"{start:.0f}", f"{megabytes():.0f}", f"{clock.shapes}", f"{outcome.solves}",
        f"{len(found.cost.variables)}", str(found.mesh), f"{outcome.seconds * 1e3:.1f}",
        f"{outcome.seconds / outcome.bound - 1:.2%}",
        f"{prediction.num_bytes / 1e9:.1f}",
    ]  # fmt: skip


def case(name: str) -> list[str]:
    """A row, in a process of its own."""
    quiet()
    return row(name, *CASES[name])


def quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def growth(console: Console) -> None:
    """Seconds over layers, over devices and over mesh axes; peak memory only grows, as all is one process."""
    mesh = sw.Mesh(dp=32, tp=8)
    run(llama_8b(1), (1, "h100-32x8"), mesh)  # what happens once per process: lowerings are captured
    over_layers = table("growth with layers: Llama-3-8B on 32 x 8")
    for layers in (2, 8, 32, 128):
        over_layers.add_row(*row(f"{layers} layers", llama_8b(layers), (1, "h100-32x8"), mesh))
    console.print(over_layers)
    captured = captured_graph(llama_8b(8))
    for axes in (2, 3):
        over_devices = table(f"growth with devices: 8 layers of Llama-3-8B, all shapes of {axes} axes")
        for nodes in (2, 16, 128, 1024):
            over_devices.add_row(*row(f"{nodes} x 8", llama_8b(8), (1, f"h100-{nodes}x8"), axes, captured))
        console.print(over_devices)
    over_axes = table("growth with axes: 8 layers of Llama-3-8B on 64 devices")
    for mesh in (sw.Mesh(dp=64), sw.Mesh(dp=8, tp=8), sw.Mesh(dp=8, cp=4, tp=2)):
        over_axes.add_row(*row(str(mesh), llama_8b(8), (1, "h100-8x8"), mesh, captured))
    console.print(over_axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--growth", action="store_true")
    chosen = parser.parse_args()
    quiet()
    console = Console(width=200)
    if chosen.growth:
        growth(console)
        return
    out = table("planning")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in chosen.cases or CASES:
            found = pool.submit(case, name).result()
            out.add_row(*found)
            console.print("  ".join(found), f"(load {os.getloadavg()[0]:.1f})", style="dim")  # if the rest is cut off
    console.print(out)
    console.print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
