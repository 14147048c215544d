"""How long a person waits for an answer: planning of large models on large clusters, from the module to the plan.

Of every case, in processes of its own: CPU seconds of all processes together, by the clock, the gap to the bound, the
peak memory; the CPU seconds from the capture to the first verdict, and its interval beside the answer; and the CPU
seconds of the same question in a second process, which has the cache of the first one. Imports and the making of the
module do not count. No device is needed and nothing is allocated.

Run ``python benchmarks/search_targets.py [case ...]`` (``make bench-search``). ``--growth`` prints the curves of
``search_scale.py``, and names of its cases print its table: operators alone, without a memory limit.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import search_scale
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig, PretrainedConfig

import shardwise as sw
from shardwise import progress
from shardwise.errors import NothingFits
from shardwise.plans.price_scope import figures

MASTERS = sw.Precision(compute=torch.bfloat16, parameter=torch.float32)


@dataclass(frozen=True)
class Question:
    """A model, its samples on a cluster, and the settings of ``sw.plan``; ``target``: CPU seconds; ``asks``: "plan" or
    "fits"."""

    config: PretrainedConfig
    samples: int
    length: int
    cluster: str
    target: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    asks: str = "plan"

    def module(self) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        with torch.device("meta"):
            ids = torch.zeros(self.samples, self.length, dtype=torch.int64)
            return AutoModelForCausalLM.from_config(self.config), {"input_ids": ids, "labels": ids}

    def answer(self) -> tuple[sw.Plan | None, str]:
        """Return the plan, and why there is none."""
        module, inputs = self.module()
        settings = {"optimizer": "adamw fused", **self.settings}
        if self.asks == "fits":
            answer = sw.fits(module, (), self.cluster, kwargs=inputs, seconds=0, **settings)
            return answer.asked.plan, answer.asked.refused
        try:
            settings.setdefault("search", "dynamic_programming")
            return sw.plan(module, (), self.cluster, kwargs=inputs, **settings).plan, ""
        except NothingFits as error:
            return None, str(error)


def llama_13b() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=40, hidden_size=5120, intermediate_size=13824, num_attention_heads=40,
        num_key_value_heads=40, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip


def mixtral() -> MixtralConfig:
    return MixtralConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=4096, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip


ALONE = {"mesh": sw.Mesh(dp=32, tp=8), "memory_bytes": inf, "recompute": None}
L8, L70, L405 = (make().config for make in (search_scale.llama_8b, search_scale.llama_70b, search_scale.llama_405b))
QUESTIONS = {
    "8b on (32, 8), operators": Question(L8, 128, 8192, "h100-32x8", 4, {"precision": MASTERS, **ALONE}),
    "8b on 8": Question(L8, 8, 8192, "h100-1x8", 4, {"precision": MASTERS}),
    "70b on 256, stages": Question(L70, 256, 8192, "h100-32x8", 15, {"precision": MASTERS, "stages": "auto"}),
    "405b on 16384, stages": Question(L405, 2048, 8192, "h100-2048x8", 25, {"precision": MASTERS, "stages": "auto"}),
    "mixtral on 64, fits": Question(mixtral(), 256, 4096, "h100-8x8", 15, {"precision": MASTERS}, "fits"),
    "13b on 8 x 24 GB": Question(llama_13b(), 8, 4096, "a100-80-1x8", 12, {"memory_bytes": 24e9}),
    "deepseek-v3 on 2048, stages": Question(
        DeepseekV3Config(use_cache=False), 15360, 4096, "h100-256x8", 60, {"precision": MASTERS, "stages": "auto"}
    ),
}


class Listener(logging.Handler):
    """Notes CPU seconds of the first verdict since the capture, and what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.took, self.verdict = 0.0, 0.0, ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().partition(": ")[2]
        if text == "first verdict":
            self.begun = time.process_time()
        elif self.begun and not self.verdict:
            self.took, self.verdict = time.process_time() - self.begun, text


def cpu_seconds() -> float:
    """The CPU seconds of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def megabytes() -> float:
    """The most memory that this process, or one that it started, has held so far."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def ask(name: str, folder: str) -> dict[str, Any]:
    """The figures of a question, in a process of its own."""
    os.environ["SHARDWISE_CACHE"] = folder
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logger, listener = logging.getLogger("shardwise.progress"), Listener()
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    logger.propagate, progress.LINE_SECONDS = False, 0.0
    question = QUESTIONS[name]
    question.module()  # imports what the model needs
    cpu, wall = cpu_seconds(), time.monotonic()
    plan, refused = question.answer()
    cpu, wall = cpu_seconds() - cpu, time.monotonic() - wall
    found = {"cpu": cpu, "wall": wall, "mb": megabytes(), "first": listener.took, "verdict": listener.verdict}
    if plan is None:
        return {**found, "text": refused, "answer": refused.partition("\n")[0], "gap": ""}
    step, num_bytes = figures(plan) or (0.0, 0.0)
    gap = None if plan.predicted is None else plan.predicted.optimality_gap
    what = f"{len(plan.stages)} stages, " if plan.is_pipeline else ""
    answer = f"{what}{plan.stages[0].mesh}: step {step:.4g} s, {num_bytes / 2**30:.1f} GiB"
    return {**found, "text": plan.to_json(), "answer": answer, "gap": "" if gap is None else f"{gap:.2%}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(map(repr, QUESTIONS))}, or of search_scale.py")
    parser.add_argument("--growth", action="store_true")
    chosen = parser.parse_args()
    if chosen.growth or set(chosen.cases) & search_scale.CASES.keys():
        search_scale.main()
        return
    names = ("case", "CPU s", "target", "wall s", "gap", "MB", "verdict s", "second s", "same")
    table = Table(title="from the module to the answer")
    for name in names:
        table.add_column(name, justify="left" if name == "case" else "right")
    console, lines = Console(width=200), []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in chosen.cases or QUESTIONS:
            with tempfile.TemporaryDirectory() as folder:
                first, second = (pool.submit(ask, name, folder).result() for _ in range(2))
            row = [
                name, f"{first['cpu']:.1f}", f"{QUESTIONS[name].target:g}", f"{first['wall']:.1f}", first["gap"],
                f"{first['mb']:.0f}", f"{first['first']:.2f}", f"{second['cpu']:.2f}",
                "yes" if first["text"] == second["text"] else "NO",
            ]  # fmt: skip
            table.add_row(*row)
            lines += [f"{name}: {first['answer']}", f"  first verdict: {first['verdict'] or 'the refusal itself'}"]
            console.print("  ".join(row), f"(load {os.getloadavg()[0]:.1f})", *lines[-2:], sep="\n", style="dim")
    console.print(table)
    print(*lines, sep="\n")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
