"""The benchmark of published runs: every row is priced with its settings or counted, and judged as it says."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from math import exp, log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raising import raises

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ARCH = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 512, "gated_mlp": False}
GATED = {**ARCH, "gated_mlp": True, "kv_heads": 2}
EXPERTS = {**GATED, "experts": 8, "active_experts": 2}
TINY = {
    "id": "tiny", "family": "tiny", "framework": "Megatron-DeepSpeed", "gpu": "A100-80GB", "gpus": 4, "tp": 2, "pp": 2,
    "dp": 1, "zero": 0, "seq": 64, "micro_batch": 2, "global_batch": 16, "recompute": "full", "precision": "fp16",
    "interconnect": "NVLink3", "status": "ok", "step_time_s": 1.0, "notes": None,
    "arch": ARCH,
}  # fmt: skip


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_prices")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_runs")


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_defaults")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_memory")


def test_a_layer_takes_its_kernels_or_what_the_host_needs_to_start_them(prices: ModuleType) -> None:
    busy = prices.Half(2e-3, 20)
    assert busy.seconds(1e-6) == 2e-3
    assert busy.seconds(1e-3) == pytest.approx(20e-3)


@pytest.mark.long
def test_small_work_is_as_fast_as_its_host_and_large_work_is_not(prices: ModuleType) -> None:
    small = prices.pass_of(TINY, 2)
    twice = prices.pass_of(TINY, 4)
    started = small.forward / prices.Software.of(TINY).launch
    assert started == pytest.approx(round(started))  # so many kernels and messages
    assert 15 < started < 40
    assert twice.forward == small.forward  # not one kernel more
    wide = {**TINY, "seq": 2048, "arch": {**TINY["arch"], "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32}}
    wide["arch"] = dict(wide["arch"])
    assert prices.pass_of(wide, 4).forward > 1.5 * prices.pass_of(wide, 2).forward


def test_passes_and_stages_add_up(prices: ModuleType) -> None:
    """One pass more takes the slowest stage once more; one pass takes all stages. The first has the embedding, the last
    the head."""
    steps = [prices.seconds_of({**TINY, "global_batch": 2 * passes}) for passes in (2, 3, 4)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    own = prices.pass_of(TINY, 2)
    layer = 2 * own.forward + own.backward
    assert own.head > own.embedding > 0
    sent = prices.terms_of(TINY)["stages"] / 8
    assert steps[1] - steps[0] == pytest.approx(2 * layer + own.head + sent, rel=0.02)
    assert steps[0] > 2 * (2 * layer + own.head) + 2 * layer + own.embedding  # the other stage once


def test_stages_of_their_own_are_read_from_the_row(prices: ModuleType) -> None:
    notes = "plan: layer_partitions [3, 1], devices [[1, 2], [1, 2]], GA steps 8, per-stage [mbs,dp,tp] "
    notes += "[[2, 2, 1, 0, 0, 1], [2, 2, 1, 0, 0, 0]]; per-stage peak"
    row = {**TINY, "recompute": "per stage: [2, 0]", "notes": notes, "tp": 1, "dp": 2}
    assert prices.stages_of(row) == [prices.Stage(3, 2, 2, 2, (0, 0, 1)), prices.Stage(1, 0, 2, 2, (0, 0, 0))]
    assert prices.unpriced(row) == ""
    for other in (None, notes.replace("[3, 1]", "[3, 2]"), notes.replace("[2, 2, 1", "[0, 2, 1", 1), "nothing"):
        assert prices.unpriced({**row, "notes": other}) == "stages that differ and are not listed"
    assert prices.unpriced({**row, "notes": None}) == "stages that differ and are not listed"
    assert prices.stages_of(TINY) == [prices.Stage(2, 2, 2, 1)] * 2
    uneven = {**TINY, "arch": {**TINY["arch"], "layers": 3}}
    assert [stage.layers for stage in prices.stages_of(uneven)] == [2, 1], "the last stage has what is left"
    assert prices.stages_of({**TINY, "recompute": "selective(op)"})[0].again == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step_time_s": None}, "no seconds published"),
        ({"status": "oom"}, "ran out of memory: no seconds"),
        ({"gpu": "Z1"}, "no bundled device, nor one like it: Z1"),
        ({"step_time_s": float("nan")}, "step_time_s: no positive number"),
        ({"step_time_s": "1.0"}, "step_time_s: no positive number"),
        ({"step_time_s": -1.0}, "step_time_s: no positive number"),
        ({"status": "OK"}, "status: neither ok nor oom"),
        ({"seq": None}, "seq: not stated, and prices need it"),
        ({"framework": None, "arch": {**ARCH, "ffn": None}}, "framework, arch.ffn: not stated, and prices need it"),
        ({"seq": "64"}, "seq: no positive whole number"),
        ({"pp": 2.0}, "pp: no positive whole number"),
        ({"dp": True}, "dp: no positive whole number"),
        ({"interconnect": ["NVLink"]}, "interconnect: no text"),
        ({"zero": "3"}, "zero: neither 0, 1, 2, 3 nor per stage"),
        ({"zero": True}, "zero: neither 0, 1, 2, 3 nor per stage"),
        ({"dp": 2}, "tp x pp x dp x cp: not the number of GPUs"),
        ({"gpus": 14, "pp": 7}, "more stages than layers, embedding and head"),
        ({"recompute": "half"}, "recompute: not known: half"),
        ({"precision": "int8"}, "precision: not known: int8"),
        ({"arch": {**ARCH, "latent": 8}}, "a model of another kind than GPT and Llama: latent"),
        ({"arch": {**ARCH, "experts": 8}}, "experts, and an unknown number that a token meets"),
        (
            {"arch": {**EXPERTS, "experts": 6}, "ep": 4},
            "experts that ep does not divide, or more of it than GPUs of a stage",
        ),
        ({"arch": {**ARCH, "heads": 3, "kv_heads": 3}}, "a width that its heads do not divide"),
        ({"arch": {**ARCH, "kv_lora_rank": 8}}, "latent attention without the sizes of its heads"),
        ({"recompute": "per stage: [1,"}, "stages that differ and are not listed"),
        ({"ep": 4}, "ep of a model without experts"),
        ({"interconnect": "0 Gb/s per node"}, "interconnect: a network without bandwidth"),
        ({"arch": {**ARCH, "vocab": 1}}, "a vocabulary smaller than tp"),
    ],
)
def test_what_is_not_priced_has_a_reason(prices: ModuleType, change: dict[str, Any], why: str) -> None:
    assert prices.unpriced(TINY) == ""
    assert prices.unpriced({**TINY, **change}) == why


def test_what_a_row_leaves_open_is_its_software_s(defaults: ModuleType) -> None:
    """Defaults of each software, degrees from their product, seconds from tokens, sizes from the model's name."""
    whole = {**TINY, "vpp": 1, "cp": 1, "sequence_parallel": False}
    assert defaults.settings_of(whole) == [defaults.Setting(whole)]
    left_open = {
        **TINY,
        "model": "Llama 3 8B",
        "recompute": None,
        "micro_batch": None,
        "arch": None,
        "dp": None,
        "zero": None,
    }
    left_open |= {"tp": None, "step_time_s": None, "tokens_per_s_per_gpu": 128.0, "status": None}
    of = {
        name: defaults.settings_of({**left_open, "framework": name})
        for name in ("NeMo 25", "torchtitan", "Megatron-LM")
    }
    titan, nemo = of["torchtitan"][0].row, of["NeMo 25"]
    assert (titan["zero"], titan["recompute"], titan["micro_batch"]) == (3, "selective(op)", 1)
    assert (titan["tp"], titan["dp"], titan["arch"]["hidden"], titan["arch"]["kv_heads"]) == (1, 2, 4096, 8)
    assert titan["step_time_s"] == 16 * 64 / (128 * 4)
    assert {"recompute selective(op)", "arch.layers 32", "dp 2", "step_time_s 2"} <= {*of["torchtitan"][0].assumed}
    assert {(one.row["recompute"], one.row["micro_batch"], one.row["vpp"]) for one in nemo} >= {
        ("none", 1, 1),
        ("full", 8, 4),
    }
    told = [one.row["vpp"] == 1 and one.row["recompute"] == "none" for one in nemo]
    assert [one.is_default for one in nemo] == told
    assert {one.row["zero"] for one in nemo} == {1}
    assert {one.row["zero"] for one in of["Megatron-LM"]} == {0}
    split = defaults.settings_of({**TINY, "framework": "NeMo", "sequence_parallel": None})[0].row
    assert split["sequence_parallel"]
    assert defaults.settings_of({**TINY, "framework": "DeepSpeed ZeRO-2", "zero": None})[0].row["zero"] == 2
    synonyms = {**GATED, "num_experts": 8, "top_k": 2}
    assert defaults.settings_of({**TINY, "arch": synonyms})[0].row["arch"] == EXPERTS
    for stated, kind in (("selective", "selective(attention core)"), (True, "full"), (False, "none")):
        assert defaults.settings_of({**TINY, "recompute": stated})[0].row["recompute"] == kind


