"""Published settings of large trainings beside the plans that are found: ``make bench-known-answers``.

Of every case the published setting (stages, mesh of a stage, micro-batch, schedule, recompute) is priced: the search
chooses what it leaves open, so that it is the best plan of that setting. Then ``stages="auto"`` chooses freely for the
same model, devices and batch. Printed are published seconds of a step, both predictions, CPU seconds of planning and
the peak memory of the process. No device is needed; every case runs in a process of its own, and takes minutes.

Seconds of Llama 3 are those in which its model FLOPs (products, of causal attention half) are done at the published
rate. Sources stand beside the cases.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import shardwise as sw


@dataclass(frozen=True)
class Case:
    """``published``: seconds of a step, from ``source``; ``setting``: arguments of ``sw.plan`` that fix it."""

    config: LlamaConfig | GPT2Config
    cluster: str
    batch: int
    length: int
    published: float
    setting: Mapping[str, Any]
    source: str


def llama(layers: int, hidden: int, ffn: int, heads: int, length: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, length: int = 2048) -> GPT2Config:
    return GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocab, n_positions=length, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def at_rate(config: LlamaConfig, batch: int, length: int, num_gpus: int, tflops: float) -> float:
    """Seconds in which so many GPUs do the products of a step."""
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    layer = 2 * width**2 + 2 * width * config.num_key_value_heads * head + 3 * width * config.intermediate_size
    products = 2 * (config.num_hidden_layers * layer + width * config.vocab_size)
    attention = 2 * config.num_hidden_layers * length * width  # half of what sees all keys
    return 3 * (products + attention) * batch * length / (num_gpus * tflops * 1e12)


LLAMA_405B = llama(126, 16384, 53248, 128, 8192)
# How many stages a place had is not published: with eight, each has one of the 126 layers, the embedding or the head.
LLAMA_3 = "Llama Team 2024 (arXiv:2407.21783), table 4, section 3.3.2 (interleaved)"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv:2205.05198), table 5, full recompute"
CASES = {
    "llama3-405b-16384": Case(
        LLAMA_405B, "h100-2048x8", 2048, 8192, at_rate(LLAMA_405B, 2048, 8192, 16384, 400),
        {"stages": 128, "schedule": "Interleaved1F1B:8", "mesh": sw.Mesh(dp=128, tp=8), "micro_batch": 128}, LLAMA_3,
    ),
    "llama3-405b-8192": Case(
        LLAMA_405B, "h100-1024x8", 2048, 8192, at_rate(LLAMA_405B, 2048, 8192, 8192, 430),
        {"stages": 128, "schedule": "Interleaved1F1B:8", "mesh": sw.Mesh(dp=64, tp=8), "micro_batch": 64}, LLAMA_3,
    ),
    "gpt3-175b-64": Case(
        gpt(96, 12288, 96), "a100-80-8x8", 64, 2048, 18.13,
        {"stages": 24, "schedule": "Interleaved1F1B:3", "mesh": sw.Mesh(tp=8), "micro_batch": 1, "recompute": "full"},
        KORTHIKANTI,
    ),
    "turing-530b-280": Case(
        gpt(105, 20480, 128), "a100-80-35x8", 280, 2048, 49.05,
        {"stages": 105, "schedule": "Interleaved1F1B:3", "mesh": sw.Mesh(tp=8), "micro_batch": 1, "recompute": "full"},
        KORTHIKANTI,
    ),
    "megatron-1t-512": Case(
        gpt(128, 25600, 160), "a100-80-64x8", 512, 2048, 94.42,
        {"stages": 64, "mesh": sw.Mesh(tp=8), "micro_batch": 1, "recompute": "full"}, KORTHIKANTI,
    ),
    "bloom-176b-384": Case(
        gpt(70, 14336, 112, 250880), "a100-80-48x8", 2048, 2048, 6.021e18 / (384 * 156e12),
        {"stages": 12, "mesh": sw.Mesh(dp=8, tp=4), "micro_batch": 16, "recompute": "full", "zero": 1},
        "BigScience 2022 (arXiv:2211.05100), 156 TFLOP/s a GPU, recomputed forward counted as Narayanan et al. 2021 do",
    ),
    "mpt-70b-64": Case(
        gpt(80, 8192, 64, 50368), "h100-8x8", 2048, 2048, 63.076,
        {"mesh": sw.Mesh(dp=64), "micro_batch": 512, "zero": 3, "recompute": "full"},
        "mosaicml/llm-foundry, scripts/train/benchmarking: 70B with FSDP on 64 H100",
    ),
}  # fmt: skip


def planned(case: Case, setting: Mapping[str, Any]) -> tuple[sw.Plan, float]:
    """A plan, and the CPU seconds that it took."""
    with torch.device("meta"):
        kind = LlamaForCausalLM if isinstance(case.config, LlamaConfig) else GPT2LMHeadModel
        model: PreTrainedModel = kind(case.config)
        ids = torch.zeros(case.batch, case.length, dtype=torch.int64)
    start = time.process_time()
    plan = sw.plan(
        model, (), sw.Cluster.load(case.cluster), kwargs={"input_ids": ids, "labels": ids},
        precision=sw.Precision(compute=torch.bfloat16), global_batch=case.batch, **setting,
    )  # fmt: skip
    return plan, time.process_time() - start


def seconds_of(plan: sw.Plan) -> float:
    if plan.pipeline is not None:
        return plan.pipeline.step_seconds
    return plan.prediction.planned_seconds


def run(name: str, only_published: bool) -> str:
    """A case, as a row of the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = CASES[name]
    cells = [name, f"{case.published:.2f}"]
    for setting in (case.setting, *([] if only_published else [{"stages": "auto"}])):
        try:
            plan, took = planned(case, setting)
        except sw.ShardwiseError as error:
            cells += [f"refused: {str(error).splitlines()[0]}", ""]
            continue
        what = (
            f"{len(plan.stages)} stages, {plan.schedule or 'none'}, {plan.stages[0].mesh}, {plan.micro_batches} passes"
        )
        cells += [f"{seconds_of(plan):.2f} ({what})", f"{took:.0f}"]
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return "| " + " | ".join([*cells, f"{held:.0f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--only-published", action="store_true", help="price the published settings, search no others")
    chosen = parser.parse_args()
    print("| case | published s | its setting, predicted s | CPU s | the plan found, predicted s | CPU s | MB |")
    print("|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in chosen.cases or CASES:
            print(pool.submit(run, name, chosen.only_published).result(), flush=True)
    for name in chosen.cases or CASES:
        print(f"{name}: {CASES[name].source}")


if __name__ == "__main__":
    main()
