"""What rows of published runs leave open (for ``published_runs.py``).

A field that a row does not state has the default of the row's software, or follows from what the row does state. Where
the software has no default that one can know (recomputation, the micro-batch, the stages of a device), the row has
several settings: those whose peak of memory fits are priced, and the row's price is an interval over them.

Sources of the defaults: Megatron-LM ``arguments.py`` (neither sequence parallelism, a distributed optimizer nor
recomputation unless asked for); the performance recipes of NeMo and Megatron-Bridge (sequence parallelism wherever
there is tensor parallelism, the distributed optimizer, no recomputation where memory allows); torchtitan
``job_config.py`` (FSDP over all replicas, selective recomputation of operators, one pass a step); MaxText ``base.yml``
(``remat_policy: full``, FSDP); DeepSpeed ``zero/config.py`` (stage 0 unless asked for); PyTorch's FSDP (full sharding).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from published_hardware import cluster_of, device_named
from published_rows import RECOMPUTED, Row, is_count, is_positive

FULL, NONE, OPERATORS, CORE = "full", "none", "selective(op)", "selective(attention core)"
# Of a part of the layers (``recompute_num_layers``): as many as memory asks for.
PARTS = tuple(kind for kind, part in RECOMPUTED.items() if kind.startswith("full(") and part < 1)
MICRO_BATCHES = (1, 2, 4, 8)
SIZES = "layers hidden heads kv_heads ffn vocab gated_mlp experts active_experts expert_ffn head_dim"
# Published configurations, for rows that name a model and leave sizes out: SIZES of each (``config.json`` of the models
# that have one; NeMo's ``gpt3.py`` and ``nemotron.py``).
MODELS: dict[str, tuple[Any, ...]] = {
    r"gpt-?3.*175b": (96, 12288, 96, 96, 49152, 50257, False),
    r"llama-?2.*\b7b": (32, 4096, 32, 32, 11008, 32000, True),
    r"llama-?2.*\b13b": (40, 5120, 40, 40, 13824, 32000, True),
    r"llama-?2.*\b70b": (80, 8192, 64, 8, 28672, 32000, True),
    r"llama-?3\.2.*\b1b": (16, 2048, 32, 8, 8192, 128256, True),
    r"llama-?3\.2.*\b3b": (28, 3072, 24, 8, 8192, 128256, True),
    r"llama-?3.*\b8b": (32, 4096, 32, 8, 14336, 128256, True),
    r"llama-?3.*\b70b": (80, 8192, 64, 8, 28672, 128256, True),
    r"llama-?3.*\b405b": (126, 16384, 128, 8, 53248, 128256, True),
    r"llama.*\b65b": (80, 8192, 64, 64, 22016, 32000, True),
    r"mistral.*\b7b": (32, 4096, 32, 8, 14336, 32000, True),
    r"gpt-?3.*\b5b": (24, 4096, 32, 32, 16384, 50257, False),
    r"gpt-?3.*\b20b": (44, 6144, 48, 48, 24576, 50257, False),
    r"gpt-?3.*\b40b": (48, 8192, 64, 64, 32768, 50257, False),
    r"nemotron(?!-?h).*\b4b": (32, 3072, 24, 8, 9216, 256000, False, 0, 0, 0, 128),
    r"nemotron(?!-?h).*\b8b": (32, 4096, 32, 32, 16384, 256000, False),
    r"nemotron(?!-?h).*\b15b": (32, 6144, 48, 8, 24576, 256000, False),
    r"nemotron(?!-?h).*\b22b": (40, 6144, 48, 48, 24576, 256000, False),
    r"nemotron(?!-?h).*\b340b": (96, 18432, 96, 8, 73728, 256000, False),
    r"mixtral.*8x-?7b": (32, 4096, 32, 8, 14336, 32000, True, 8, 2),
    r"mixtral.*8x-?22b": (56, 6144, 48, 8, 16384, 32768, True, 8, 2),
    r"llama.*\b7b": (32, 4096, 32, 32, 11008, 32000, True),
    r"llama.*\b13b": (40, 5120, 40, 40, 13824, 32000, True),
    r"llama.*\b3[03]b": (60, 6656, 52, 52, 17920, 32000, True),
    r"qwen-?2.*\b7b": (28, 3584, 28, 4, 18944, 152064, True),
    r"qwen-?2.*\b14b": (48, 5120, 40, 8, 13824, 152064, True),
    r"qwen-?2.*\b32b": (64, 5120, 40, 8, 27648, 152064, True),
    r"qwen-?2.*\b72b": (80, 8192, 64, 8, 29568, 152064, True),
    r"qwen-?3.*\b8b": (36, 4096, 32, 8, 12288, 151936, True),
    r"qwen-?3.*\b14b": (40, 5120, 40, 8, 17408, 151936, True),
    r"qwen-?3.*\b32b": (64, 5120, 64, 8, 25600, 151936, True, 0, 0, 0, 128),
    r"qwen-?3.*\b30b": (48, 2048, 32, 4, 6144, 151936, True, 128, 8, 768, 128),
    r"qwen-?3.*\b235b": (94, 4096, 64, 4, 12288, 151936, True, 128, 8, 1536, 128),
    r"gpt-?oss.*\b20b": (24, 2880, 64, 8, 2880, 201088, True, 32, 4, 2880, 64),
    r"gpt-?oss.*\b120b": (36, 2880, 64, 8, 2880, 201088, True, 128, 4, 2880, 64),
    r"deepseek-?v3": (61, 7168, 128, 128, 18432, 129280, True, 256, 8, 2048),
    r"deepseek-?v2-?lite": (27, 2048, 16, 16, 10944, 102400, True, 64, 6, 1408),
    # GPT-3 (Brown et al., 2020, table 2.1), and Megatron's models of Narayanan et al. (2021, table 1) and Korthikanti
    # et al. (2022, table 3).
    r"gpt.*\b1\.3b": (24, 2048, 16, 16, 8192, 50257, False),
    r"gpt.*\b2\.7b": (32, 2560, 32, 32, 10240, 50257, False),
    r"gpt.*\b6\.7b": (32, 4096, 32, 32, 16384, 50257, False),
    r"gpt.*\b13b": (40, 5120, 40, 40, 20480, 50257, False),
    r"(gpt|megatron).*\b22b": (48, 6144, 64, 64, 24576, 51200, False),
    r"gpt.*\b1\.7b": (24, 2304, 24, 24, 9216, 51200, False),
    r"gpt.*\b3\.6b": (30, 3072, 32, 32, 12288, 51200, False),
    r"gpt.*\b7\.5b": (36, 4096, 32, 32, 16384, 51200, False),
    r"gpt.*\b18\.4b": (40, 6144, 48, 48, 24576, 51200, False),
    r"gpt.*\b39\.1b": (48, 8192, 64, 64, 32768, 51200, False),
    r"gpt.*\b76\.1b": (60, 10240, 80, 80, 40960, 51200, False),
    r"gpt.*\b145\.6b": (80, 12288, 96, 96, 49152, 51200, False),
    r"gpt.*\b310\.1b": (96, 16384, 128, 128, 65536, 51200, False),
    r"(gpt|mt-?nlg|turing|megatron).*\b5(30|29\.6)b": (105, 20480, 128, 128, 81920, 51200, False),
    r"(gpt|megatron).*\b(1t|1008b)": (128, 25600, 160, 160, 102400, 51200, False),
}
# What models of DeepSeek have besides.
DEEPSEEK = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
BESIDES: dict[str, dict[str, int]] = {
    r"deepseek-?v3": DEEPSEEK | {"q_lora_rank": 1536, "shared_experts": 1},
    r"deepseek-?v2-?lite": DEEPSEEK | {"shared_experts": 2},
}
GPT_2, LLAMA_2 = 50_257, 32_000  # words of their tokenizers, for rows that state none
# Other names of sizes of experts and heads.
SYNONYMS = {
    **dict.fromkeys(("num_experts", "n_experts", "n_routed_experts", "moe_experts"), "experts"),
    **dict.fromkeys(("top_k", "topk", "moe_topk", "moe_top_k", "experts_per_token"), "active_experts"),
    **dict.fromkeys(("num_experts_per_tok", "moe_router_topk"), "active_experts"),
    **dict.fromkeys(("moe_ffn", "moe_intermediate_size", "ffn_expert", "moe_ffn_hidden_size"), "expert_ffn"),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "shared_experts"),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window"), "window"),
    **dict.fromkeys(("num_query_groups", "n_kv_heads", "num_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("num_heads", "n_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("num_layers", "n_layers"), "layers"),
    **dict.fromkeys(("hidden_size", "d_model", "dim"), "hidden"),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size", "ffn_hidden", "d_ff"), "ffn"),
    **dict.fromkeys(("kv_channels", "head_size", "d_head"), "head_dim"),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), "vocab"),
}
# Parts of a layer whose outputs are no product's, or cost little: their recomputation is not in the price.
CHEAP = ("layernorm", "norm", "moe_act", "act", "up_proj")
NOTHING = ("", "n/a", "na", "-", "none", "null", "unknown", "not stated")
# Texts by which rows may name what is computed again; "selective" is of what the software's own word means.
WORDS = {"true": FULL, "on": FULL, "yes": FULL, "false": NONE, "off": NONE, "no": NONE, "": NONE}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a software does with what it is not told. ``recompute``: what may be on; ``recomputes``: the first of these
    that fits is its default; ``accumulates``: a step may have several passes; ``interleaves``: a
    device may have several stages."""

    zero: int
    sequence_parallel: bool
    recompute: tuple[str, ...]
    recomputes: bool = False
    accumulates: bool = False
    interleaves: bool = False


