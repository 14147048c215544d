"""Predicted against published memory of training, row by row: ``make bench-published-memory``.

``--data`` is a file of published runs (``published_runs.json``: a list of objects with ``family``). Two families are
read, each by its own definition of memory:

* ``korthikanti2022_fig1_memory``: figure 1 of Korthikanti et al. (2022), bytes by formula. Parameters (float32 ones and
  those in 16 bits), gradients and optimizer of the layers of the first stage (the figure leaves embeddings out);
  activations of a layer times their number, where one pass is in flight. The figure has masks of dropout in it, a byte
  an element, which plans make again in backward from their seed: such rows are printed without and with them.
* ``megatron_golden``: what torch's allocator had allocated after a step, and at its peak, on the last rank of tests of
  Megatron-LM with tiny models. After a step that is: weights in 16 bits; Megatron's buffer of gradients, which is whole
  on every rank also where the optimizer is distributed; float32 weights and both states of Adam, in parts there; and
  workspaces, which are no part of a plan's peak but of its reserve (``workspaces``): for models so small an eighth to a
  quarter of all. Under stages the last rank has the last one, with a copy of the table of words, and holds what it was
  sent last (``received``). The peak is where the loss is taken: besides those, what forward keeps, what Megatron's own
  operators keep and plans make again or never make, and the scores of the vocabulary in 16 bits and in float32, which
  Megatron's loss overwrites (``at_loss``). Whether attention's scores are kept is chosen by variables of the
  environment, which the rows do not have: both are printed, and how many rows are near to one of them, as both are a
  fifth apart at least.

The same model is built here without memory and split as Megatron splits it (columns, then rows, over one axis; ZeRO 1
for the distributed optimizer). Rows that are not priced are counted by what that would take.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from published_rows import family_of, incomplete, is_count, is_positive, once, read
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import MemoryEstimate, memory_of
from shardwise.costs.prices import Prices
from shardwise.graph import head_loss
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.search.zero import Zero

head_loss.FEWEST_LOGITS = sys.maxsize  # the software that was measured holds its logits whole

GIB = 2**30
PEAKS = ("peak, attention's scores not kept", "peak, attention's scores kept")
DROPOUT = 0.1  # Megatron's default
VOCABULARY = 50_257  # of GPT-2, whose files these tests name; padded as Megatron pads it
MEGATRON = {"*.qkv": "n@tp", "*.out": "k@tp", "*.up": "n@tp", "*.down": "k@tp"}
# Between the products, where the sequence is not split.
WHOLE = dict.fromkeys(("*.before", "*.between", "*.after_out", "*.after_down"), "I@tp")
# What rows and their command lines must say, and groups that are of one rank where they do not.
TEXTS = ("test", "group", "env", "platform")
SIZES = ("hidden-size", "num-attention-heads", "num-layers", "seq-length", "micro-batch-size")
DEGREES = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "num-layers-per-virtual-pipeline-stage", "num-distributed-optimizer-instances",
)  # fmt: skip
# Options of Megatron's command line -> what stands between them and a price here.
MISSING = {
    "num-experts": "experts in groups of ranks of their own",
    "fp8-format": "weights in float8 beside those in 16 bits",
    "use-megatron-fsdp": "buffers of Megatron's own FSDP",
    "data-parallel-sharding-strategy": "buffers of Megatron's own FSDP",
    "grad-reduce-in-bf16": "a buffer of gradients in 16 bits",
    "fp16": "a loss scaler, and gradients in 16 bits",
    "qk-head-dim": "latent attention",
    "mtp-num-layers": "prediction of several tokens",
    "ffn-hidden-size": "another width inside of layers",
    "swiglu": "gated layers",
    "group-query-attention": "keys and values of groups",
    "untie-embeddings-and-output-weights": "a table and a head of their own",
    "decoder-first-pipeline-num-layers": "stages of different lengths",
    "decoder-last-pipeline-num-layers": "stages of different lengths",
    "pipeline-model-parallel-layout": "stages of different lengths",
    "position-embedding-type": "other positions",
    "vocab-size": "another vocabulary",
    "make-vocab-size-divisible-by": "another vocabulary",
}
# Of the peak alone.
MISSING_AT_PEAK = {
    "context-parallel-size": "what context parallelism keeps of keys and values",
    "num-layers-per-virtual-pipeline-stage": "several stages of a rank",
    "recompute-granularity": "which random numbers and inputs Megatron's recompute keeps",
    "cuda-graph-impl": "the pools of CUDA graphs",
}
# Names of tests, for what is not among the options of the rows.
MISSING_BY_NAME = {
    "reshard": "another mesh from the middle of the run on",
    "account_for_embedding": "stages of different lengths",
}
MISSING_AT_PEAK_BY_NAME = {
    "cross_entropy_loss_fusion": "what a fused loss keeps",
    "defer_embedding_wgrad": "gradients of the table that wait",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of Megatron. ``scores``: attention operator by operator, so that its scores are kept;
    ``splits_sequence``: sequence parallelism; ``vocab``: 0: no embedding and no loss; ``is_last``: the last stage of
    several, which has the table for its scores and looks nothing up."""

    width: int
    heads: int
    layers: int
    sequence: int
    batch: int
    scores: bool
    splits_sequence: bool
    vocab: int = 0
    qk_norm: bool = False
    is_last: bool = False


