"""How the software of a published run computes a step (for ``published_prices.py``): what of it a row's name tells."""

from __future__ import annotations

from dataclasses import dataclass, replace

from published_hardware import device_named
from published_rows import Row, dtype_of, node_of

from shardwise.costs.cluster import Device
from shardwise.costs.units import Figures

# Parts of the peak that attention reached, forward and backward. FlashAttention-2 on H100: .35 (Shah and others,
# "FlashAttention-3", 2024). The first one on A100: .30 to .50 and .25 to .35, whose middles these are (Dao,
# "FlashAttention-2", 2023, introduction); on Hopper, whose instructions it does not use, times what the second one
# gained from A100 to H100 without them (230 to 335 TFLOP/s, the same). llm-foundry's extra "gpu" pinned version 1.0.9
# (setup.py, with Composer 0.17).
FLASH = 0.35, 0.35
FLASH_1 = 0.40, 0.30
FLASH_1_ON_HOPPER = FLASH_1[0] * 312 / 989 * 335 / 230, FLASH_1[1] * 312 / 989 * 335 / 230
# Seconds in which the host of Megatron's runs starts a kernel or a message, in Python, with autograd and checkpoints:
# fitted to two groups of vTrain's runs in one node (12 layers of 1,024 on 2 and on 4 A100), medians of one sequence.
# (An H100's host, measured: 11 us without autograd; 35 forward and backward together.)
MEGATRON_LAUNCH = 51e-6
# Bytes of a parameter that FSDP reads and writes for every pass, beside those that are sent, by the bytes of a reduced
# gradient (torch/distributed/fsdp/_runtime_utils.py): gradients of views are joined, cast where they are reduced in
# float32, and divided by a part of the replicas. Its second version copies parameters out of what was gathered, twice,
# and gradients into what is reduced (_fsdp_collectives.py).
FSDP_1, FSDP_2 = {2: 4 + 4, 4: 4 + 6 + 8}, 2 * 4 + 6
# Bytes of a parameter that an update moves: of a fused AdamW on float32 weights and moments, from gradients of two
# bytes, which writes weights of two bytes; of Composer's, of eight kernels in float32
# (optim/decoupled_weight_decay.py), with the norm of gradients that llm-foundry's configurations clip.
UPDATE, COMPOSER_UPDATE = 28, 80 + 12
# DeepSpeed's pipeline sends and receives one after the other, and waits for each (runtime/pipe/schedule.py: "The
# communication is blocking and must be paired").
MEGATRON_LIKE = ("megatron", "mist")
FUSED = ("nemo", "bridge", "maxtext", "megatron-core", "transformer engine")
# Whose recipes send parts of a tensor beside the product that makes or takes them (``tp_comm_overlap``), and gradients
# and parameters of a distributed optimizer beside the last and the next pass (``overlap_grad_reduce``,
# ``overlap_param_gather``).
OVERLAPS = ("nemo", "bridge")
KNOWN = ("composer", "torchtitan", *FUSED, *MEGATRON_LIKE)


def is_fused(row: Row) -> bool:
    """Return whether a row's software has one kernel for what is between products, cuDNN's attention and no dropout:
    Megatron on Transformer Engine (all there is on Hopper and later), and what XLA compiles."""
    name = row["framework"].casefold()
    return any(word in name for word in FUSED) or ("megatron" in name and _is_hopper_or_later(row))


def _is_hopper_or_later(row: Row) -> bool:
    return device_named(row["gpu"]).startswith(("h", "b", "gb", "mi"))