@pytest.mark.parametrize("kind", ["hardware (includes recompute forward)", "model (6N + 12 L d s per token)"])
def test_seconds_follow_from_flops_whose_formula_is_stated(defaults: ModuleType, kind: str) -> None:
    """A published row of GPT: 137 TFLOP/s of hardware and 3.528 s (Narayanan et al., 2021, table 1)."""
    arch = {"layers": 24, "hidden": 2304, "heads": 24, "kv_heads": 24, "ffn": 9216, "vocab": 51200, "gated_mlp": False}
    row = {
        **TINY,
        "arch": arch,
        "seq": 2048,
        "micro_batch": 16,
        "global_batch": 512,
        "gpus": 32,
        "tp": 1,
        "pp": 1,
        "dp": 32,
    }
    row |= {"step_time_s": None, "tflops_per_gpu": 137, "tflops_kind": kind}
    seconds = defaults.settings_of(row)[0].row["step_time_s"]
    assert seconds == pytest.approx(3.528 * (1 if "hardware" in kind else 3 / 4), rel=0.02)
    assert defaults.settings_of({**row, "tflops_kind": None})[0].row["step_time_s"] is None


def test_an_open_row_is_an_interval_over_what_fits(runs: ModuleType) -> None:
    """Its price is the middle of the settings that fit; the row as it is stated lies in the interval."""
    row = {**TINY, "framework": "Megatron-LM", "seq": 512, "tp": 1, "dp": 2, "recompute": "full", "micro_batch": 4}
    row["vpp"] = 1
    stated = runs.priced(row).found
    found = runs.priced({**row, "recompute": None, "micro_batch": None}).found
    assert stated.low == stated.high == 1
    assert found.low == pytest.approx(1 / found.high)
    assert found.seconds * found.low < stated.seconds <= found.seconds * found.high * 1.0001
    assert {text.split()[0] for text in found.assumed} == {"recompute", "micro_batch", "cp", "sequence_parallel"}
    wide = {**row, "arch": {**ARCH, "layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "ffn": 49152}}
    wide |= {"seq": 2048, "recompute": None, "gpus": 64, "tp": 8, "pp": 8, "dp": 1}
    full = runs.priced(wide)
    assert full.found.row["recompute"] == "full", "more does not fit"
    assert full.found.low == full.found.high == 1


def test_what_a_row_says_in_other_words_is_read(defaults: ModuleType) -> None:
    def read(**change: Any) -> list[dict[str, Any]]:
        return [setting.row for setting in defaults.settings_of({**TINY, "framework": "Megatron-LM", **change})]

    words = {
        "full (every layer)": "full",
        "selective(core_attn)": "selective(attention core)",
        "selective(layernorm)": "none",
        "selective (2)": "selective(op)",
    }
    for said, kind in words.items():
        assert {row["recompute"] for row in read(recompute=said)} == {kind}
    assert len({row["recompute"] for row in read(recompute="block, 2 layers")}) == 3, "not known: all is open"
    for said, stage in (("FSDP", 3), ("1 (distributed optimizer)", 1), (True, 1), (False, 0), ("n/a", 0)):
        assert read(zero=said)[0]["zero"] == stage
    names = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 192, "vocab_size": 512}
    arch = read(arch=names)[0]["arch"]
    assert (arch["layers"], arch["kv_heads"], arch["gated_mlp"]) == (4, 4, True), "a width that is not four times"
    assert read(arch={**ARCH, "vocab": None})[0]["arch"]["vocab"] == 50_257
    assert read(vpp=0)[0]["vpp"] == 1
    used = read(step_time_s=None, mfu=50, recompute="none")[0]
    assert used["step_time_s"] == pytest.approx(defaults._flops(used) * 16 * 64 / (0.5 * 312e12 * 4))
    assert read(step_time_s=None, mfu=50)[0]["step_time_s"] is None, "with or without the second forward"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("GPT3-175B", 175), ("GPT3-5B", 5), ("GPT3-20B", 20), ("GPT-18.4B", 18.4), ("GPT-1.3B", 1.3),
        ("Megatron 530B", 530), ("megatron-22B", 22), ("GPT-145.6B", 145.6), ("GPT-1008B", 1008),
        ("LLAMA2-7B", 7), ("llama 13b", 13), ("Llama 30B", 32.5), ("LLAMA2-70B", 69), ("LLAMA3_8B", 8),
        ("LLAMA3_70B", 70), ("LLAMA3.1_405B", 405), ("Llama-3.2 1B", 1.5), ("Nemotron-8B", 8.5), ("Nemotron-22B", 22),
        ("Nemotron-4 15B", 15.6), ("Nemotron-340B", 340), ("Mixtral 8x7B", 46.7), ("mixtral-8x22b", 141),
        ("Qwen2.5 14B", 14.8), ("Qwen2-72B", 72.7), ("Qwen3-8B", 8.2), ("Qwen3 32B", 32.8), ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235), ("GPT OSS 20B", 21), ("GPT OSS 120B", 117), ("DeepSeekV3", 671),
        ("DeepSeek-V2-Lite", 15.7),
    ],
)  # fmt: skip
def test_a_model_that_is_named_has_as_many_parameters(
    prices: ModuleType, defaults: ModuleType, name: str, billions: float
) -> None:
    row = {**TINY, "model": name, "arch": None, "tp": 1, "pp": 1, "dp": 4, "vpp": 1}
    arch = (row := defaults.settings_of(row)[0].row)["arch"]
    assert prices.unplanned(row) == ""
    ends = (2 if arch["gated_mlp"] or arch["vocab"] == 256_000 else 1) * arch["vocab"] * arch["hidden"]
    assert arch["layers"] * prices.parameters(row)[0] + ends == pytest.approx(billions * 1e9, rel=0.05)


