"""Rows of a file of published runs: what one must state to be priced, and which are runs of one setting."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

COUNTS = ("seq", "micro_batch", "global_batch", "gpus", "tp", "pp", "dp")
COUNTS_OR_NONE = ("cp", "ep", "vpp", "gpus_per_node")
TEXTS = ("gpu", "framework", "precision", "recompute")
TEXTS_OR_NONE = ("interconnect", "notes")
ARCH = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
# What a model may be besides; biases and tied tables are not told apart.
TRAITS = ("gated_mlp", "bias", "tied_embeddings", "qk_norm")
# Counts that models of other kinds have.
EXTRAS = ("head_dim", "experts", "active_experts", "expert_ffn", "shared_experts", "window")
# Sizes of latent attention (DeepSeek): a model that has one has all.
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SIZED = (*ARCH, *TRAITS, *EXTRAS, *LATENT)
# What a row may state of its model and prices do not depend on.
IGNORED = ("norm", "activation", "position", "rope", "rotary", "max_", "dropout", "dtype", "init", "qkv", "mtp")
MOST = 2**31  # of any count
# What is computed again -> forwards of a layer.
RECOMPUTED = {"none": 0.0, "selective(attention core)": 0.0, "selective(op)": 0.5, "full": 1.0}
RECOMPUTED |= {f"full(of {part:.0%} of the layers)": part for part in (0.25, 0.5, 0.75)}
# What makes two rows runs of one setting.
SETTING = ("arch", *COUNTS, *COUNTS_OR_NONE, *TEXTS, "interconnect", "zero", "sequence_parallel")


def read(path: Path) -> list[Any]:
    """The rows of a file. Ends the program where it is not a list in JSON."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if not isinstance(rows, list):
        raise SystemExit(f"{path}: a list of rows is expected, not {type(rows).__name__}")
    return rows


def family_of(row: Any) -> str:
    name = row.get("family") if isinstance(row, Mapping) else None
    return name if isinstance(name, str) and name else "(no family)"


def once(rows: Sequence[Any]) -> tuple[list[Any], int]:
    """The rows, each once, and how many of them had been there before."""
    found = {json.dumps(row, sort_keys=True): row for row in rows}
    return list(found.values()), len(rows) - len(found)


def setting_of(row: Row) -> str:
    """All that a run was started with, as rows state it."""
    return json.dumps([row.get(name) for name in SETTING], sort_keys=True)


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that are runs of one setting, together."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[setting_of(row)].append(row)
    return list(found.values())


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


def node_of(row: Row) -> int:
    """GPUs that NVLink joins: those of a node, or of a rack of 72 (GB200, GB300); of these as many as a job has the
    same number of everywhere."""
    is_rack = "GB200" in row["gpu"] or "GB300" in row["gpu"]
    most = 72 if is_rack else min(row.get("gpus_per_node") or 8, 8)
    return max(size for size in range(1, most + 1) if not row["gpus"] % size)


# Products of a precision, by words of its name; of the first that is there.
PRECISIONS = (
    ("f8", ("fp8", "float8", "fp4", "mxfp", "e4m3", "f8")),
    ("bf16", ("bf16", "bfloat16", "fp16", "float16", "f16", "half", "mixed", "amp", "16-bit", "16bit")),
    ("tf32", ("tf32",)),
    ("f32", ("fp32", "float32", "f32", "single")),
)


def dtype_of(precision: str) -> str:
    """Return in what products of a precision are computed; empty if it is not known."""
    text = precision.casefold()
    return next((dtype for dtype, words in PRECISIONS if any(word in text for word in words)), "")


def passes_of(row: Row, micro_batch: int, dp: int) -> int:
    """Return the passes of a step; the last one may be smaller."""
    return max(1, ceil(row["global_batch"] / (micro_batch * dp)))


def untimed(row: Any) -> str:
    """Why a row has no seconds to be compared with; empty where it has."""
    if not isinstance(row, Mapping):
        return "no object"
    if row.get("status") == "oom":
        return "ran out of memory: no seconds"
    if row.get("status") != "ok":
        return "status: neither ok nor oom"
    if row.get("step_time_s") is None:
        return "no seconds published"
    return "" if is_positive(row["step_time_s"]) else "step_time_s: no positive number"


def incomplete(row: Any) -> str:
    """What prices need of a row and it does not state, or states as they cannot read; empty where there is nothing."""
    arch = row.get("arch") if isinstance(row, Mapping) else None
    if not isinstance(arch, Mapping):
        return "arch: not stated, and prices need it"
    needed = {name: row.get(name) for name in (*COUNTS, *TEXTS, "zero")} | {
        f"arch.{name}": arch.get(name) for name in ARCH
    }
    if missing := [name for name, value in needed.items() if value in (None, "")]:
        return f"{', '.join(missing)}: not stated, and prices need it"
    stated = needed | {name: row[name] for name in (*COUNTS_OR_NONE, *TEXTS_OR_NONE) if row.get(name) is not None}
    stated |= {f"arch.{name}": arch[name] for name in (*EXTRAS, *LATENT) if arch.get(name)}
    texts = (*TEXTS, *TEXTS_OR_NONE)
    if odd := [name for name, value in stated.items() if name in texts and not isinstance(value, str)]:
        return f"{', '.join(odd)}: no text"
    if odd := [name for name, value in stated.items() if name not in (*texts, "zero") and not is_count(value)]:
        return f"{', '.join(odd)}: no positive whole number"
    flags = {name: arch.get(name) for name in TRAITS} | {"sequence_parallel": row.get("sequence_parallel")}
    if odd := [name for name, value in flags.items() if value is not None and not isinstance(value, bool)]:
        return f"{', '.join(odd)}: neither true nor false"
    if more := [name for name, value in arch.items() if name not in SIZED and value and not is_ignored(name, value)]:
        return f"a model of another kind than GPT and Llama: {', '.join(map(str, more))}"
    return _apart(row, arch)


def is_ignored(name: str, value: Any) -> bool:
    """Return whether prices do not depend on what a row states of its model: on a text, or a size that is none of a
    product."""
    return name not in SIZED and (isinstance(value, str) or any(word in name for word in IGNORED))


def _apart(row: Row, arch: Row) -> str:
    """What of the figures of a row does not go together."""
    cp, vpp, zero = row.get("cp") or 1, row.get("vpp") or 1, row["zero"]
    if row["tp"] * row["pp"] * row["dp"] * cp != row["gpus"]:
        return "tp x pp x dp x cp: not the number of GPUs"
    if row["pp"] * vpp > arch["layers"] + 2:
        return "more stages than layers, embedding and head"
    if row["seq"] % cp:
        return "a sequence that cp does not divide"
    if not (zero in (0, 1, 2, 3) and not isinstance(zero, bool)) and not str(zero).startswith("per stage"):
        return "zero: neither 0, 1, 2, 3 nor per stage"
    if not dtype_of(row["precision"]):
        return f"precision: not known: {row['precision']}"
    if row["recompute"] not in RECOMPUTED and not row["recompute"].startswith("per stage"):
        return f"recompute: not known: {row['recompute']}"
    return ""
