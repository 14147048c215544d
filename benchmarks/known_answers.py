"""Published settings of large trainings beside the plans that are found: ``make bench-known-answers``.

Of every case the published setting (stages, mesh of a stage, micro-batch, schedule, recompute, Megatron's columns and
rows where it used them) is priced, with attention as its software computed it and on its network: the search chooses
what is left open, so that it is the best plan of that setting. Then ``stages="auto"`` chooses freely for the same
model, devices and batch, on meshes among which the published one is. Printed are published seconds of a step, both
predictions, CPU seconds of planning and the peak memory of the process. No device is needed; every case runs in a
process of its own, and takes minutes.

Such a plan is not run as the published software ran it. What is compared with a published step of Megatron is therefore
the same setting as ``published_prices`` prices it: whole layers are computed again (a plan leaves out the product at a
layer's end and its all-reduce, which nothing reads), messages wait, gradients are added up in the dtype of that
software. Nor has a plan DeepSeek's own schedule and exchange (``dual_pipe.py``). Of other software, whose kernels are
fused too, the plan's step is compared as it runs by default: compiled on CUDA. The eager one stands beside it.

``--data FILE`` (``published_runs.py``): predictions are multiplied by the factor of the case's hardware and software,
where the file has four groups of its runs. It comes from every fourth of these groups, none of which is a case here.

Seconds of Llama 3 and Mixtral are those in which their model FLOPs (products, of Llama's causal attention half) are
done at the published rate; of the other mixtures of experts those of the published tokens a second, or GPU hours. Where
products were computed in float8, they have the price of it. Sources stand beside the cases.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from math import exp, gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

sys.path.insert(0, str(Path(__file__).parent))

from dual_pipe import DualPipe, Layer, events_of
from published_hardware import cluster_of
from published_memory import MEGATRON, WHOLE, Gpt, Shape
from published_prices import seconds_of as priced
from published_prices import unpriced
from published_rows import Row, read
from published_runs import Factor, Found, group_of, quarter
from published_software import FLASH_1_ON_HOPPER, Software, attending

import shardwise as sw
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.plans.price_scope import default_seconds, figures
from shardwise.plans.schedule import schedule_of

SELENE = ("A100-80GB", "NVLink3; 8x HDR200 IB (Selene)")
JEAN_ZAY = ("A100-80GB", "NVLink 4 inter-GPU connects; 4x Omni-Path 100 per node (Jean Zay)")
COMPOSER = ("H100-80GB", "not stated")
META = ("H100-80GB", "8x 400 Gb/s RoCE")
INFINIBAND = ("H100-80GB", "8x 400 Gb/s InfiniBand")
DEEPSEEK = ("H800-80GB", "8x 400 Gb/s InfiniBand")


PLAIN = Software()
DROPPING = Software(dropout=True)


@dataclass(frozen=True)
class Case:
    """``model``: a ``Shape`` is Megatron's GPT, whose batch and sequence are the case's; ``hardware``: as published
    runs name GPU and interconnect; ``published``: seconds of a step, from ``source``; ``setting``: arguments of
    ``sw.plan`` that fix it; ``software``: what of it attention and dropout are;
    ``framework``: Megatron's, whose steps are priced as rows of that file (empty: another), in ``precision``;
    ``products``: the dtype of the rate of products, if it is another; ``reached``: nodes that a token goes to in
    DualPipe (0: another schedule)."""

    model: PretrainedConfig | Shape
    hardware: tuple[str, str]
    num_gpus: int
    batch: int
    length: int
    published: float
    setting: Mapping[str, Any] = field(compare=False)
    source: str
    software: Software = PLAIN
    framework: str = ""
    precision: str = "fp16"
    products: str = ""
    reached: int = 0

    @property
    def row(self) -> Row:
        """The published setting as a row of published runs (of a framework that has such)."""
        assert isinstance(self.model, Shape), "rows of Megatron are GPT"
        sizes, width = dict(self.setting["mesh"].axes), self.model.width
        vpp = schedule_of(self.setting.get("schedule", "1F1B")).stages_per_place
        dp = sizes.get("dp", 1)
        return {
            "arch": {
                "layers": self.model.layers, "hidden": width, "heads": self.model.heads, "kv_heads": self.model.heads,
                "ffn": 4 * width, "vocab": self.model.vocab,
            },
            "seq": self.length, "micro_batch": self.setting["micro_batch"] // dp, "global_batch": self.batch,
            "gpu": self.hardware[0], "gpus": self.num_gpus, "gpus_per_node": 8, "interconnect": self.hardware[1],
            "tp": sizes["tp"], "pp": self.setting["stages"] // vpp, "dp": dp, "vpp": vpp,
            "zero": self.setting.get("zero", 0), "recompute": self.setting["recompute"], "precision": self.precision,
            "framework": self.framework,
        }  # fmt: skip

    @property
    def cluster(self) -> sw.Cluster:
        cluster = cluster_of(self.hardware[0], self.num_gpus, 8, self.hardware[1])
        cluster = cluster.with_products(self.products) if self.products else cluster
        return replace(cluster, device=attending(cluster.device, self.software.attention))

    @property
    def place(self) -> sw.Cluster:
        """The devices of the published mesh."""
        return self.cluster.with_devices(self.setting["mesh"].num_devices)

    @property
    def free(self) -> dict[str, Any]:
        """The arguments of a search that chooses all of it. Axes of its meshes lie inside levels, and the published
        mesh may need more of these than are tried where nothing is said: 8 x 4 devices of nodes of 8 are 4 nodes,
        pairs and fours."""
        left = [level.size for level in self.place.levels]
        pieces = 0
        for _, size in reversed(self.setting["mesh"].axes):
            for level, room in enumerate(left):
                taken = gcd(size, room)
                pieces, size, left[level] = pieces + (taken > 1), size // taken, room // taken
        return {"stages": "auto", "max_mesh_axes": max(2, pieces)}

    @property
    def group(self) -> tuple[Any, ...]:
        """As ``published_runs`` groups its rows."""
        if isinstance(self.model, Shape):
            sizes = self.model.layers, self.model.width
        else:
            sizes = self.model.num_hidden_layers, self.model.hidden_size
        return *sizes, self.num_gpus, self.hardware[0], self.length

    def module(self) -> tuple[nn.Module, Any]:
        """The model in meta tensors, and the arguments of ``sw.plan`` that say its inputs."""
        with torch.device("meta"):
            ids = torch.zeros(self.batch, self.length, dtype=torch.int64)
            if not isinstance(self.model, Shape):
                module = AutoModelForCausalLM.from_config(self.model)
                return module, {"example_inputs": (), "kwargs": {"input_ids": ids, "labels": ids}}
            module = Gpt(replace(self.model, batch=self.batch, sequence=self.length))
        for part in module.modules():
            if isinstance(part, nn.Dropout) and not self.software.dropout:
                part.p = 0.0
        return module, {"example_inputs": (ids, ids)}


def llama(layers: int, hidden: int, ffn: int, heads: int, length: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip


def gpt(layers: int, width: int, heads: int, vocab: int = 51200, *, scores: bool = True) -> Shape:
    return Shape(width, heads, layers, 0, 0, scores, False, vocab)


def at_rate(
    config: LlamaConfig | MixtralConfig, batch: int, length: int, num_gpus: int, tflops: float, seen: float = 0.5
) -> float:
    """Seconds in which so many GPUs do the products of a step. ``seen``: the share of the scores that count."""
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    experts = config.num_experts_per_tok if isinstance(config, MixtralConfig) else 1
    network = 3 * width * config.intermediate_size * experts
    layer = 2 * width**2 + 2 * width * config.num_key_value_heads * head + network
    products = 2 * (config.num_hidden_layers * layer + width * config.vocab_size)
    attention = 4 * seen * config.num_hidden_layers * length * width
    return 3 * (products + attention) * batch * length / (num_gpus * tflops * 1e12)


def llama_3(num_gpus: int, dp: int, tflops: float, cp: int = 1) -> Case:
    """16 places; a step has 16 Mi tokens."""
    length = 8192 * cp
    batch, config = 2048 // cp, llama(126, 16384, 53248, 128, length)
    mesh = sw.Mesh(dp=dp, cp=cp, tp=8) if cp > 1 else sw.Mesh(dp=dp, tp=8)
    # How many stages a place had is not published: with eight, each has one of the 126 layers, the embedding or the
    # head.
    setting = {"stages": 128, "schedule": "Interleaved1F1B:8", "mesh": mesh, "micro_batch": dp}
    source = "Llama Team 2024 (arXiv:2407.21783), table 4, section 3.3.2 (interleaved)"
    return Case(
        config, META, num_gpus, batch, length, at_rate(config, batch, length, num_gpus, tflops), setting, source
    )


def mixtral(num_gpus: int, batch: int, tflops: float, strategies: Mapping[str, str] | None = None) -> Case:
    """A sequence per device and pass; the published run divided the experts of a layer among the devices of a node."""
    length, places = 4096, 4
    config = MixtralConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=length, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    devices = num_gpus // places
    setting = {
        "stages": 32, "schedule": "Interleaved1F1B:8", "mesh": sw.Mesh(dp=devices // 8, ep=8), "micro_batch": devices,
        "strategies": strategies,
    }  # fmt: skip
    source = "NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md (022bcb5): mapping of v0.8, rate of v0.9"
    published = at_rate(config, batch, length, num_gpus, tflops, seen=1.0)  # as Megatron counts
    return Case(config, INFINIBAND, num_gpus, batch, length, published, setting, source)


def at_tokens(
    config: PretrainedConfig, hardware: tuple[str, str], num_gpus: int, batch: int, tokens: float,
    setting: Mapping[str, Any], source: str, products: str = "",
) -> Case:  # fmt: skip
    """A mixture of experts on sequences of 4,096, whose step has the published ``tokens`` a second and GPU."""
    length = 4096
    published = batch * length / (num_gpus * tokens)
    return Case(config, hardware, num_gpus, batch, length, published, setting, source, products=products)


def deepseek_v3() -> Case:
    """16 places, experts over 8 nodes, no tensor parallelism, ZeRO 1. A plan has stages in 1F1B and computes layers
    again; DualPipe hides the exchange behind another micro-batch and keeps less than a layer's products in float8.
    Imbalance is what a bias leaves (``shardwise.rules.keyed_rows.IMBALANCE``)."""
    setting = {
        "stages": 16, "mesh": sw.Mesh(dp=2, ep=64), "micro_batch": 128, "zero": 1, "recompute": "full",
        "imbalance": 1.04, "strategies": {"model.layers.*.mlp.experts": "K@ep"},
    }  # fmt: skip
    source = (
        "DeepSeek-AI 2024 (arXiv:2412.19437), sections 1, 3.2 and 4.2: 180 K H800 hours per trillion tokens, batches "
    )
    source += "of 15,360 sequences; sequences of a micro-batch are not published: one a device"
    tokens = 1e12 / (180e3 * 3600)
    config = DeepseekV3Config(use_cache=False)
    case = at_tokens(config, DEEPSEEK, 2048, 15360, tokens, setting, source, "f8")
    return replace(case, reached=config.topk_group)


BRIDGE = (
    "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md (00b7660), DGX-H100, container 25.11, tokens forced into"
)
BRIDGE += " balance"


def qwen3_235b() -> Case:
    """8 places of 4 stages, dp 16 and tp 2, whose 32 devices each have four experts of a layer."""
    config = Qwen3MoeConfig(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=1536, intermediate_size=12288, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    setting = {
        "stages": 32, "schedule": "Interleaved1F1B:4", "mesh": sw.Mesh(dp=16, tp=2), "micro_batch": 16, "imbalance": 1,
        "strategies": {"model.layers.*.mlp.experts": "K@(dp,tp)"},
    }  # fmt: skip
    source = f"{BRIDGE}; the table leaves the batch out, 2,048 assumed"
    return at_tokens(config, INFINIBAND, 256, 2048, 1575, setting, source, "f8")


def gpt_oss_120b() -> Case:
    """4 places, dp 2 and ep 8, four sequences a device and pass. Experts have biases, which the search brings there."""
    setting = {
        "stages": 4, "mesh": sw.Mesh(dp=2, ep=8), "micro_batch": 64, "imbalance": 1,
        "strategies": {"model.layers.*.mlp.experts": "e@ep"},
    }  # fmt: skip
    return at_tokens(GptOssConfig(use_cache=False), INFINIBAND, 64, 512, 5630, setting, BRIDGE)


# Megatron's splits without sequence parallelism, as its runs of 2022 and before had them.
SPLITS = {**MEGATRON, "*.before": "I@tp", "*.between": "I@tp", "tokens": "v@tp"}


def korthikanti(model: Shape, num_gpus: int, published: float, setting: Mapping[str, Any]) -> Case:
    """A micro-batch of one sequence; a step has as many as GPUs."""
    source = "Korthikanti et al. 2022 (arXiv:2205.05198), table 5, full recompute"
    fixed = {"mesh": sw.Mesh(tp=8), "micro_batch": 1, "recompute": "full", "strategies": {**SPLITS, **WHOLE}}
    setting = {**fixed, **setting}
    return Case(model, SELENE, num_gpus, num_gpus, 2048, published, setting, source, DROPPING, "Megatron-LM")


CASES = {
    "llama3-405b-16384": llama_3(16384, 128, 400),
    "llama3-405b-8192": llama_3(8192, 64, 430),
    "llama3-405b-131k": llama_3(16384, 8, 380, cp=16),
    "mixtral-8x7b-64": mixtral(64, 256, 468),
    "mixtral-8x7b-64-travelling": mixtral(64, 256, 468, {"model.layers.*.mlp.experts": "K@ep"}),
    "deepseek-v3-2048": deepseek_v3(),
    "qwen3-235b-256": qwen3_235b(),
    "gpt-oss-120b-64": gpt_oss_120b(),
    "gpt3-175b-64": korthikanti(gpt(96, 12288, 96), 64, 18.13, {"stages": 24, "schedule": "Interleaved1F1B:3"}),
    "turing-530b-280": korthikanti(gpt(105, 20480, 128), 280, 49.05, {"stages": 105, "schedule": "Interleaved1F1B:3"}),
    "megatron-1t-512": korthikanti(gpt(128, 25600, 160), 512, 94.42, {"stages": 64}),
    "bloom-176b-384": Case(
        gpt(70, 14336, 112, 250880), JEAN_ZAY, 384, 2048, 2048, 104.50,
        {
            "stages": 12, "mesh": sw.Mesh(dp=8, tp=4), "micro_batch": 16, "recompute": "full", "zero": 1,
            "strategies": SPLITS,
        },
        "bigscience-workshop/bigscience, train/tr11-176B-ml: chronicles-prequel.md, 02-28, 176B with 112 heads (150 "
        "TFLOP/s; the 156 of arXiv:2211.05100 are another model's); its script sets no dropout: Megatron's 0.1",
        DROPPING, "Megatron-DeepSpeed, 1F1B", "bf16 (fp32 grad accumulation)",
    ),
    "mpt-70b-64": Case(
        gpt(80, 8192, 64, 50368, scores=False), COMPOSER, 64, 2048, 2048, 63.076,
        {"mesh": sw.Mesh(dp=64), "micro_batch": 512, "zero": 3, "recompute": "full"},
        "mosaicml/llm-foundry, scripts/train/benchmarking: 70B with FSDP on 64 H100",
        Software(attention=FLASH_1_ON_HOPPER),
    ),
}  # fmt: skip


def planned(case: Case, setting: Mapping[str, Any]) -> tuple[sw.Plan, float]:
    """A plan, and the CPU seconds that it took."""
    module, inputs = case.module()
    start = time.process_time()
    plan = sw.plan(
        module, cluster=case.cluster, global_batch=case.batch,
        precision=sw.Precision(compute=torch.bfloat16),
        optimizer="adamw fused", search="dynamic_programming", **inputs, **setting,
    )  # fmt: skip
    return plan, time.process_time() - start


def in_dual_pipe(case: Case) -> float:
    """Return the seconds of a setting of experts in DualPipe, from the second of two layers."""
    setting = {name: value for name, value in case.setting.items() if name != "stages"} | {"recompute": "none"}
    assert isinstance(case.model, PretrainedConfig), "a model of transformers"
    mesh, config = setting["mesh"], copy(case.model)
    config.update({"num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 1024})
    small = replace(case, model=config, num_gpus=mesh.num_devices, batch=mesh.num_devices)
    module, inputs = small.module()
    plan, _ = planned(small, setting)
    graph = capture(module, inputs["example_inputs"], inputs["kwargs"], precision=plan.precision).graph
    passes = case.batch // mesh.num_devices
    events = events_of(program_of(plan, graph, training=True), small.cluster, mesh, passes)
    nodes = dict(mesh.axes)["ep"] // case.place.levels[0].size
    layers, width = case.model.num_hidden_layers, config.hidden_size
    pipe = DualPipe(case.setting["stages"], layers, passes, case.length, width, nodes, case.reached)
    return pipe.seconds(Layer.of(events, "layers.1.", 2), case.cluster)


def factor_of(case: Case, rows: Sequence[Row]) -> float:
    """Measured / predicted of the hardware and software of a case; 1 where there are too few groups of its runs."""
    own = [row for row in rows if not unpriced(row) and (row["gpu"], row.get("interconnect")) == case.hardware]
    groups = quarter({group_of(row) for row in own}, {other.group for other in CASES.values()})
    return exp(Factor.of([Found(row, priced(row)) for row in own if group_of(row) in groups], groups).center)


def run(name: str, only_published: bool, factor: float) -> str:
    """A case, as a row of the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = CASES[name]
    cells = [name, f"{case.published:.2f}"]
    for setting in (case.setting, *([] if only_published else [case.free])):
        try:
            plan, took = planned(case, setting)
        except sw.ShardwiseError as error:
            cells += [f"refused: {str(error).splitlines()[0]}", *[""] * (3 if setting is case.setting else 1)]
            continue
        what = (
            f"{len(plan.stages)} stages, {plan.schedule or 'none'}, {plan.stages[0].mesh}, {plan.micro_batches} passes"
        )
        seconds = default_seconds(plan)
        cells.append(f"{seconds:.2f}; eager {(figures(plan) or (0,))[0]:.2f} ({what})")
        if setting is case.setting:
            there = priced(case.row) if case.framework else in_dual_pipe(case) if case.reached else seconds
            cells += [f"{there:.2f}", f"{factor:.2f}: {factor * there / case.published - 1:+.0%}"]
        cells.append(f"{took:.0f}")
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return "| " + " | ".join([*cells, f"{held:.0f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--only-published", action="store_true", help="price the published settings, search no others")
    parser.add_argument("--data", type=Path, help="published_runs.json, for the factors of hardware and software")
    chosen = parser.parse_args()
    rows = [] if chosen.data is None else read(chosen.data)
    print(
        "| case | published s | its setting, predicted s | as its software runs it | factor: error | CPU s "
        "| the plan found, predicted s | CPU s | MB |\n|---|---|---|---|---|---|---|---|---|"
    )
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in chosen.cases or CASES:
            factor = factor_of(CASES[name], rows)
            print(pool.submit(run, name, chosen.only_published, factor).result(), flush=True)
    for name in chosen.cases or CASES:
        print(f"{name}: {CASES[name].source}")


if __name__ == "__main__":
    main()
