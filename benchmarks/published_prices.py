"""What a published run is predicted to take, with its own settings (for ``published_runs.py``).

The layers of a row are planned with columns and rows split over ``tp`` (sequence parallelism where the row has it), and
one pass of one and of two layers is simulated, so that their difference is a layer and the rest embedding, head and
loss (on the first and the last stage). The rest of a step is closed form:

* a layer's forward and its backward each begin on an idle device (vTrain's runs on one node are exact sums of layers),
  and take as long as their kernels and messages, one after the other, each when the host has started it (where it
  blocks: after what the host takes);
* stages: one pass after the other (1F1B): ``passes`` times the slowest, and the others once, by the chunks of a stage;
  a stage sends and receives at once, or (DeepSpeed) one message after the other, and gathers what arrives in parts;
* full recompute: forward once more; selective: attention from its scores on once more; of operators (torchtitan's
  ``op``): every second product once more, counted as half of forward;
* gradients are added up from pass to pass, and reduced after the last one (Megatron; those of experts over the devices
  that have them), or parameters are gathered and gradients scattered beside each layer's computation (FSDP), of which
  the longer counts, and copied for that;
* context parallelism: tokens are split in their order (assumed where no source says what balances ranks), so that the
  last rank's queries meet all keys, where those of the first see half of their own; Megatron's ranks have early and
  late tokens, and meet as many keys;
* float8: products of the layers at that rate, their operands and results moved once more, to be scaled and cast;
* the update, of the stage's parameters, or of a rank's part of them (ZeRO).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from compiled_prices import price_section
from published_experts import Experts, uneven_experts
from published_hardware import cluster_of, device_named, likened, node_rate
from published_memory import MEGATRON, WHOLE, Gpt, Shape
from published_messages import Moves, beside
from published_models import Llama, Sizes, parameters, sizes_of
from published_rows import (
    LATENT,
    RECOMPUTED,
    Row,
    dtype_of,
    incomplete,
    is_count,
    is_ignored,
    node_of,
    passes_of,
    untimed,
)
from published_software import KNOWN, Software, attending

import shardwise as sw
from shardwise.costs.cluster import Cluster, Device
from shardwise.costs.collectives import Links
from shardwise.costs.kernels import KernelWork
from shardwise.costs.memory import busiest_program, memory_of_program
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import Event, simulate_program
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.compiled import compiled_program

# The kernel of apex for the softmax of causal scores reads half of them: on an L4, 67 million scores take 0.847 ms, and
# 2.307 ms backward (Dazz993/Mist, commit 3895557, mist/node_database/cache_NVIDIA_L4). Megatron has it as well, but
# what it reaches on an A100 is not known; with these parts of the bandwidth its runs were predicted worse.
CAUSAL_SOFTMAX = {"softmax": 1.05, "softmax_backward": 0.58}
# A product whose rows do not start at multiples of 16 bytes: half the rate (in nanoGPT, on A100, a vocabulary of 50,304
# instead of 50,257 made whole steps of GPT-2 a quarter faster). A third of it describes the heads of vTrain's runs in
# one node better, and half of these runs, which were not looked at for that, worse as a whole. A batch of them: without
# tensor cores, at the rate of float32 (cuBLAS of 2021; BigScience's chronicle compares heads of 108 to 216 elements).
ROW_BYTES = 16
UNALIGNED = 2.0
# Operators of attention, from its scores on, by their names.
OF_CORE = re.compile(r"layers\.\d+/(matmul|softmax|dropout|scaled_dot_product_attention)(_\d+)?$")
# What a row's list of stages of their own has of each.
OF_STAGES = re.compile(r"layer_partitions (\[[\d, ]*\]), .*?per-stage \[[^]]*\] (\[\[[\d., ]*\](?:, \[[\d., ]*\])*\])")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a row on the ``tp`` devices that its layers are split over, with a micro-batch of it. ``sizes``: of a
    Llama (None: a GPT-2); ``attended``: of the keys that whole causal attention meets, those of a window."""

    shape: Shape
    sizes: Sizes | None
    tp: int
    gpu: str
    node: int
    interconnect: str
    software: Software
    cp: int = 1
    attended: float = 1.0
    dtype: str = "bf16"

    @staticmethod
    def of(row: Row, micro_batch: int) -> Model:
        arch, tp, cp, software = row["arch"], row["tp"], row.get("cp") or 1, Software.of(row)
        # Where nothing splits the table it is as stated: heads of vTrain's runs in one node take twice as long and more
        # without tensor parallelism.
        vocab = arch["vocab"] if tp == 1 else ceil(arch["vocab"] / (128 * tp)) * 128 * tp
        shape = Shape(
            arch["hidden"], arch["heads"], 1, row["seq"] // cp, micro_batch, software.scores,
            bool(row.get("sequence_parallel")), vocab,
        )  # fmt: skip
        window = min((arch.get("window") or row["seq"]) / row["seq"], 1.0)
        node = max(size for size in range(1, min(node_of(row), tp) + 1) if not tp % size)
        return Model(
            shape, sizes_of(row), tp, row["gpu"], node, row.get("interconnect") or "", software, cp,
            2 * window - window**2, dtype_of(row["precision"]),
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """How many times the scores that a rank's queries have with their own keys, half of which count, the slowest
        rank computes: all with the last queries of an order, or as many as all others where ranks have early and late
        ones (``get_batch_on_this_cp_rank`` of Megatron-LM)."""
        return self.cp if self.software.balances else 2 * self.cp - 1

    @property
    def half(self) -> torch.dtype:
        if self.dtype in ("f32", "tf32"):
            return torch.float32
        return torch.float16 if device_named(self.gpu) == "v100" else torch.bfloat16  # as long where both exist

    def cluster(self) -> Cluster:
        return cluster_of(self.gpu, self.tp, self.node, self.interconnect)


@dataclass(frozen=True, slots=True)
class Half:
    """Forward or backward of a pass: ``busy`` seconds of kernels and messages, one after the other, and how many of
    them the host starts."""

    busy: float
    started: int

    def __sub__(self, other: Half) -> Half:
        return Half(self.busy - other.busy, self.started - other.started)

    def seconds(self, launch: float, order: Sequence[float] = (), blocks: bool = False) -> float:
        """Where the host takes ``launch`` seconds to start one, of a device that has nothing else to do before.
        ``order``: what each of them takes; ``blocks``: the host starts one when the one before is done."""
        if blocks:
            return self.busy + launch * self.started
        idle = taken = 0.0
        for number, own in enumerate(order, 1):
            idle = max(idle, launch * number - taken)
            taken += own
        return max(self.busy + idle, launch * self.started)


@dataclass(frozen=True)
class OwnPrices(Prices):
    """Prices of a model as its software computes it: products in float8, attention of split queries to all keys, a
    kernel for the softmax of causal scores."""

    model: Model | None = None

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.model))

    def kernel(self, work: KernelWork) -> float:
        assert self.model is not None
        if work.kind in ("attention", "attention_backward"):
            return self.model.attended * self.model.blocks * super().kernel(work)
        if self.model.software.fused and work.kind in CAUSAL_SOFTMAX and work.dtype != "f32":  # not that of the loss
            rate = self.device.memory_bandwidth * CAUSAL_SOFTMAX[work.kind]
            return self.device.kernel_latency + work.num_bytes / rate
        if self.model.dtype == "tf32" and work.flops:
            return super().kernel(replace(work, dtype="tf32"))
        if not self.model.software.float8 or not work.flops or work.kind:
            return super().kernel(work)
        return super().kernel(replace(work, dtype="f8")) + self.moved(work.num_bytes)