class Layer(nn.Module):
    """A layer of Megatron's GPT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.of_scores, self.after_out, self.after_down = (nn.Dropout(DROPOUT) for _ in range(3))
        size = width // shape.heads
        self.of_q, self.of_k = (nn.LayerNorm(size) if shape.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(2, (3, self.shape.heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = self._attention(self.of_q(q), self.of_k(k), v)
        x = x + self.after_out(self.out(mixed.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.after_down(self.down(F.gelu(self.up(self.between(x)))))
        return y

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.shape.scores:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        shares: Tensor = self.of_scores(torch.softmax(q @ k.transpose(2, 3), -1))  # the scale is fused into a product
        return shares @ v


class Gpt(nn.Module):
    """Layers, maybe between an embedding and the scores of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.vocab = shape.vocab
        self.is_last = shape.is_last
        if shape.vocab:
            if shape.is_last:
                self.head = nn.Linear(shape.width, shape.vocab, bias=False)
            else:
                self.tokens = nn.Embedding(shape.vocab, shape.width)
                self.positions = nn.Embedding(shape.sequence, shape.width)
            self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.vocab and not self.is_last:
            x = F.dropout(self.tokens(x) + self.positions.weight, DROPOUT)
        for layer in self.layers:
            x = layer(x)
        if not self.vocab:
            return x.float().mean()
        x = self.norm(x)
        scores = self.head(x) if self.is_last else x @ self.tokens.weight.t()
        return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


MIXED = sw.Precision(torch.bfloat16, torch.float32)