# The first whose word is in the name of the framework.
DEFAULTS = (
    ("nemo", Defaults(1, True, (NONE, *PARTS, FULL), recomputes=True, accumulates=True, interleaves=True)),
    ("bridge", Defaults(1, True, (NONE, *PARTS, FULL), recomputes=True, accumulates=True, interleaves=True)),
    ("megatron", Defaults(0, False, (NONE, CORE, FULL), accumulates=True, interleaves=True)),
    ("torchtitan", Defaults(3, True, (OPERATORS, FULL, NONE), recomputes=True)),
    ("maxtext", Defaults(3, False, (FULL, NONE), recomputes=True)),
    ("deepspeed", Defaults(0, False, (NONE, FULL), accumulates=True)),
    ("", Defaults(3, False, (NONE, FULL))),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row with every field stated. ``assumed``: fields that were not, with their values; ``is_default``: with what
    the software does unless it is told."""

    row: Row
    assumed: tuple[str, ...] = ()
    is_default: bool = True


def settings_of(row: Any) -> list[Setting]:
    """Return the settings that a row may have been run with; the row alone, where it is none or states everything."""
    if not isinstance(row, Mapping):
        return [Setting(row)]
    filled = _filled(row)
    defaults = _defaults(filled)
    settings = []
    for recompute, micro_batch, vpp in product(
        _open(filled, "recompute", defaults.recompute),
        _open(filled, "micro_batch", _micro_batches(filled, defaults)),
        _open(filled, "vpp", _interleavings(filled, defaults)),
    ):
        own = {**filled, "recompute": recompute, "micro_batch": micro_batch, "vpp": vpp}
        if own.get("global_batch") is None and micro_batch and filled.get("dp") and filled.get("pp") == 1:
            own["global_batch"] = micro_batch * filled["dp"]
        own["step_time_s"] = row["step_time_s"] if row.get("step_time_s") is not None else _seconds(own)
        is_default = vpp in (None, 1) or row.get("vpp") is not None
        if defaults.recomputes and filled.get("recompute") is None:
            is_default &= recompute == defaults.recompute[0]
        settings.append(Setting(own, tuple(_named(row, own)), is_default))
    return settings


def _open(row: Row, name: str, values: Iterable[Any]) -> list[Any]:
    return [row[name]] if row.get(name) is not None else (list(values) or [None])


def _named(row: Row, own: Row) -> Iterator[str]:
    for name, value in own.items():
        if name == "arch" and isinstance(value, Mapping):
            stated = row.get("arch") if isinstance(row.get("arch"), Mapping) else {}
            yield from (f"arch.{part} {size}" for part, size in value.items() if stated.get(part) is None)
        elif row.get(name) is None and value is not None and not (name == "vpp" and value == 1):
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _filled(row: Row) -> dict[str, Any]:
    """The row with what its software's defaults and its own figures tell."""
    filled = {name: None if name != "recompute" and _is_nothing(value) else value for name, value in row.items()}
    filled |= {name: None for name in ("cp", "ep", "vpp") if filled.get(name) == 0}

    def fill(name: str, value: Any) -> None:
        if filled.get(name) is None and value is not None:
            filled[name] = value

    fill("framework", "not stated")
    fill("precision", "bf16")
    defaults = _defaults(filled)
    if filled.get("recompute") is not None:
        filled["recompute"] = _recompute(str(filled["recompute"]), defaults)
    for name in ("tp", "pp", "cp"):
        fill(name, 1)
    degrees = [filled[name] for name in ("tp", "pp", "cp")]
    if all(map(is_count, degrees)) and is_count(filled.get("gpus")) and not filled["gpus"] % prod(degrees):
        fill("dp", filled["gpus"] // prod(degrees))
    filled["zero"] = _zero(filled.get("zero"))
    zero = re.search(r"zero[-_ ]?(?:stage[-_ ]?)?([0-3])\b", str(filled["framework"]), re.IGNORECASE)
    fill("zero", int(zero[1]) if zero else defaults.zero)
    fill("sequence_parallel", defaults.sequence_parallel and filled["tp"] != 1)
    arch = _arch(filled)
    if arch is not None:
        filled["arch"] = arch
    tokens, seconds = filled.get("tokens_per_s_per_gpu"), filled.get("step_time_s")
    known = is_positive(tokens) and is_positive(seconds) and is_count(filled.get("gpus")) and is_count(filled["seq"])
    if known:
        fill("global_batch", max(1, round(tokens * seconds * filled["gpus"] / filled["seq"])))
    if filled.get("recompute") != FULL:  # with it a rate may count the second forward, or not
        fill("tflops_kind", "model" if filled.get("tflops_per_gpu") or filled.get("mfu") else None)
    if any(is_positive(filled.get(name)) for name in ("tokens_per_s_per_gpu", "step_time_s", "samples_per_s", "mfu")):
        fill("status", "ok")
    return filled


def _is_nothing(value: Any) -> bool:
    return isinstance(value, str) and value.casefold() in NOTHING


def _zero(value: Any) -> Any:
    """Return the stage that a row's word for how optimizer states are split means; None if it means none."""
    if isinstance(value, bool):
        return 1 if value else 0  # the states alone (``use_distributed_optimizer``)
    if not isinstance(value, str) or value.startswith("per stage"):
        return value
    if number := re.search(r"\b[0-3]\b", value):
        return int(number[0])
    return 3 if "fsdp" in value.casefold() else None


def _recompute(text: str, defaults: Defaults) -> str | None:
    """Return what a row's word for recomputation means; None, so that all is open, if that is not known."""
    text = text.casefold().strip()
    if text in WORDS or text in RECOMPUTED or text.startswith("per stage"):
        return WORDS.get(text, text)
    if text == "selective":
        return next((kind for kind in defaults.recompute if kind.startswith(text)), CORE)
    if "selective" in text:
        if "op" in re.findall(r"[a-z]+", text) or re.search(r"\b[2-9]\b", text):  # every second layer's, or so
            return OPERATORS
        if "attn" in text or "attention" in text:
            return CORE
        return NONE if any(word in text for word in CHEAP) else None
    is_whole = any(word in text for word in ("full", "all", "every layer", "checkpoint"))
    return FULL if is_whole and not re.search(r"\d", text) else None


def _defaults(row: Row) -> Defaults:
    name = str(row["framework"]).casefold()
    return next(defaults for word, defaults in DEFAULTS if word in name)


def _arch(row: Row) -> Mapping[str, Any] | None:
    """Sizes as stated, and those left out as published for the model that the row names; without any, heads of keys
    as many as of queries, and four times the width inside of a layer of GPT."""
    stated = row.get("arch")
    if stated is not None and not isinstance(stated, Mapping):
        return None
    name = str(row.get("model") or "").casefold().replace("_", "-").replace(" ", "-")
    known: tuple[Any, ...] = next((sizes for pattern, sizes in MODELS.items() if re.search(pattern, name)), ())
    named = {size: value for size, value in zip(SIZES.split(), known, strict=False) if value or value is False}
    named |= next((sizes for pattern, sizes in BESIDES.items() if re.search(pattern, name)), {})
    own = _stated(stated or {})
    is_same = all(own.get(size, named.get(size)) == named.get(size) for size in ("layers", "hidden"))
    arch = (named if is_same else {}) | own
    if is_count(arch.get("hidden")) and is_count(arch.get("heads")):
        arch.setdefault("kv_heads", arch["heads"])
        arch.setdefault("gated_mlp", arch.get("ffn", 4 * arch["hidden"]) != 4 * arch["hidden"])
        if not arch["gated_mlp"]:
            arch.setdefault("ffn", 4 * arch["hidden"])
        arch.setdefault("vocab", LLAMA_2 if arch["gated_mlp"] else GPT_2)
    if is_count(arch.get("expert_ffn")):
        arch.setdefault("ffn", arch["expert_ffn"])
    return arch or None


def _stated(row: Row) -> dict[str, Any]:
    return {SYNONYMS.get(name, name): value for name, value in row.items() if value is not None}


def _micro_batches(row: Row, defaults: Defaults) -> list[int]:
    """Sizes that may be a micro-batch's: the whole share of a replica where the software takes it in one pass."""
    total, dp = row.get("global_batch"), row.get("dp")
    if not is_count(dp):
        return []
    if not is_count(total):
        return list(MICRO_BATCHES)
    share = max(1, total // dp)
    if not defaults.accumulates and row.get("pp") == 1:
        return [share]
    return [size for size in MICRO_BATCHES if not share % size]


def _interleavings(row: Row, defaults: Defaults) -> list[int]:
    """Numbers of stages a device: one, and where the software interleaves, what divides its layers, up to six."""
    arch, pp = row.get("arch"), row.get("pp")
    layers = arch.get("layers") if isinstance(arch, Mapping) else None
    if not (defaults.interleaves and is_count(pp) and pp > 1 and is_count(layers)):
        return [1]
    return [1, *(count for count in range(2, 7) if not layers % (pp * count))]


def _seconds(row: Row) -> float | None:
    """Seconds of a step, from its tokens or its FLOPs a second; None where neither is stated with its meaning."""
    counts = [row.get(name) for name in ("global_batch", "seq", "gpus")]
    if not all(map(is_count, counts)):
        return None
    batch, seq, gpus = counts
    if is_positive(rate := row.get("tokens_per_s_per_gpu")):
        return float(batch * seq / (rate * gpus))
    if is_positive(rate := row.get("samples_per_s")):
        return float(batch / rate)
    flops, rate = _flops(row), row.get("tflops_per_gpu")
    if flops is None:
        return None
    if not is_positive(rate) and is_positive(used := row.get("mfu")) and device_named(str(row.get("gpu"))):
        peak = cluster_of(row["gpu"], 1, 1, "").device.peak_flops("bf16")
        rate = peak / 1e12 * (used / 100 if used > 1 else used)
    return float(flops * batch * seq / (rate * 1e12 * gpus)) if is_positive(rate) else None


def _flops(row: Row) -> float | None:
    """FLOPs of a token, by the formula that the row names: 6 N + 12 L d s, or with the products of attention and the
    vocabulary of Narayanan et al. (2021, equation 3), which count a second forward where it is computed again."""
    arch, kind = row.get("arch"), str(row.get("tflops_kind") or "").casefold()
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    if not kind or not isinstance(arch, Mapping) or not all(is_count(arch.get(name)) for name in sizes):
        return None
    layers, width, heads, kv_heads, ffn, vocab = (arch[name] for name in sizes)
    if is_count(arch.get("experts")) and is_count(arch.get("active_experts")):
        ffn = (arch.get("expert_ffn") or ffn) * (arch["active_experts"] + (arch.get("shared_experts") or 0))
    attention = 2 * width**2 * (1 + kv_heads / heads)
    layer = attention + (3 if arch.get("gated_mlp") else 2) * width * ffn
    model = 6.0 * (layers * layer + vocab * width) + 12 * layers * width * row["seq"]
    if "hardware" not in kind and "recompute" not in kind:
        return model
    again = 1.0 if row.get("recompute") == FULL else 0.0
    return model + again * (2.0 * layers * layer + 4 * layers * width * row["seq"])