@dataclass(frozen=True, slots=True)
class Software:
    """How a step is run.

    ``launch``: of its host (None: that of the cluster's device), which ``blocks``: it starts a kernel when the one
    before is done; ``attention``: the parts of the peak that it reaches, forward and backward (None: the device's);
    ``scores``: attention is written out; ``fused``: with a kernel for causal scores; ``norms``: norms and gates are one
    kernel; ``dropout``: there is any; ``compiled``: layers are; ``float8``: their products are; ``balances``: context
    parallelism gives every rank early and late tokens; ``overlaps``: as ``OVERLAPS``; ``sends_alone``: a stage sends
    and receives one message after the other.

    ``shards``: parameters are gathered (FSDP), in float8 where ``gathers_float8``; ``gathers_late``: for backward when
    that of the layer behind is done, beside nothing; ``reduced_itemsize``: of gradients that are reduced;
    ``copied_bytes``, ``update_bytes``: of a parameter, for messages of a pass and in an update."""

    launch: float | None = None
    blocks: bool = False
    attention: tuple[float, float] | None = None
    scores: bool = False
    fused: bool = False
    norms: bool = False
    dropout: bool = False
    compiled: bool = False
    float8: bool = False
    balances: bool = False
    overlaps: bool = False
    sends_alone: bool = False
    shards: bool = False
    gathers_float8: bool = False
    gathers_late: bool = False
    reduced_itemsize: int = 2
    copied_bytes: int = 0
    update_bytes: int = UPDATE

    @staticmethod
    def of(row: Row) -> Software:
        name, float8 = row["framework"].casefold(), dtype_of(row["precision"]) == "f8"
        shards = isinstance(row["zero"], int) and row["zero"] >= 2
        if "torchtitan" in name:
            compiled = any(word in name for word in ("compile", "async"))  # asynchronous products need it
            gathers_float8 = float8 and "float8 all-gather" in name
            # job_config.py, mixed_precision_reduce: float32.
            return Software(
                attention=FLASH, compiled=compiled, float8=float8, shards=shards, gathers_float8=gathers_float8,
                reduced_itemsize=4, copied_bytes=FSDP_2,
            )  # fmt: skip
        if is_fused(row):
            overlaps = any(word in name for word in OVERLAPS)
            return Software(norms=True, compiled=True, float8=float8, shards=shards, balances=True, overlaps=overlaps)
        if not any(known in name for known in MEGATRON_LIKE):
            is_composer = "composer" in name
            # Composer's DEFAULT reduces in float32, PURE in 16 bits (mosaicml/composer, pull requests 2047 and 2628).
            itemsize = 4 if "mp mode default" in name else 2
            attention = FLASH_1_ON_HOPPER if _is_hopper_or_later(row) else FLASH_1
            # FSDPConfig of Composer: backward_prefetch BACKWARD_POST, which torch's FSDP describes so.
            return Software(
                attention=attention if is_composer else FLASH, float8=float8, shards=shards,
                gathers_late=is_composer, reduced_itemsize=itemsize, copied_bytes=FSDP_1[itemsize],
                update_bytes=COMPOSER_UPDATE if is_composer else UPDATE,
            )  # fmt: skip
        flash, is_deepspeed = "flash_attn=true" in name, "deepspeed" in name
        return Software(
            MEGATRON_LAUNCH, is_deepspeed and _blocks(row), FLASH if flash else None, scores=not flash,
            fused="mist" in name, norms="mist" in name, dropout="mist" not in name, float8=float8, balances=True,
            sends_alone=is_deepspeed, shards=shards,
        )  # fmt: skip


def _blocks(row: Row) -> bool:
    """Return whether CUDA_LAUNCH_BLOCKING was set: on several nodes of Jean Zay, where runs hung without it
    (bigscience, train/tr11-176B-ml: chronicles-prequel.md and tr11-176B-ml.slurm)."""
    return "Jean Zay" in (row.get("interconnect") or "") and row["gpus"] > node_of(row)


def attending(device: Device, shares: tuple[float, float] | None) -> Device:
    """The device, on which attention reaches at most these parts of the peak (None: the device's own)."""
    if shares is None:
        return device
    kinds = zip(("attention", "attention_backward"), shares, strict=True)
    reached = {kind: min(share, device.kernels.get(kind, share)) for kind, share in kinds}
    return replace(device, kernels=Figures({**device.kernels, **reached}))