def device_of(cluster: Cluster, software: Software) -> Device:
    """Which starts kernels at once: what its host takes is counted apart."""
    return attending(replace(cluster.device, launch=0.0), software.attention)


@dataclass(frozen=True, slots=True)
class OnePass:
    """Forward and backward of a pass, what of both comes before the first layer (``embedding``), and the bytes that a
    device keeps between them. ``core``: seconds of forward in attention, from its scores on; ``orders``: of the last
    layer, forward and backward, what kernels and messages take, in order."""

    halves: tuple[Half, Half]
    embedding: tuple[Half, Half]
    kept_bytes: float
    core: float
    orders: tuple[list[float], list[float]]

    @staticmethod
    def of(events: Sequence[Event], kept_bytes: float, layers: int) -> OnePass:
        """From what a step of so many layers does."""
        forward, backward = ([event for event in events if event.part == part] for part in ("forward", "backward"))
        core = sum(event.seconds for event in forward if OF_CORE.search(event.name))
        orders = _order(forward, f"layers.{layers - 1}"), _order(backward, f"layers.{layers - 1}")
        embedding = _half(_until_layers(forward)), _half(_until_layers(backward[::-1]))
        return OnePass((_half(forward), _half(backward)), embedding, kept_bytes, core, orders)


@cache
def one_pass(model: Model, recompute: str) -> OnePass:
    """A pass of a model whose layers are split over devices of one node. ``recompute``: as ``sw.plan`` takes it."""
    shape, software = model.shape, model.software
    with torch.device("meta"):
        module: nn.Module = Llama(shape, model.sizes) if model.sizes else Gpt(shape)
        module = module.to(model.half)
        for part in module.modules():
            if not software.dropout and isinstance(part, nn.Dropout):
                part.p = 0.0
        ids = torch.empty(shape.batch, shape.sequence, dtype=torch.int64)
    cluster = replace(model.cluster(), device=device_of(model.cluster(), software))
    whole = {} if shape.splits_sequence or not software.scores else WHOLE
    if not software.dropout:
        whole = {name: strategy for name, strategy in whole.items() if not name.startswith("*.after")}
    strategies = model.sizes.strategies() if model.sizes else MEGATRON | whole
    plan = sw.plan(
        module, (ids, ids), cluster, mesh=sw.Mesh(tp=model.tp), strategies=strategies | {"tokens": "v@tp"},
        search="sharding_propagation", recompute=recompute,
    )  # fmt: skip
    spmd = program_of(plan, capture(module, (ids, ids), {}).graph, training=True)
    program = busiest_program(spmd, VjpCache())
    if software.compiled:
        # What is sent stays outside of what is compiled; of the ranks only the place is asked.
        nobody: Any = SimpleNamespace(coordinates=spmd.mesh.coordinates(program.rank))
        program = compiled_program(program, nobody, torch.device("cpu"), generate=price_section)
    prices = OwnPrices(Links(cluster, plan.mesh), "none", model=model)
    kept_bytes = memory_of_program(program, prices).kept_bytes
    events = simulate_program(program, prices).events
    if software.overlaps:  # all but the first part of a message is sent beside the product that the parts belong to
        events = [replace(event, seconds=event.seconds / model.tp) if event.stream else event for event in events]
    return OnePass.of(events, kept_bytes, shape.layers)