@cache
def memory(shape: Shape, tp: int, dp: int = 1, zero: int = 0, over: int = 1) -> MemoryEstimate:
    """Of Megatron's plan in 16 bits with float32 weights, gradients and Adam. ``shape.batch``: of all replicas;
    ``zero``: 1: states are split over the replicas, or over each of ``over`` parts of these."""
    with torch.device("meta"):
        model = Gpt(shape).to(torch.bfloat16)
        size = (shape.batch, shape.sequence)
        labels = torch.empty(size, dtype=torch.int64)
        looks_up = shape.vocab and not shape.is_last
        x = labels if looks_up else torch.empty(*size, shape.width, dtype=torch.bfloat16)
    named = {"copies": over, "dp": dp // over, "tp": tp}
    axes = {name: count for name, count in named.items() if count > 1 or name == "tp"}
    strategies = MEGATRON | ({} if shape.splits_sequence else WHOLE)
    if shape.vocab:
        strategies |= {"tokens": "v@tp"} if looks_up else {"head": "n@tp"}
    split = Zero(1, over=("dp",)) if zero and "dp" in axes else None
    cluster = Cluster.load("h100-16x8").with_devices(tp * dp)
    plan = sw.plan(
        model, (x, labels), cluster, mesh=sw.Mesh(axes), strategies=strategies, search="sharding_propagation",
        precision=MIXED, zero=split,
    )  # fmt: skip
    spmd = program_of(plan, capture(model, (x, labels), {}, precision=MIXED).graph, training=True)
    prices = Prices(Links(cluster, plan.mesh), "adamw fused")
    return memory_of(spmd, prices)


def static(own: MemoryEstimate, whole: MemoryEstimate) -> int:
    """Parameters in float32 and in 16 bits, gradients, optimizer states: what Megatron keeps between steps. ``whole``:
    of the plan without ZeRO, as the weights in 16 bits (here a step casts them anew) and the buffer of gradients are
    whole in any case."""
    parts, full = own.peak_of["update"].parts, whole.peak_of["update"].parts
    return parts["parameters"] + parts["optimizer states"] + full["parameters"] // 2 + full["gradients"]


def at_loss(shape: Shape, tp: int, dp: int, dropout: float) -> float:
    """What a rank of Megatron holds where the loss is taken, beside parameters, gradients and states. ``shape.batch``:
    of all ``dp`` replicas; ``dropout``: of the values between layers.

    Kept by layers; three values as wide as the model (the input of the first layer, and that of the last norm, and of
    the scores); a byte an element for masks of dropout, which plans make again: two a layer and one of the embedding;
    where attention is a single kernel, its result a second time (a copy in the order of the sequence), else masks of
    its scores beside these; the mask of attention, a byte a score, which the loader makes; and 6 bytes a score
    of the vocabulary: in 16 bits, and in float32, which becomes the loss's gradient in place."""
    body = memory(replace(shape, vocab=0), tp, dp)
    batch = shape.batch // dp
    tokens = batch * shape.sequence
    value = tokens * shape.width / (tp if shape.splits_sequence else 1)
    masks = value * (2 * shape.layers + (not shape.is_last)) * (dropout > 0)
    scores = shape.heads / tp * batch * shape.sequence**2
    attention = scores if shape.scores else 2 * tokens * shape.width / tp
    loader = batch * shape.sequence**2
    return body.kept_bytes + 3 * 2 * value + masks + shape.layers * attention + loader + 6 * tokens * shape.vocab / tp


def received(args: Mapping[str, Any]) -> float:
    """Bytes of the last messages between stages, which Megatron's modules hold after a step: what each stage of the
    last rank was given (``set_input_tensor``), and its gradient, which is retained."""
    pp = args.get("pipeline-model-parallel-size", 1)
    if pp == 1:
        return 0.0
    per_rank = args["num-layers"] // pp
    stages = per_rank // args.get("num-layers-per-virtual-pipeline-stage", per_rank)
    parts = args.get("context-parallel-size", 1)
    parts *= args.get("tensor-model-parallel-size", 1) if args.get("sequence-parallel") else 1
    return stages * 2 * 2 * args["micro-batch-size"] * args["seq-length"] * args["hidden-size"] / parts


def workspaces(row: Mapping[str, Any]) -> int:
    """Bytes that libraries hold on the GPU of a row, which torch's allocator counts. cuBLAS has a workspace for each of
    two threads, forward's and backward's: 32 MiB with the setting for repeatable sums (``:4096:8``) and from Hopper on,
    else 8,320 KiB (torch, "CUBLAS_WORKSPACE_CONFIG"). Transformer Engine has one: 32 MiB from Hopper on, else 4. Sums
    are taken to be repeatable unless the test's name says otherwise, as its environment is not in the rows."""
    mib = 2**20
    is_new = row["platform"] != "a100" if row["env"] not in ("lts", "dev") else False
    repeats = "nondeterministic" not in row["test"]
    return int(2 * (32 * mib if is_new or repeats else 8320 * 1024) + (32 if is_new else 4) * mib)


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure in bytes beside the prediction."""

    name: str
    what: str
    predicted: float
    published: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def is_near(ratio: float) -> bool:
    """Whether a prediction is at most 2 % under what was published, and 5 % over it."""
    return 0.98 <= ratio <= 1.05


def figure_1(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Row], Counter[str]]:
    """Rows of Korthikanti et al. (2022), and how many figures cannot be predicted, by what they need."""
    found, missing = [], Counter[str]()
    for row in rows:
        gib = [float(number) for number in re.findall(r"(\d+\.?\d*) GiB", str(row.get("notes")))]
        if reason := incomplete(row) or ("" if len(gib) == 2 else "two figures in its notes, which are not there"):
            missing[reason] += 1
            continue
        arch, tp, pp = row["arch"], row["tp"], row["pp"]
        kept, splits_sequence = row["recompute"] == "none", bool(row.get("sequence_parallel"))
        per_layer = [
            memory(
                Shape(arch["hidden"], arch["heads"], count, row["seq"], row["micro_batch"], kept, splits_sequence),
                tp,
            )
            for count in (1, 2)
        ]
        layers = arch["layers"] // pp
        one, two = (static(own, own) for own in per_layer)
        state = (two - one) * layers
        found.append(Row(str(row.get("id")), "parameters, gradients, states", state, gib[0] * GIB))
        if pp > 1:
            missing["activations of several passes in flight (pipelines)"] += 1
        elif not kept:
            missing["activations with recompute of attention, gathered again in backward"] += 1
        else:
            saved = (per_layer[1].kept_bytes - per_layer[0].kept_bytes) * layers
            found.append(Row(str(row.get("id")), "activations", saved, gib[1] * GIB))
            tokens = row["seq"] * row["micro_batch"]
            masks = layers * tokens * (2 * arch["hidden"] + arch["heads"] * row["seq"] / tp)
            found.append(Row(str(row.get("id")), "activations and masks of dropout", saved + masks, gib[1] * GIB))
    return found, missing


def golden(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Row], Counter[str]]:
    """Rows of Megatron's own tests, and how many figures cannot be priced, by what they need."""
    found, missing = [], Counter[str]()
    for row in rows:
        if reason := _unpriced(row):
            missing[reason] += 2
            continue
        args = row["args"]
        tp, pp = args.get("tensor-model-parallel-size", 1), args.get("pipeline-model-parallel-size", 1)
        cp, multiple = args.get("context-parallel-size", 1), 128 * tp
        dp = row["gpus"] // (tp * pp * cp)
        zero = int(bool(args.get("use-distributed-optimizer")))
        over = args.get("num-distributed-optimizer-instances", 1) if zero else 1
        shape = Shape(
            width=args["hidden-size"],
            heads=args["num-attention-heads"],
            layers=args["num-layers"] // pp,
            sequence=args["seq-length"],
            batch=args["micro-batch-size"] * dp * cp,
            scores=False,
            splits_sequence=bool(args.get("sequence-parallel")),
            vocab=-(-VOCABULARY // multiple) * multiple,
            qk_norm=bool(args.get("qk-layernorm")),
            is_last=pp > 1,
        )
        # Context parallelism copies parameters, and splits states, as more replicas do.
        own, plain = memory(shape, tp, dp * cp, zero, over), memory(shape, tp, dp * cp)
        held = static(own, plain) + workspaces(row)
        found.append(Row(str(row.get("id")), "after a step", held + received(args), row["mem_allocated_bytes"]))
        named = _missing(row, MISSING_AT_PEAK, MISSING_AT_PEAK_BY_NAME)
        if named or not is_positive(row.get("mem_max_allocated_bytes")):
            missing[f"at the peak, {named[0]}" if named else "the peak, not stated"] += 1
            continue
        for scores in (False, True):
            kept = at_loss(replace(shape, scores=scores), tp, dp * cp, args.get("hidden-dropout", DROPOUT))
            found.append(Row(str(row.get("id")), PEAKS[scores], held + kept, row["mem_max_allocated_bytes"]))
    return found, missing


def _unpriced(row: Mapping[str, Any]) -> str:
    """What a row needs that is not priced, or that it does not say; empty where it can be priced."""
    args = row.get("args")
    if not isinstance(args, Mapping) or any(not isinstance(row.get(name), str) for name in TEXTS):
        return "the command line or a name, not stated"
    if row["group"] != "gpt":
        return f"a model of another kind ({row['group']})"
    if not is_count(row.get("gpus")) or not is_positive(row.get("mem_allocated_bytes")):
        return "the number of GPUs or the memory, not stated"
    if any(not is_count(args.get(name)) for name in SIZES) or any(not is_count(args.get(name, 1)) for name in DEGREES):
        return "a size of the model or of a group, not stated"
    if row["gpus"] % prod(args.get(name, 1) for name in DEGREES[:3]):
        return "groups that do not divide the number of GPUs"
    if not isinstance(args.get("hidden-dropout", DROPOUT), int | float):
        return "a number for its dropout"
    options = dict(MISSING)
    if args.get("pipeline-model-parallel-size", 1) > 1:  # the last stage has one table, tied or not
        del options["untie-embeddings-and-output-weights"]
    found = _missing(row, options, MISSING_BY_NAME)
    return found[0] if found else ""


def _missing(row: Mapping[str, Any], options: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """What the options of a row, which are those that it sets, and the name of its test ask for beside a price."""
    asked = [what for option, what in options.items() if row["args"].get(option) not in (None, False)]
    return asked + [what for name, what in names.items() if name in row["test"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="published_runs.json")
    rows, repeated = once(read(parser.parse_args(arguments).data))
    print(
        "| family | row | memory | predicted GiB | published GiB | predicted / published |\n|---|---|---|---|---|---|"
    )
    for family, priced in (("korthikanti2022_fig1_memory", figure_1), ("megatron_golden", golden)):
        own = [row for row in rows if family_of(row) == family]
        found, missing = priced(own)
        for line in found:
            gib = f"{line.predicted / GIB:.3f} | {line.published / GIB:.3f}"
            print(f"| {family} | {line.name} | {line.what} | {gib} | {line.ratio:.3f} |")
        print(f"| {family} | {len(own)} rows: {len(found)} figures predicted, {missing.total()} not | | | | |")
        for what in dict.fromkeys(line.what for line in found):
            shares = sorted(line.ratio for line in found if line.what == what)
            near = sum(map(is_near, shares))
            middle = shares[len(shares) // 2]
            print(
                f"| {family} | {what}: {len(shares)} figures, {near} of them at most 2 % under and 5 % over, "
                f"{shares[0]:.3f} to {shares[-1]:.3f}, median {middle:.3f} | | | | |"
            )
        pairs = zip(*([line for line in found if line.what == what] for what in PEAKS), strict=True)
        nearer = [min(pair, key=lambda line: abs(line.ratio - 1)).ratio for pair in pairs]
        if nearer:
            print(
                f"| {family} | peak, the nearer of both: {len(nearer)} figures, {sum(map(is_near, nearer))} of them at "
                f"most 2 % under and 5 % over, {min(nearer):.3f} to {max(nearer):.3f} | | | | |"
            )
        for what, count in missing.most_common():
            print(f"| {family} | not: {count} need {what} | | | | |")
    if repeated:
        print(f"| all | not: {repeated} rows that were there before | | | | |")


if __name__ == "__main__":
    main()
