"""Seconds and bytes of the stages of a pipeline. Stages whose programs differ only in names are timed once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from shardwise.costs.collectives import Links
from shardwise.costs.memory import memory_of
from shardwise.costs.pipeline_simulation import StageSeconds, send_seconds, stage_seconds
from shardwise.costs.prices import Prices
from shardwise.graph.cut import GraphCut
from shardwise.graph.form import GraphForm
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.plans.bind_stages import delivered_layouts
from shardwise.plans.pipeline_config import PipelineConfig
from shardwise.programs.spmd import Choice, SpmdProgram
from shardwise.programs.vjp import VjpCache


@dataclass(frozen=True)
class StageTiming:
    """The seconds of a stage for a micro-batch, and the bytes of a device: held with one micro-batch (``peak``), kept
    of it for its backward (``kept``), at most held while other stages run (``rests``, including ``kept``), and sent to
    the next stage (``sent``)."""

    seconds: StageSeconds
    peak: float
    kept: float
    rests: float
    sent: float


def timed_stages(
    config: PipelineConfig, cut: GraphCut, choices: Sequence[Choice], spmds: Sequence[SpmdProgram], vjp_cache: VjpCache
) -> list[StageTiming]:
    """Return the timings of all stages."""
    timings: dict[Hashable, StageTiming] = {}
    stages = []
    for number, (part, choice, spmd) in enumerate(zip(cut.parts, choices, spmds, strict=True)):
        key = _without_names(part, choice, spmd)
        if key not in timings:
            timings[key] = _timed(config, part, spmd, cut.sends(number), vjp_cache)
        timed = timings[key]
        if not number and config.schedule.splits_backward:  # no stage waits for cotangents of the first
            seconds = timed.seconds
            timed = replace(timed, seconds=replace(seconds, input=0.0, weight=seconds.input + seconds.weight))
        stages.append(timed)
    return stages


def _timed(
    config: PipelineConfig, part: Graph, spmd: SpmdProgram, sends: Sequence[str], vjp_cache: VjpCache
) -> StageTiming:
    prices = Prices(Links(config.stage_cluster, spmd.mesh), config.settings.optimizer, config.settings.passes)
    prices = prices.with_buckets(part, config.settings.bucket_bytes)
    delivered = delivered_layouts(part, spmd)
    sent = float(sum(delivered[name].max_local_numel * part.by_name[name].dtype.itemsize for name in sends))
    on_links = replace(prices, links=Links(config.cluster, Mesh(device=config.cluster.num_devices)))
    send = send_seconds(on_links, config.stage_cluster.num_devices, sent) if sends else 0.0
    memory = memory_of(spmd, prices, vjp_cache=vjp_cache)
    seconds = stage_seconds(spmd, prices, send, vjp_cache)
    peak, kept, rests = map(float, (memory.peak.num_bytes, memory.kept_bytes, sum(memory.rests.values())))
    return StageTiming(seconds, peak, kept, rests, sent)


def _without_names(part: Graph, choice: Choice, spmd: SpmdProgram) -> Hashable:
    """Return everything but names that decides a program: equal for stages with equal seconds and bytes."""
    form, lifetimes = GraphForm.of(part), spmd.lifetimes
    ends = {"shared": choice.shared, "delivered": choice.delivered}
    return (
        form.key,
        spmd.mesh,
        tuple(choice.strategies[name] for name in form.ops),
        tuple(choice.sources[source.value] for source in part.sources),
        tuple(
            (end, at, layouts[name])
            for end, layouts in ends.items()
            for at, name in enumerate(form.values)
            if name in layouts
        ),
        tuple((op.name in lifetimes.operators, op.name in lifetimes.offloaded) for op in spmd.graph.ops),
        tuple(conversion.result in lifetimes.conversions for conversion in spmd.conversions),
        tuple(source.value in lifetimes.once for source in part.sources),
    )