def _half(events: Sequence[Event]) -> Half:
    return Half(sum(event.seconds for event in events), len(events))


def _until_layers(events: Sequence[Event]) -> list[Event]:
    """Those before the first of a layer; none where layers are not told apart."""
    found = list(takewhile(lambda event: not event.name.startswith("layers."), events))
    return found if len(found) < len(events) else []


def _order(events: Sequence[Event], layer: str) -> list[float]:
    """From the first of this layer to the last, what each takes; nothing where layers are not told apart."""
    own = [number for number, event in enumerate(events) if event.name.startswith(layer)]
    return [event.seconds for event in events[own[0] : own[-1] + 1]] if own else []


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of a layer, forward and backward, of what comes before and behind layers, and of a layer's attention from
    its scores on."""

    forward: float
    backward: float
    embedding: float
    head: float
    core: float


def pass_of(row: Row, micro_batch: int) -> Pass:
    """A pass of a row's micro-batch."""
    model = Model.of(row, micro_batch)
    device, software, shape = model.cluster().device, model.software, model.shape
    launch = device.launch if software.launch is None else software.launch
    one, two = (one_pass(replace(model, shape=replace(shape, layers=layers)), "none") for layers in (1, 2))
    pairs = list(zip(one.halves, two.halves, strict=True))
    tokens = shape.batch * shape.sequence
    blocks = software.blocks
    layer = [(b - a).seconds(launch, order, blocks) for (a, b), order in zip(pairs, two.orders, strict=True)]
    embedding = sum(half.seconds(launch, blocks=blocks) for half in one.embedding)
    head = max(sum((a - (b - a)).seconds(launch, blocks=blocks) for a, b in pairs) - embedding, 0.0)
    if shape.vocab * model.half.itemsize % ROW_BYTES:
        head += (UNALIGNED - 1) * 6 * tokens * shape.width * shape.vocab / model.tp / device.matmul_flops("bf16")
    if shape.scores and shape.width // shape.heads * model.half.itemsize % ROW_BYTES:
        products = 4 * tokens * shape.sequence * shape.width / model.tp
        more = products * (1 / device.matmul_flops("f32") - 1 / device.matmul_flops("bf16"))
        layer = [layer[0] + more, layer[1] + 2 * more]
    return Pass(*layer, embedding, head, two.core - one.core)