def test_heads_and_groups_that_tp_does_not_divide_are_padded(prices: ModuleType) -> None:
    """GPT whose heads are as many as its groups, and four times as wide inside, is itself; any other is a Llama."""
    assert prices.sizes_of(TINY) is None
    assert prices.sizes_of({**TINY, "arch": {**ARCH, "ffn": 192}}).gated is False
    odd = prices.sizes_of({**TINY, "tp": 3, "arch": {**GATED, "ffn": 190}})
    assert (odd.heads, odd.kv_heads, odd.head_size, odd.width) == (6, 3, 16, 192)
    assert prices.sizes_of({**TINY, "tp": 8, "arch": GATED}).kv_heads == 8
    row = {**TINY, "tp": 3, "pp": 1, "gpus": 3, "arch": GATED, "recompute": "none"}
    assert prices.unpriced(row) == ""
    assert "heads: padded to what tp divides" in prices.approximated(row)
    assert prices.seconds_of(row) > 0


def test_latent_attention_and_windows_are_priced(prices: ModuleType) -> None:
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    row = {**TINY, "framework": "NeMo", "gpu": "H100", "pp": 1, "gpus": 2, "recompute": "none"}
    deep = {**row, "arch": {**EXPERTS, **latent}}
    assert prices.unpriced(deep) == ""
    assert "latent" in prices.approximated(deep)
    attention = 24 * 4 * 24 + 64 * 24 + 64 * (16 + 8) + 16 * 4 * (16 + 16) + 4 * 16 * 64
    layer = (attention + 2 * 64 + 64 * 8) / 2 + 3 * 64 * 256 * 8 / 2
    assert prices.parameters(deep)[0] == layer
    assert prices.seconds_of(deep) > 0
    near = {**row, "framework": "FSDP", "seq": 16_384, "arch": {**GATED, "window": 4096}}
    assert prices.Model.of(near, 2).attended == 2 / 4 - 1 / 16
    assert prices.pass_of(near, 2).forward < prices.pass_of({**near, "arch": GATED}, 2).forward


