"""How the software of a published run computes a step (for ``published_prices.py``): what of it a row's name tells."""

from __future__ import annotations

from dataclasses import dataclass, replace

from published_rows import Row

from shardwise.costs.cluster import Device
from shardwise.costs.units import Figures

# Part of the peak that attention reached in the software of the runs (recalled): FlashAttention on A100 .25 to .40
# (Dao, "FlashAttention-2", 2023), FlashAttention-2 on H100 .35 (Shah and others, "FlashAttention-3", 2024).
FLASH = 0.35
# The first FlashAttention on Hopper, whose instructions it does not use: .40 of an A100, times what the second one
# gained from A100 to H100 without them (230 to 335 TFLOP/s, Dao, 2023). llm-foundry's extra "gpu" pinned version 1.0.9
# (setup.py, with Composer 0.17).
FLASH_1_ON_HOPPER = 0.40 * 312 / 989.4 * 335 / 230
# Seconds in which the host of Megatron's runs starts a kernel or a message, in Python, with autograd and checkpoints:
# fitted to two groups of vTrain's runs in one node (12 layers of 1,024 on 2 and on 4 A100), medians of one sequence.
# (An H100's host, measured: 11 us without autograd; 35 forward and backward together.)
MEGATRON_LAUNCH = 51e-6
MEGATRON_LIKE = ("megatron", "mist")
FUSED = ("nemo", "bridge", "maxtext")
KNOWN = ("composer", "torchtitan", *FUSED, *MEGATRON_LIKE)


def is_fused(row: Row) -> bool:
    """Return whether a row's software has one kernel for what is between products, cuDNN's attention and no dropout:
    Megatron on Transformer Engine (all there is on Hopper and later), and what XLA compiles."""
    name = row["framework"].casefold()
    return any(word in name for word in FUSED) or ("megatron" in name and _is_hopper_or_later(row))


def _is_hopper_or_later(row: Row) -> bool:
    return bool(row["gpu"].upper().startswith(("H", "B", "GB")))


@dataclass(frozen=True, slots=True)
class Software:
    """How a step is run. ``launch``: of its host (None: that of the cluster's device); ``attention``: the part of the
    peak that it reaches (0: the device's); ``scores``: attention is written out; ``fused``: with a kernel for causal
    scores; ``dropout``: there is any; ``compiled``: layers are; ``float8``: their products are; ``shards``: parameters
    are gathered (FSDP), in float8 where ``gathers_float8``; ``reduced_itemsize``: of gradients that are reduced;
    ``gathers_late``: parameters for backward are gathered when that of the layer behind is done, beside nothing."""

    launch: float | None = None
    attention: float = 0.0
    scores: bool = False
    fused: bool = False
    dropout: bool = False
    compiled: bool = False
    float8: bool = False
    shards: bool = False
    gathers_float8: bool = False
    reduced_itemsize: int = 2
    gathers_late: bool = False

    @staticmethod
    def of(row: Row) -> Software:
        name, float8 = row["framework"].casefold(), "fp8" in row["precision"].casefold()
        shards = isinstance(row["zero"], int) and row["zero"] >= 2
        if "torchtitan" in name:
            compiled = any(word in name for word in ("compile", "async"))  # asynchronous products need it
            gathers_float8 = float8 and "float8 all-gather" in name
            # job_config.py, mixed_precision_reduce: float32.
            return Software(
                attention=FLASH, compiled=compiled, float8=float8, shards=shards, gathers_float8=gathers_float8,
                reduced_itemsize=4,
            )  # fmt: skip
        if is_fused(row):
            return Software(compiled=True, float8=float8, shards=shards)
        if not any(known in name for known in MEGATRON_LIKE):
            is_composer = "composer" in name
            # Composer's DEFAULT reduces in float32, PURE in 16 bits (mosaicml/composer, pull requests 2047 and 2628).
            itemsize = 4 if "mp mode default" in name else 2
            attention = FLASH_1_ON_HOPPER if is_composer and _is_hopper_or_later(row) else FLASH
            # FSDPConfig of Composer: backward_prefetch BACKWARD_POST, which torch's FSDP describes so.
            return Software(
                attention=attention, float8=float8, shards=shards, reduced_itemsize=itemsize, gathers_late=is_composer
            )
        flash = "flash_attn=true" in name
        return Software(
            MEGATRON_LAUNCH, FLASH if flash else 0.0, scores=not flash, fused="mist" in name,
            dropout="mist" not in name, float8=float8, shards=shards,
        )  # fmt: skip


def attending(device: Device, share: float) -> Device:
    """The device, on which attention reaches at most this part of the peak (0: the device's own)."""
    if not share:
        return device
    reached = {kind: min(share, device.kernels.get(kind, share)) for kind in ("attention", "attention_backward")}
    return replace(device, kernels=Figures({**device.kernels, **reached}))
