"""What a published run is predicted to hold at its peak, with its own settings (for ``published_runs.py``).

Of the fullest stage, in closed form, beside what a layer keeps (``published_prices.py``):

* parameters, gradients and AdamW's states, as the row's software has them: weights in 16 bits beside float32 ones,
  float32 gradients (Megatron) or gradients in 16 bits (DeepSpeed; with float32 sums beside them where the precision
  says so), states split by ZeRO; or everything in float32 shards, of which two layers are gathered (FSDP);
* of the passes in flight what layers keep, or, where they are computed again, their inputs and one layer;
* where the last stage takes the loss, the scores of the vocabulary: 6 bytes each in Megatron, whose loss overwrites
  them, 10 in torch, and 4 where one kernel takes the loss of scores in 16 bits (llm-foundry's default,
  ``fused_crossentropy`` in ``modeling_mpt.py``).

What is compared is what rows say they measured, three figures: torch's allocated bytes (Mist); reserved ones, with what
the allocator has cached besides (torchtitan); a monitor of the node (BigScience): reserved ones, and what driver,
context and communication take of the card. The last two are at most the device's memory: an allocator that has no more
gives its cache back.
"""

from __future__ import annotations

from dataclasses import replace

from published_experts import Experts
from published_hardware import cluster_of
from published_models import Sizes, parameters
from published_prices import Model, Stage, one_pass, stages_of
from published_rows import Row, node_of, passes_of
from published_software import Software

from shardwise.costs.cluster import Device

LOST = 0.04  # of a device's memory, between blocks of the allocator: the part of ``Device.reserve_bytes`` that is its
# Reserved for each byte that was allocated, at the peaks of steps of Llama, GPT-2, BERT and ViT on one H100 (torch
# 2.11, 2026-11-22): medians of six eager steps (1.02 to 1.11), six compiled ones (1.05 to 1.13) and four eager ones
# that compute every layer again (1.19 to 1.27).
EAGER, COMPILED, RECOMPUTED = 1.093, 1.058, 1.21
WEIGHTS, SHARDED, STATES = 2, 16, 12  # bytes a parameter
# Bytes a score of the vocabulary; in torch, where the software is none of these.
SCORE_OF = {"megatron": 6, "nemo": 6, "composer": 4}
SCORE = 10
SELECTIVE = "selective(attention core)"


def device_of(row: Row) -> Device:
    return cluster_of(row["gpu"], row["gpus"], node_of(row), row.get("interconnect") or "").device


def room(row: Row) -> float:
    """Bytes of a device that tensors may have."""
    device = device_of(row)
    return device.memory_bytes - device.reserve_bytes


def figure_of(row: Row) -> str:
    """Return which figure the memory of a row is."""
    name = row["framework"].casefold()
    return "reserved" if "torchtitan" in name else "monitored" if "deepspeed" in name else "allocated"


def measured_bytes(row: Row, allocated: float) -> float:
    """Return what the row's figure shows where tensors of ``allocated`` bytes are the peak."""
    device, figure = device_of(row), figure_of(row)
    if figure == "allocated":
        return allocated
    ratio = COMPILED if Software.of(row).compiled else EAGER
    reserved = allocated * (RECOMPUTED if row["recompute"] == "full" else ratio)
    beside = device.reserve_bytes - LOST * device.memory_bytes if figure == "monitored" else 0.0
    return min(reserved + beside, device.memory_bytes)


def peak_bytes(row: Row) -> float:
    """Tensors of the fullest device."""
    return max(_of_stage(row, place, stage) for place, stage in enumerate(stages_of(row)))