def test_a_gpu_that_is_not_bundled_has_its_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hardware = importlib.import_module("published_hardware")
    rows = importlib.import_module("published_rows")
    like = {"A100": "a100-80", "A100-SXM4-40GB": "a100-40", "MI325X": "mi300x", "NVIDIA B300": "gb300", "Gaudi2": ""}
    assert {name: hardware.device_named(name) for name in like} == like
    plain, other = (hardware.cluster_of(name, 8, 8, "") for name in ("MI300X", "MI355X"))
    assert other.device.peak_flops("bf16") == pytest.approx(2516e12)
    assert other.device.memory_bytes == 288e9 > plain.device.memory_bytes
    assert other.levels[0].bandwidth > plain.levels[0].bandwidth
    assert hardware.likened("MI300X") == ""
    assert "mi300x" in hardware.likened("MI355X")
    slower = hardware.cluster_of("A800-SXM4-80GB", 8, 8, "").levels[0]
    assert (slower.lines, slower.bandwidth < 229e9) == ((), True)
    assert [rows.node_of({**TINY, "gpus": gpus}) for gpus in (4, 12, 16)] == [4, 6, 8]


def test_embedding_and_head_may_count_as_layers(prices: ModuleType) -> None:
    stages = prices.stages_of({**TINY, "pp": 4, "arch": {**ARCH, "layers": 6}})
    assert [stage.layers for stage in stages] == [1, 2, 2, 1]
    assert prices.unplanned({**TINY, "pp": 3, "gpus": 6, "vpp": 2, "arch": ARCH}) == ""


def test_context_parallel_ranks_may_have_early_and_late_tokens(prices: ModuleType) -> None:
    row = {**TINY, "cp": 4, "framework": "NeMo", "gpu": "H100"}
    assert prices.Model.of(row, 2).blocks == 4
    assert prices.Model.of({**row, "framework": "torchtitan"}, 2).blocks == 7


def test_a_host_that_blocks_adds_what_it_takes(prices: ModuleType) -> None:
    """Where CUDA_LAUNCH_BLOCKING was set: on several nodes of Jean Zay."""
    assert prices.Half(2e-3, 20).seconds(1e-3, [1e-3, 1e-3], blocks=True) == pytest.approx(22e-3)
    there = {**TINY, "interconnect": "NVLink; 4x Omni-Path 100 (Jean Zay)", "gpus": 16, "dp": 4}
    assert prices.Software.of(there).blocks
    for other in (TINY, {**there, "gpus": 4, "dp": 1}, {**there, "framework": "Megatron-LM"}):
        assert not prices.Software.of(other).blocks
    blocked, free = (prices.pass_of({**there, "interconnect": text}, 2) for text in (there["interconnect"], "NVLink"))
    assert blocked.forward > free.forward
    assert blocked.backward > free.backward


def test_stages_send_both_ways_at_once_or_one_message_after_the_other(prices: ModuleType) -> None:
    """Where sequences are whole they are gathered when they arrive, as they were sent in parts."""
    alone, both = (
        prices.terms_of({**TINY, "framework": name})["stages"] for name in ("Megatron-DeepSpeed", "Megatron")
    )
    split = {**TINY, "framework": "Megatron", "sequence_parallel": True}
    assert alone > both > prices.terms_of(split)["stages"] > 0


def test_gradients_of_the_ends_are_added_up(prices: ModuleType) -> None:
    row = {**TINY, "arch": {**ARCH, "vocab": 51_200}}
    more = prices.terms_of(row)["gradients added"] / prices.terms_of(TINY)["gradients added"]
    small, large = (layer * 2 + end for layer, end in map(prices.parameters, (TINY, row)))
    assert more == pytest.approx(large / small)


def test_fsdp_copies_what_it_sends_and_composer_updates_in_eight_kernels(prices: ModuleType) -> None:
    row = {**TINY, "gpus": 8, "dp": 8, "tp": 1, "pp": 1, "zero": 3, "recompute": "none", "precision": "bf16"}
    pure, default = (
        prices.Software.of({**row, "framework": f"Composer, mp mode {mode}"}) for mode in ("PURE", "DEFAULT")
    )
    assert (pure.copied_bytes, default.copied_bytes) == (8, 18)
    titan = prices.Software.of({**row, "framework": "torchtitan"})
    assert pure.update_bytes > 3 * titan.update_bytes
    updates = [prices.terms_of({**row, "framework": name})["update"] for name in ("Composer", "torchtitan")]
    assert updates[0] > updates[1]


def test_recipes_send_beside_products_and_passes(prices: ModuleType) -> None:
    row = {**TINY, "gpu": "H100", "seq": 2048, "sequence_parallel": True, "recompute": "none", "dp": 4, "gpus": 16}
    row |= {"arch": {**ARCH, "hidden": 1024, "ffn": 4096, "heads": 8, "kv_heads": 8}}
    nemo, plain = (prices.terms_of({**row, "framework": name}) for name in ("NeMo", "Megatron-Core"))
    assert nemo["layers"] < plain["layers"]
    assert nemo["replicas"] < plain["replicas"]


def test_recipes_compute_as_few_layers_again_as_memory_asks_for(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**TINY, "framework": "NeMo", "gpu": "H100", "recompute": None, "vpp": 1, "dp": 1, "pp": 1, "gpus": 2}
    assert runs.priced(row).found.row["recompute"] == "none"
    free = {"none": 3.0, "full(of 25% of the layers)": 2.0}
    monkeypatch.setattr(runs, "peak_bytes", lambda setting: free.get(setting["recompute"], 1.0))
    monkeypatch.setattr(runs, "room", lambda setting: 1.5)
    half = runs.priced(row).found
    assert half.row["recompute"] == "full(of 50% of the layers)"
    assert half.low == 1 < half.high, "more of them is slower"