@dataclass(frozen=True, slots=True)
class Stage:
    """``layers`` of a stage, how many forwards of them are computed again, and of what micro-batch on how many
    replicas. ``stored``: where a row says it of a stage, whether parameters, gradients and states are split over
    replicas, and which parts of these and of activations wait on the host."""

    layers: int
    again: float
    micro_batch: int
    dp: int
    stored: tuple[float, ...] = ()


def stages_of(row: Row) -> list[Stage]:
    """The stages of a row, the last one with the head, and with what is left where layers do not divide (as BigScience
    says of DeepSpeed: 78 layers in 12 stages are 11 times 7 and one), unless they do with embedding and head as a layer
    each (its ``type:transformer|embedding``; ``account_for_embedding_in_pipeline_split`` of Megatron). Where they
    differ otherwise, the row's notes list them; empty where these cannot be read."""
    recompute, pp = row["recompute"], row["pp"]
    if not recompute.startswith("per stage"):
        total, again = row["arch"]["layers"], RECOMPUTED[recompute]
        chunks = pp * (row.get("vpp") or 1)
        if total % chunks and not (total + 2) % chunks:  # embedding and head count as layers
            counts = [(total + 2) // pp - (number == 0) - (number + 1 == pp) for number in range(pp)]
        else:
            most = ceil(total / pp)
            counts = [max(0, min(most, total - most * number)) for number in range(pp)]
        return [Stage(layers, again * layers, row["micro_batch"], row["dp"]) for layers in counts]
    found = OF_STAGES.search(row.get("notes") or "")
    again = re.fullmatch(r"per stage: (\[[\d, ]*\])", recompute)
    if found is None or again is None:
        return []
    try:
        layers, counts, own = (json.loads(text) for text in (found[1], again[1], found[2]))
    except ValueError:
        return []
    if not len(layers) == len(counts) == len(own) == pp or sum(layers) != row["arch"]["layers"]:
        return []
    if any(len(one) < 2 or not all(is_count(value) for value in one[:2]) for one in own):
        return []
    return [Stage(n, count, *one[:2], tuple(one[3:])) for n, count, one in zip(layers, counts, own, strict=True)]


def unpriced(row: Any) -> str:
    """Why the seconds of a row cannot be predicted or compared; empty where they can."""
    return untimed(row) or unplanned(row)


def unplanned(row: Any) -> str:
    """Why the setting of a row cannot be priced; empty where it can."""
    if missing := incomplete(row):
        return missing
    if not device_named(row["gpu"]):
        return f"no bundled device, nor one like it: {row['gpu']}"
    if node_rate(row.get("interconnect") or "") == 0:
        return "interconnect: a network without bandwidth"
    if problem := uneven_experts(row):
        return problem
    if not stages_of(row):
        return "stages that differ and are not listed"
    if row["arch"]["hidden"] % row["arch"]["heads"] and not row["arch"].get("head_dim"):
        return "a width that its heads do not divide"
    if row["arch"]["vocab"] < row["tp"]:
        return "a vocabulary smaller than tp"
    if row["arch"].get("kv_lora_rank") and not all(row["arch"].get(name) for name in LATENT[2:]):
        return "latent attention without the sizes of its heads"
    return ""


def approximated(row: Row) -> str:
    """What of a row is priced by a rule of thumb; empty where nothing is."""
    said = []
    if dtype_of(row["precision"]) == "f8":
        said.append("fp8: products at its rate, operands and results moved once more")
    if "fp4" in row["precision"].casefold():
        said.append("fp4: at the rate of fp8")
    if other := likened(row["gpu"]):
        said.append(other)
    said += _padded(row)
    if (row.get("cp") or 1) > 1:
        said.append("cp: keys and values arrive beside attention")
    if not any(known in row["framework"].casefold() for known in KNOWN):
        said.append(f"software: {row['framework']}: eager, attention in one kernel, no dropout")
    if row["arch"].get("experts"):
        said.append("experts: even routing, exchanges beside nothing")
    if "offload" in (row.get("notes") or ""):
        said.append("offloading: beside the computation")
    return "; ".join(said)


def _padded(row: Row) -> list[str]:
    """Return what of a row is priced as more than it states, or not at all."""
    arch, tp, said = row["arch"], row["tp"], []
    if arch["heads"] % tp or (arch["kv_heads"] % tp and tp % arch["kv_heads"]):
        said.append("heads: padded to what tp divides")
    if row["global_batch"] % (row["micro_batch"] * row["dp"]):
        said.append("global_batch: a last pass as long as the others")
    if arch.get("kv_lora_rank"):
        said.append("latent attention: every layer alike")
    if ignored := sorted(name for name, value in arch.items() if value and is_ignored(name, value)):
        said.append(f"not in the price: arch.{', arch.'.join(ignored)}")
    return said


def seconds_of(row: Row) -> float:
    """The predicted step."""
    return sum(terms_of(row).values())


def terms_of(row: Row) -> dict[str, float]:
    """Return the seconds of a predicted step by what they go to: those of the slowest stage for all passes, the others'
    for one (``bubble``), and what is done once."""
    cp, vpp, software = row.get("cp") or 1, row.get("vpp") or 1, Software.of(row)
    cluster = cluster_of(row["gpu"], row["gpus"], node_of(row), row.get("interconnect") or "")
    moves, (per_layer, table) = Moves.of(row, cluster), parameters(row)
    passes, is_fsdp = passes_of(row, row["micro_batch"], row["dp"]), software.shards and row["pp"] == 1
    experts = Experts.of(row)
    experts_numel = 0.0 if experts is None else experts.numel(row["arch"]["hidden"])
    stages, once = [], []
    for number, stage in enumerate(stages_of(row)):
        is_end = [number == 0, number + 1 == row["pp"]]
        terms = _pass_terms(row, stage, moves, passes, 2 if vpp > 1 else 2 - sum(is_end))
        own = pass_of(row, stage.micro_batch)
        terms["embedding and head"] = own.embedding * is_end[0] + own.head * is_end[1]
        if any(is_end) and passes > 1 and not is_fsdp:
            terms["gradients added"] += moves.added(table)
        stages.append(terms)
        held, own_numel = per_layer * stage.layers + table, experts_numel * stage.layers
        behind = moves.after_step(held - own_numel)
        if experts is not None:
            behind += Moves.of_experts(row, cluster, experts).after_step(own_numel)
        if software.overlaps:  # beside the passes before and behind an update
            behind = max(0.0, behind - stage.layers * (own.forward + own.backward))
        numel = (held - own_numel) / (stage.dp * cp if row["zero"] else 1)
        numel += own_numel / (experts.replicas(row) if experts is not None and row["zero"] else 1)
        update = _update(cluster, numel * software.update_bytes)
        once.append({"replicas": 0.0 if is_fsdp else behind, "update": update})
    taken = [sum(terms.values()) for terms in stages]
    number = taken.index(max(taken))
    # The first pass to arrive meets no message of the other direction.
    unmet = sum(0.5 * terms["stages"] for terms in (*stages[:number], *stages[number + 1 :]) if software.sends_alone)
    bubble = (sum(taken) - max(taken) - unmet) / vpp
    last = max(once, key=lambda terms: sum(terms.values()))
    return {name: passes * seconds for name, seconds in stages[number].items()} | {"bubble": bubble} | last


def _pass_terms(row: Row, stage: Stage, moves: Moves, passes: int, neighbours: int) -> dict[str, float]:
    """Return the seconds of a stage for one pass, without embedding and head."""
    own, device, own_software = pass_of(row, stage.micro_batch), moves.links.cluster.device, Software.of(row)
    (per_layer, ends), experts = parameters(row), Experts.of(row)
    exchange = 0.0 if experts is None else experts.exchange_seconds(row, moves.links.cluster)
    replicas = stages = 0.0
    adding = moves.added(per_layer) if passes > 1 else 0.0
    if own_software.shards and row["pp"] == 1:
        adding = 0.0
        gathered, scattered = moves.gathered(per_layer), moves.scattered(per_layer)
        again = gathered if row["zero"] == 3 else 0.0  # parameters stay after forward (SHARD_GRAD_OP)
        late = again if own_software.gathers_late else 0.0
        for computed, sent in ((own.forward, gathered), (own.backward, again - late + scattered)):
            replicas += stage.layers * (beside(device, computed + exchange, sent) - computed - exchange)
        replicas += stage.layers * late + moves.gathered(ends) * (2 if again else 1) + moves.scattered(ends)
        copied = own_software.copied_bytes * (stage.layers * per_layer + ends) if moves.axes else 0.0
        replicas += copied / device.bytes_per_second()
    elif row["pp"] > 1:  # scattered over tp on its way, as Megatron does
        tokens = stage.micro_batch * row["seq"] / (row.get("cp") or 1)
        num_bytes = 2 * tokens * row["arch"]["hidden"]
        together = row["tp"] > 1 and not row.get("sequence_parallel")
        arrived = moves.links.seconds("all_gather", moves.links.mesh.expand("tp"), num_bytes) if together else 0.0
        # Of a neighbour, what is sent and received at once, or one message after the other.
        messages = neighbours * (2 if own_software.sends_alone else 1)
        stages = (row.get("vpp") or 1) * (messages * moves.sent(num_bytes / row["tp"]) + neighbours * arrived)
    is_selective = row["recompute"] == "selective(attention core)"
    return {
        "layers": stage.layers * (own.forward + own.backward),
        "computed again": stage.layers * own.core if is_selective else stage.again * (own.forward + exchange),
        "gradients added": stage.layers * adding,
        "experts": 2 * stage.layers * exchange,
        "gathers and scatters": replicas,
        "stages": stages,
    }


def _update(cluster: Cluster, num_bytes: float) -> float:
    """Of AdamW, which moves so many bytes."""
    return Prices(Links(cluster, sw.Mesh(dp=cluster.num_devices))).kernel(KernelWork("update", num_bytes=num_bytes))