def _of_stage(row: Row, place: int, stage: Stage) -> float:
    arch, tp, pp, cp, vpp = row["arch"], row["tp"], row["pp"], row.get("cp") or 1, row.get("vpp") or 1
    model, is_last = Model.of(row, stage.micro_batch), place == pp - 1
    per_layer, end = parameters(row)
    ends = (place == 0) + (is_last and (pp > 1 or model.sizes is not None))
    tokens = stage.micro_batch * row["seq"] / cp
    inputs = 2 * tokens * arch["hidden"] / (tp if model.shape.splits_sequence else 1)
    kept = _kept(row, model) + (_masks(row, model) if model.software.dropout else 0.0)
    again = stage.again / max(stage.layers, 1)
    passes = passes_of(row, stage.micro_batch, stage.dp)
    in_flight = min(pp - place, passes) if vpp == 1 else min(pp + (pp - 1) / vpp, passes)
    saved = in_flight * stage.layers * (again * inputs + (1 - again) * kept) + kept * bool(again)
    name = row["framework"].casefold()
    of_score = next((size for word, size in SCORE_OF.items() if word in name), SCORE)
    scores = of_score * tokens * model.shape.vocab / tp * is_last
    return _state(row, stage, per_layer, per_layer * stage.layers + ends * end) + saved + scores


def _kept(row: Row, model: Model) -> float:
    """Bytes of a layer, as a plan keeps them, or fused kernels do. Attention that is computed again keeps no scores;
    what Megatron's sequence parallelism gathers is gathered again."""
    experts = Experts.of(row)  # tokens as they were sent and as they came back
    exchanged = 0.0 if experts is None else 2 * experts.exchange_bytes(row)
    if model.sizes is not None and model.sizes.latent is None and model.software.norms and not model.shape.scores:
        return _kept_fused(model, model.sizes) + exchanged
    scores = model.shape.scores and row["recompute"] != SELECTIVE
    recompute = "gathers" if model.shape.splits_sequence and model.tp > 1 else "none"
    one, two = (
        one_pass(replace(model, shape=replace(model.shape, scores=scores, layers=layers)), recompute)
        for layers in (1, 2)
    )
    return two.kept_bytes - one.kept_bytes + exchanged


def _kept_fused(model: Model, sizes: Sizes) -> float:
    """Inputs and results of both norms; queries, keys, values and their mixture; what meets the gate, and the result:
    a norm in one kernel keeps no float32 copy, a gate in one not its activation (``SwiGLUFunction`` of Mist and of
    flash-attn; Transformer Engine's ``LayerNormMLP``)."""
    shape = model.shape
    between = 4 * shape.width / (model.tp if shape.splits_sequence else 1)
    inside = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_size + (3 if sizes.gated else 2) * sizes.width
    return 2 * shape.batch * shape.sequence * (between + inside / model.tp)


def _masks(row: Row, model: Model) -> float:
    """Of dropout: a byte an element of a layer, where plans make them again."""
    shape = model.shape
    tokens = shape.batch * shape.sequence
    between = 2 * tokens * shape.width / (model.tp if shape.splits_sequence else 1)
    of_scores = shape.heads * tokens * shape.sequence / model.tp
    return between + of_scores * (shape.scores and row["recompute"] != SELECTIVE)


def _state(row: Row, stage: Stage, per_layer: float, held: float) -> float:
    """Parameters, gradients and states of ``held`` parameters."""
    software, replicas = Software.of(row), stage.dp * (row.get("cp") or 1)
    if software.shards:
        whole = 3 * 2 * per_layer if row["pp"] == 1 else (WEIGHTS + 4) * held
        return SHARDED * held / replicas + whole * (replicas > 1)
    name = row["framework"].casefold()
    gradients = 4 if "megatron-lm" in name else 2
    gradients += 4 if "fp32 grad" in row["precision"] else 0
    states = STATES + (4 if "deepspeed" in name else 0)
    on_host = stage.stored[5] if len(stage.stored) > 5 else 0.0
    split = bool(stage.stored[2]) if len(stage.stored) > 2 else bool(row["zero"])
    experts = Experts.of(row)
    own = 0.0 if experts is None else experts.numel(row["arch"]["hidden"]) * stage.layers
    parts = (held - own) / replicas + (own / experts.replicas(row) if experts is not None else 0.0)
    return held * (WEIGHTS + gradients) + states * (1 - on_host) * (parts if split else held)