def test_experts_exchange_their_tokens(prices: ModuleType) -> None:
    """Exchanged are a token's rows once for each expert that it meets, there and back, forward and backward; a device
    has its share of the experts, and computes what a token meets."""
    experts = importlib.import_module("published_experts").Experts
    row = {**TINY, "arch": EXPERTS, "tp": 1, "pp": 1, "dp": 4, "gpus": 4, "ep": 4, "recompute": "none"}
    assert prices.unplanned(row) == ""
    own = experts.of(row)
    assert own.exchange_bytes(row) == 2 * 64 * 2 * 2 * 64
    assert own.computed_width == 2 * 256
    assert prices.parameters(row)[0] == 2 * 64 * 16 * 6 + 2 * 64 + 8 * 64 + 3 * 64 * 256 * 8 / 4
    dense = {**row, "ep": None, "arch": {**GATED, "ffn": 512}}
    alone = {**row, "ep": None}
    cluster = prices.cluster_of("A100-80GB", 4, 4, "NVLink3")
    layers, passes = 4, 2
    there, here = prices.terms_of(row), prices.terms_of(alone)
    more = sum(there[name] - here[name] for name in there if name not in ("replicas", "update", "gradients added"))
    assert there["replicas"] < here["replicas"], "no other device has these experts"
    sent = own.exchange_seconds(row, cluster) - experts.of(alone).exchange_seconds(alone, cluster)
    assert more == pytest.approx(2 * layers * passes * sent, rel=0.05)
    assert prices.seconds_of(alone) > prices.seconds_of(dense)


