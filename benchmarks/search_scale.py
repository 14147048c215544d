"""How long planning takes, and how it grows: capture, tables and search for large language models on large clusters.

Nothing is allocated and no devices are needed. Prints per case seconds of capture, of everything between capture and
search (rules, atoms), of building the tables, of the search, and of building the program; the peak memory of the
process; and what was found. Memory is not limited: without recomputation these batches fit nowhere. Run
``python benchmarks/search_scale.py [case ...]``; ``--growth`` prints the curves over layers, devices and mesh axes.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from shardwise.partition.pricing import Fragments
from shardwise.partition.spmd import build_spmd
from shardwise.plans.rules import rules_of
from shardwise.rules.atoms import factor_graph
from shardwise.search.auto import Search, candidate_meshes, cost_graph, searched


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


# Name -> model, cluster, mesh (None: all shapes of up to so many axes).
CASES: dict[str, tuple[Model, str, sw.Mesh | int]] = {
    "8b-32x8": (llama_8b(), "h100-32x8", sw.Mesh(dp=32, tp=8)),
    "8b-8x4x2": (llama_8b(), "h100-8x8", sw.Mesh(dp=8, cp=4, tp=2)),
    "8b-64": (llama_8b(), "h100-8x8", 2),
    "8b-1024": (llama_8b(), "h100-128x8", 2),
    "70b-32x8": (llama_70b(), "h100-32x8", sw.Mesh(dp=32, tp=8)),
    "gpt3-1024": (gpt3(), "a100-80-128x8", 2),
    "405b-64x32x8": (llama_405b(), "h100-2048x8", sw.Mesh(dp=64, cp=32, tp=8)),
    "405b-16384": (llama_405b(), "h100-2048x8", 2),
}


class Clock:
    """Seconds of the phases of one case."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def run(
    model: Model, cluster_name: str, meshes: sw.Mesh | int, captured: Capture | None = None
) -> tuple[Clock, Search]:
    """One case."""
    clock, cluster = Clock(), sw.Cluster.load(cluster_name)
    if captured is None:
        with clock.phase("capture"):
            captured = captured_graph(model)
    graph = captured.graph
    with clock.phase("rules"):
        factored = factor_graph(graph, rules_of(graph))
    chosen = candidate_meshes(cluster, meshes) if isinstance(meshes, int) else (meshes,)
    best: Search | None = None
    for mesh in chosen:
        prices = Prices(Links(cluster, mesh))
        with clock.phase("tables"):
            cost = cost_graph(graph, factored, {}, Axes.of(mesh), prices, Fragments)
        with clock.phase("search"):
            found = searched(cost, "dynamic_programming", None)
        if best is None or found.outcome.seconds < best.outcome.seconds:
            best = found
    assert best is not None
    with clock.phase("program"):
        choice = best.choice()
        build_spmd(
            graph,
            factored.rules,
            choice.strategies,
            choice.sources,
            best.mesh,
            route=choice.router,
            shared=choice.shared,
        )
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
        "peak MB",
        "variables",
        "largest joint",
    ):
        found.add_column(name, justify="left" if name == "case" else "right")
    for name in ("mesh", "step ms", "gap", "GB/device"):
        found.add_column(name, justify="right")
    return found


def add_row(out: Table, name: str, clock: Clock, found: Search) -> None:
    seconds = [f"{clock.seconds.get(phase, 0.0):.2f}" for phase in ("capture", "rules", "tables", "search", "program")]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    outcome, prediction = found.outcome, found.prediction()
    out.add_row(
        name, *seconds, f"{memory:.0f}", str(len(found.cost.variables)), f"{outcome.largest_joint:.1e}",
        str(found.mesh), f"{outcome.seconds * 1e3:.1f}", f"{outcome.gap:.2%}", f"{prediction.num_bytes / 1e9:.1f}",
    )  # fmt: skip


def growth(console: Console) -> None:
    """Seconds over layers, over devices and over mesh axes."""
    over_layers = table("growth with layers: Llama-3-8B on 32 x 8")
    for layers in (2, 4, 8, 16, 32, 64, 128):
        add_row(over_layers, f"{layers} layers", *run(llama_8b(layers), "h100-32x8", sw.Mesh(dp=32, tp=8)))
    console.print(over_layers)
    captured = captured_graph(llama_8b(8))
    over_devices = table("growth with devices: 8 layers of Llama-3-8B, all shapes of two axes")
    for nodes in (1, 4, 16, 64, 256, 1024):
        add_row(over_devices, f"{nodes} x 8", *run(llama_8b(8), f"h100-{nodes}x8", 2, captured))
    console.print(over_devices)
    over_axes = table("growth with axes: 8 layers of Llama-3-8B on 64 devices")
    for mesh in (sw.Mesh(dp=64), sw.Mesh(dp=8, tp=8), sw.Mesh(dp=8, cp=4, tp=2)):
        add_row(over_axes, str(mesh), *run(llama_8b(8), "h100-8x8", mesh, captured))
    console.print(over_axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--growth", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    console = Console(width=200)
    if chosen.growth:
        growth(console)
        return
    out = table("planning")
    for name in chosen.cases or CASES:
        add_row(out, name, *run(*CASES[name]))
        console.print(out.title, name, "done", style="dim")
    console.print(out)


if __name__ == "__main__":
    main()