def test_experts_are_reduced_and_split_over_the_devices_that_have_them(
    prices: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two of sixteen devices in two nodes, over the network, where all others meet inside as well."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    held = importlib.import_module("published_bytes")
    row = {**TINY, "arch": EXPERTS, "tp": 1, "pp": 1, "dp": 16, "gpus": 16, "ep": 8, "recompute": "none", "zero": 1}
    experts = prices.Experts.of(row)
    assert experts.replicas(row) == 2
    cluster = prices.cluster_of("A100-80GB", 16, 8, "NVLink3")
    apart, together = prices.Moves.of_experts(row, cluster, experts), prices.Moves.of(row, cluster)
    assert apart.links.mesh.size_of(apart.axes) == 2
    assert apart.after_step(1e9) > 2 * together.after_step(1e9)
    numel, stage = 4 * experts.numel(64), held.stages_of(row)[0]
    assert held._state(row, stage, numel / 4, numel) == numel * (2 + 2 + 16 / 2), "DeepSpeed has four bytes more"


def test_approximations_are_said(prices: ModuleType) -> None:
    assert prices.approximated(TINY) == ""
    said = prices.approximated({**TINY, "precision": "fp8", "cp": 2, "gpu": "H100-96GB-HBM2e-500W"})
    assert all(word in said for word in ("fp8", "cp", "device"))
    assert prices.approximated({**TINY, "gpu": "A100-PCIE-40GB"}) == "device: an A100 SXM with its links"


def test_heads_that_tensor_cores_do_not_take_and_an_odd_vocabulary_are_dearer(prices: ModuleType) -> None:
    arch = {**TINY["arch"], "hidden": 4 * 1024, "heads": 4}
    wide = {**TINY, "tp": 1, "gpus": 2, "seq": 1024, "arch": arch}
    odd = {**wide, "arch": {**arch, "vocab": 511}}
    assert prices.pass_of(odd, 2).head > prices.pass_of(wide, 2).head
    heads = {**wide, "arch": {**arch, "hidden": 4 * 1020}}
    assert prices.pass_of(heads, 2).forward > prices.pass_of(wide, 2).forward


def test_two_gpus_on_a_switch_have_all_its_links(prices: ModuleType) -> None:
    import shardwise as sw
    from shardwise.costs.collectives import Links

    seconds = [
        Links(prices.cluster_of("V100-32GB", 2, 16, text), sw.Mesh(tp=2)).seconds("all_reduce", ("tp",), 2**28)
        for text in ("DGX-1", "NVSwitch (DGX-2)")
    ]
    assert seconds[0] > 5 * seconds[1]


def test_the_kernel_for_causal_scores_is_not_that_of_the_loss(prices: ModuleType) -> None:
    """Of scores in 16 bits it moves twice as much a second; attention reaches no more than the device's own part."""
    from shardwise.costs.collectives import Links
    from shardwise.costs.kernels import KernelWork

    software = prices.Software(fused=True)
    model = prices.Model(prices.Shape(64, 4, 1, 64, 1, True, False, 512), None, 1, "A100-80GB", 8, "", software)
    own = prices.OwnPrices(Links(model.cluster(), prices.sw.Mesh(tp=1)), "none", model=model)
    scores, loss = (own.kernel(KernelWork("softmax", num_bytes=1e9, dtype=dtype)) for dtype in ("bf16", "f32"))
    assert loss == pytest.approx(1.05 / 0.52 * scores, rel=0.01)
    l4 = prices.cluster_of("L4-24GB", 1, 8, "").device
    assert prices.attending(l4, (0.35, 0.35)).kernels["attention_backward"] == l4.kernels["attention_backward"] < 0.3


def row_of(layers: int, batch: int, ratio: float) -> dict[str, Any]:
    return {**TINY, "arch": {**TINY["arch"], "layers": layers}, "global_batch": batch, "step_time_s": ratio}


def test_factors_come_from_whole_groups_that_are_not_judged(runs: ModuleType) -> None:
    found = [runs.Found(row_of(layers, batch, 1.3), 1.0) for layers in range(10, 18) for batch in (1, 2, 3)]
    judged, used = runs.calibrated(found)
    assert used == 6
    assert len(judged) == 18
    assert all(one.factor == pytest.approx(1.3) and one.error < 1e-9 and one.inside for one in judged)
    few, used = runs.calibrated([one for one in found if one.row["arch"]["layers"] < 13])
    assert used == 0
    assert all(one.factor == 1 for one in few)


def test_settings_in_the_name_of_a_software_are_no_other_software(runs: ModuleType) -> None:
    named = ("Mist (flash_attn=True)", "Mist (flash_attn=False)", "Megatron-LM 2020", "Megatron-DeepSpeed, 1F1B")
    found = [runs.Found({**TINY, "framework": name}, 1.0).software[1] for name in named]
    assert found == ["Mist", "Mist", "Megatron-LM", "Megatron-DeepSpeed"]


def test_a_factor_for_what_is_judged_comes_from_other_groups(runs: ModuleType) -> None:
    found = [runs.Found(row_of(layers, 1, 1 + layers / 10), 1.0) for layers in range(10, 14)]
    groups = {one.group for one in found}
    judged = {found[0].group, found[1].group, found[2].group}
    assert runs.quarter(groups) == {found[0].group}
    assert runs.quarter(groups, judged) == {found[3].group}
    assert runs.quarter(groups, groups) == frozenset()
    assert runs.quarter(judged) == frozenset(), "too few"
    factor = runs.Factor.of(found, runs.quarter(groups, judged))
    assert exp(factor.center) == pytest.approx(2.3)
    assert factor.rows == 1
    assert runs.Factor.of(found, ()).center == 0


@pytest.mark.parametrize("spread", [0.05, 0.15])
def test_intervals_hold_nine_of_ten_where_groups_are_many(runs: ModuleType, spread: float) -> None:
    draw = random.Random(3)
    found = [
        runs.Found(row_of(layers, batch, exp(draw.gauss(log(1.2), spread))), 1.0)
        for layers in range(100, 300)
        for batch in range(4)
    ]
    judged, _ = runs.calibrated(found)
    assert sum(one.inside for one in judged) / len(judged) == pytest.approx(0.9, abs=0.04)


def test_every_row_is_a_figure_or_a_reason(tmp_path: Path) -> None:
    slow = {**TINY, "id": "another", "step_time_s": 2.0}
    without_memory = {**TINY, "id": "oom", "status": "oom", "step_time_s": None, "arch": {**ARCH, "layers": 10**7}}
    rows = [TINY, TINY, slow, {**TINY, "id": "no seconds", "step_time_s": None}, without_memory, {"family": "golden"}]
    rows += [3, None, {"family": "golden", "args": {}}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, str(BENCHMARKS / "published_runs.py"), "--data", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "| tiny | 2 of 5 |" in ended.stdout
    assert "| tiny | not: 1: the same row again |" in ended.stdout
    assert "| tiny | contradict each other: one setting, 1 to 2 s: tiny, another |" in ended.stdout
    assert "| 1 of 1; 0 of 3 that ran |" in ended.stdout, "the one that ran out of memory is said not to fit"
    assert "| (no family) | not: 2: no object |" in ended.stdout
    assert "| tiny | not: 1: no seconds published |" in ended.stdout
    assert "| golden | not: 1:" in ended.stdout


def test_a_stage_holds_its_states_and_its_passes_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of two layers for every pass in flight; 16 bytes of states a parameter, in parts with ZeRO."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    held = importlib.import_module("published_bytes")

    def first(**change: int) -> float:
        row = {**TINY, **change}
        return float(held._of_stage(row, 0, held.stages_of(row)[0]))

    assert first() - first(global_batch=2) == 2 * (2 * 2 * 64 * 64)
    layer, end = held.parameters(TINY)
    assert first(zero=1, dp=1) - first(zero=1, dp=2, gpus=8) == 16 / 2 * (2 * layer + end)


def test_norms_and_gates_in_one_kernel_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight values of the width and three of the gate's for a token, of as many heads of keys as of queries."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    held, prices = importlib.import_module("published_bytes"), importlib.import_module("published_prices")
    arch = {**GATED, "kv_heads": 4}
    row = {
        **TINY,
        "framework": "Mist (flash_attn=True)",
        "arch": arch,
        "tp": 1,
        "pp": 1,
        "gpus": 1,
        "recompute": "none",
    }
    eager = {**row, "framework": "FSDP"}
    fused, plain = (held._kept(one, prices.Model.of(one, 2)) for one in (row, eager))
    assert fused == 2 * (2 * 64) * (8 * 64 + 3 * 256)
    assert plain > 1.2 * fused
    split = {**row, "tp": 2, "gpus": 2, "framework": "NeMo", "gpu": "H100", "sequence_parallel": True}
    assert held._kept(split, prices.Model.of(split, 2)) == fused / 2


def test_scores_of_the_vocabulary_are_held_as_the_software_takes_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    held = importlib.import_module("published_bytes")
    row = {**TINY, "gpus": 2, "dp": 2, "tp": 1, "pp": 1, "zero": 3, "recompute": "none", "precision": "bf16"}
    torch, fused = (held.peak_bytes({**row, "framework": name}) for name in ("FSDP", "Composer"))
    assert torch - fused == (10 - 4) * 2 * 64 * 512


@pytest.mark.parametrize(("text", "said"), [("", "rows.json"), ("{}", "dict")])
def test_a_file_that_is_no_list_is_refused(runs: ModuleType, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with raises(SystemExit, said):
        runs.main(["--data", str(tmp_path / "rows.json")])


def test_no_rows_are_said(runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.json").write_text("[]")
    runs.main(["--data", str(tmp_path / "rows.json")])
    assert "no rows in " in capsys.readouterr().out


def test_runs_of_one_setting_are_one_plan_in_the_order(runs: ModuleType) -> None:
    """Of three runs of one setting and one of another there is a pair, and the median is what is compared."""
    slow = {**TINY, "micro_batch": 4, "tp": 4, "pp": 1}
    found = [runs.Found({**TINY, "step_time_s": seconds}, 1.0) for seconds in (1.0, 1.1, 9.0)]
    found.append(runs.Found({**slow, "step_time_s": 1.2}, 2.0))
    judged = [runs.Judged(one, 1.0, 0.5, 2.0) for one in found]
    noise = runs.Noise.of([one.row for one in found])
    order = runs.Order.of(judged, noise)
    assert order == runs.Order.of(reversed(judged), noise)
    assert (order.pairs, order.right, order.regrets) == (1, 1, [0.0])


def test_a_pair_in_the_wrong_order_is_counted_by_the_term_that_decides_it(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = {2: {"layers": 3.0, "bubble": 1.0}, 4: {"layers": 2.5, "bubble": 2.0}}  # by micro-batch
    monkeypatch.setattr(runs, "terms_of", lambda row: terms[row["micro_batch"]])
    rows = [{**TINY, "micro_batch": 2, "step_time_s": 5.0}, {**TINY, "micro_batch": 4, "step_time_s": 4.0}]
    found = [runs.Found(row, sum(terms[row["micro_batch"]].values())) for row in rows]
    order = runs.Order.of([runs.Judged(one, 1.0, 0.5, 2.0) for one in found], runs.Noise.of(rows))
    assert (order.pairs, order.right, dict(order.wrong), order.close) == (1, 0, {"bubble": 1}, 0)
    assert order.regrets == [0.25]


def test_the_interval_of_a_family_comes_from_the_others_alone(runs: ModuleType) -> None:
    def family(name: str, ratio: float) -> list[Any]:
        return [runs.Found({**row_of(layers, 1, ratio), "framework": name}, 1.0) for layers in (10, 11)]

    found = {name: family(name, ratio) for name, ratio in {"a": 1.0, "b": 1.1, "c": 1.21, "d": 9.0}.items()}
    low, high = runs.by_others(found, "d")
    assert low < 1.0 < 1.21 < high < 1.5
    assert low * high == pytest.approx(1.1**2)
    assert runs.by_others({name: found[name] for name in "abc"}, "c") is None


def test_messages_slow_down_the_kernels_beside_them(prices: ModuleType) -> None:
    device = prices.cluster_of("A100-80GB", 8, 8, "").device
    rate = device.overlap
    assert rate < 1
    assert prices.beside(device, 2.0, 1.0) == pytest.approx(2.0 + (1 - rate))
    assert prices.beside(device, 1.0, 3.0) == pytest.approx(3.0)


def test_a_step_is_the_sum_of_its_terms(prices: ModuleType) -> None:
    terms = prices.terms_of(TINY)
    assert sum(terms.values()) == prices.seconds_of(TINY)
    assert terms["computed again"] > 0
    assert terms["bubble"] > 0
    assert terms["gathers and scatters"] == 0


def test_composer_gathers_late_and_reduces_as_its_precision_says(prices: ModuleType) -> None:
    composer = {**TINY, "gpus": 8, "dp": 8, "tp": 1, "pp": 1, "zero": 3, "recompute": "none", "precision": "bf16"}

    def messages(framework: str, **change: Any) -> float:
        row = {**composer, "framework": framework, **change}
        return float(prices.terms_of(row)["gathers and scatters"])

    pure, default = "Composer/FSDP, mp mode PURE", "Composer/FSDP, mp mode DEFAULT"
    assert messages("FSDP") < messages(pure) < messages(default)
    assert messages(pure, zero=2) < messages(pure)  # gathered once
    attention = [prices.Software.of({**composer, "framework": pure, "gpu": gpu}).attention for gpu in ("A100", "H100")]
    assert all(first > 1.5 * hopper for first, hopper in zip(*attention, strict=True))
    assert attention[0][0] > attention[0][1], "backward reaches less"


def test_allocated_reserved_and_monitored_memory_are_three_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    held = importlib.import_module("published_bytes")
    gib = 2.0**30
    rows = [{**TINY, "framework": name} for name in ("Mist", "torchtitan", "Megatron-DeepSpeed")]
    assert [held.figure_of(row) for row in rows] == ["allocated", "reserved", "monitored"]
    allocated, reserved, monitored = (held.measured_bytes(row, 10 * gib) for row in rows)
    assert allocated == 10 * gib
    assert reserved == pytest.approx(12.1 * gib)
    assert monitored - reserved == pytest.approx(2.1 * gib)
    assert held.measured_bytes({**rows[1], "recompute": "none"}, 10 * gib) < reserved
    assert held.measured_bytes(rows[2], 79 * gib) == 80 * gib  # an allocator gives back what it has cached


def test_the_order_of_rows_changes_nothing(runs: ModuleType) -> None:
    found = [runs.Found(row_of(layers, batch, 1 + batch / 10), 1.0) for layers in range(10, 18) for batch in (1, 2, 3)]
    mixed = random.Random(1).sample(found, len(found))
    judged = [
        sorted(
            (one.found.group, one.found.row["global_batch"], one.factor, one.low) for one in runs.calibrated(rows)[0]
        )
        for rows in (found, mixed)
    ]
    assert judged[0] == judged[1]


# -- memory ------------------------------------------------------------------------------------------------------------

GOLDEN = {"group": "gpt", "gpus": 8, "mem_allocated_bytes": 1.0, "test": "tiny", "env": "", "platform": "a100"}
SIZES = {"hidden-size": 64, "num-attention-heads": 4, "num-layers": 4, "seq-length": 64, "micro-batch-size": 2}


@pytest.mark.parametrize(
    ("args", "why", "at_peak"),
    [
        ({}, "", ""),
        ({"swiglu": True}, "gated layers", ""),  # True is 1, and no default for that
        ({"untie-embeddings-and-output-weights": True}, "a table and a head of their own", ""),
        ({"untie-embeddings-and-output-weights": True, "pipeline-model-parallel-size": 2}, "", ""),
        ({"num-layers-per-virtual-pipeline-stage": 1}, "", "several stages of a rank"),
    ],
)
def test_options_that_are_not_priced_are_seen(memory: ModuleType, args: dict[str, Any], why: str, at_peak: str) -> None:
    row = {**GOLDEN, "args": SIZES | args}
    assert memory._unpriced(row) == why
    found = memory._missing(row, memory.MISSING_AT_PEAK, memory.MISSING_AT_PEAK_BY_NAME)
    assert found == ([at_peak] if at_peak else [])


def test_a_stage_holds_what_it_was_sent_last_and_its_gradient(memory: ModuleType) -> None:
    args = {"num-layers": 12, "micro-batch-size": 4, "seq-length": 1024, "hidden-size": 512}
    value = 2 * 4 * 1024 * 512
    assert memory.received(args) == 0
    staged = {**args, "pipeline-model-parallel-size": 4}
    assert memory.received(staged) == 2 * value
    assert memory.received({**staged, "num-layers-per-virtual-pipeline-stage": 1}) == 3 * 2 * value
    parts = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "context-parallel-size": 2}
    assert memory.received(staged | parts) == 2 * value / 4


@pytest.mark.parametrize("scores", [False, True])
def test_the_peak_is_that_of_published_formulas(memory: ModuleType, scores: bool) -> None:
    """34 bytes a layer for every element between layers, and 5 for every score (Korthikanti et al., 2022); 2 % for the
    statistics of norms and of attention."""
    shape = memory.Shape(
        width=256, heads=4, layers=2, sequence=64, batch=2, scores=scores, splits_sequence=False, vocab=512
    )
    tokens, all_scores = 2 * 64, 4 * 2 * 64**2
    values = tokens * 256
    layer = 34 * values + (5 * all_scores if scores else 2 * values)
    expected = 2 * layer + (1 + 2 * 2) * values + 2 * 64**2 + 6 * tokens * 512
    assert memory.at_loss(shape, 1, 1, 0.1) == pytest.approx(expected, rel=0.02)
    assert memory.at_loss(shape, 1, 1, 0.0) == memory.at_loss(shape, 1, 1, 0.1) - 5 * values


def test_selective_recompute_computes_attention_from_its_scores_on_again(prices: ModuleType) -> None:
    row = {**TINY, "recompute": "none"}
    own = prices.pass_of(row, row["micro_batch"])
    more = prices.seconds_of({**TINY, "recompute": "selective(attention core)"}) - prices.seconds_of(row)
    stage = prices.stages_of(row)[0]
    turns = row["global_batch"] // (row["micro_batch"] * row["dp"]) + row["pp"] - 1
    assert 0 < own.core < own.forward
    assert more == pytest.approx(turns * stage.layers * own.core)


def test_a_device_waits_for_a_host_that_starts_what_it_does(prices: ModuleType) -> None:
    """The first kernel is waited for; a long one behind it hides what is started in the meantime."""
    assert prices.Half(7.0, 3).seconds(1.0, [1.0, 5.0, 1.0]) == 8.0
    assert prices.Half(7.0, 3).seconds(1.0, [0.5, 1.5, 5.0]) == 8.5
    assert prices.Half(3.0, 3).seconds(2.0, [1.0, 1.0, 1.0]) == 7.0


def test_noise_is_what_effects_of_micro_batch_and_stages_leave(runs: ModuleType) -> None:
    """Runs that are products of two effects have none; repeated ones have their spread; runs that should take as
    long are told apart by chance."""

    def row(micro_batch: int, pp: int, part: float = 1.0) -> dict[str, Any]:
        passes = 16 / micro_batch + pp - 1
        seconds = part * passes * micro_batch / pp * (1 + micro_batch) * (2 + pp)
        return {**TINY, "micro_batch": micro_batch, "pp": pp, "gpus": 2 * pp, "step_time_s": seconds}

    def of_one_cluster(*rows: dict[str, Any]) -> Any:
        return runs.Noise.of([{**one, "gpus": 4} for one in rows])

    exact = [row(micro_batch, pp) for micro_batch in (1, 2, 4) for pp in (1, 2)]
    noise = of_one_cluster(*exact)
    assert (noise.free, noise.spread) == (2, pytest.approx(0, abs=1e-9))
    assert of_one_cluster(*exact, exact[0]).free == 2, "the same seconds are the same run, quoted again"
    repeated = of_one_cluster(*(row(1, 1, part) for part in (0.9, 1.0, 1.1)), row(2, 1))
    assert repeated.spread == pytest.approx(0.1, rel=0.01)
    same = [{**row(1, 1), "gpus": 4}] * 2
    assert repeated.told(*same) == 0.5
    assert 0.99 < repeated.told(same[0], {**row(2, 1), "gpus": 4}) < 1
