"""The choice of layouts for the stages of a pipeline, one by one, or for a whole model, and the error if nothing fits.

Equal stages are searched once: they share the plan of the one that keeps most micro-batches, under the names of each.
So do equal stages of other cuts that keep more, if the plan fits there: more micro-batches only leave fewer plans.
Stages whose programs differ only in names are timed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import memory_of
from shardwise.costs.pipeline_simulation import StageSeconds, send_seconds, stage_seconds
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import Router
from shardwise.errors import NothingFits, listed
from shardwise.graph.annotate import Annotation
from shardwise.graph.capture import Capture
from shardwise.graph.cut import GraphCut
from shardwise.graph.folding import GraphForm
from shardwise.graph.ir import Graph
from shardwise.graph.segments import Segment
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.transfer import boundary_layout
from shardwise.plans.bind_stages import delivered_layouts
from shardwise.plans.nothing_fits import nothing_fits
from shardwise.plans.request import ParallelConfig, PlanRequest
from shardwise.plans.schedule import ONE_STAGE, Schedule
from shardwise.programs.builder import Choice
from shardwise.programs.spmd import Lifetimes, SpmdProgram, build_spmd
from shardwise.programs.vjp import VjpCache
from shardwise.progress import report_progress
from shardwise.rules.atoms import Factored
from shardwise.rules.rule import OpRule
from shardwise.search.decide import apply_layouts, decide
from shardwise.search.fit_memory import fit_memory, least_memory
from shardwise.search.memory_policy import blocks_of
from shardwise.search.modes import Mode
from shardwise.search.planner import Planner, StagePlan, StageSearchResult
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.stored_program import SearchConfig, build_program
from shardwise.search.user_choices import annotated_ops, annotated_rules, no_operator_error


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is planned stage by stage; without a pipeline it is one stage.

    ``cluster``: all devices; ``annotations``, ``segments``: of the captured call; ``by_price``: whether layouts are
    searched; ``settings``: of the searches; ``stage_cluster``: the devices of one stage; ``meshes``: the candidates for
    it; ``marks``: path of a module -> its stage; empty: stages are balanced."""

    # Reports keep a configuration, so it has neither the request nor the capture: these keep the module and its inputs.
    cluster: Cluster
    parallel: ParallelConfig
    mode: Mode
    annotations: tuple[Annotation, ...]
    segments: tuple[Segment, ...]
    by_price: bool
    settings: SearchConfig
    stage_cluster: Cluster
    meshes: tuple[Mesh, ...]
    num_stages: int
    schedule: Schedule
    marks: Mapping[str, int]

    @staticmethod
    def of(
        request: PlanRequest,
        captured: Capture,
        settings: SearchConfig,
        stage_cluster: Cluster,
        *,
        by_price: bool,
        num_stages: int = 1,
        schedule: Schedule = ONE_STAGE,
        marks: Mapping[str, int] | None = None,
    ) -> PipelineConfig:
        """Return the configuration of a request."""
        meshes = request.meshes(stage_cluster, by_price=by_price)
        return PipelineConfig(
            request.cluster, request.parallel, request.search.mode, captured.annotations, captured.segments, by_price,
            settings, stage_cluster, meshes, num_stages, schedule, marks or {},
        )  # fmt: skip

    @property
    def chooses_mesh(self) -> bool:
        """Return whether the mesh is chosen by price, so that its axes are named by role."""
        return self.by_price and self.parallel.mesh is None

    @property
    def limit(self) -> float:
        """Return the memory limit of a device in bytes."""
        memory_bytes = self.settings.memory_bytes
        return self.stage_cluster.device.usable_bytes if memory_bytes is None else memory_bytes

    @property
    def num_places(self) -> int:
        return self.num_stages // self.schedule.stages_per_place

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """Return the pipeline rank of every stage."""
        return tuple(self.schedule.place_of(stage, self.num_places) for stage in range(self.num_stages))

    def place(self, stage: int, mesh: Mesh) -> Placement:
        """Return the placement of a stage on consecutive ranks."""
        size = self.stage_cluster.num_devices
        first = size * self.place_of[stage]
        return Placement(mesh, tuple(range(first, first + size)))


class StagesDoNotFit(Exception):
    """Raised if stages of a cut do not fit. ``needs``: stage -> the least bytes of a device that were found for it, and
    the error that says so."""

    def __init__(self, needs: Mapping[int, tuple[float, NothingFits]]) -> None:
        super().__init__(f"stages {listed([str(number) for number in needs])} do not fit")
        self.needs = needs

    @property
    def most(self) -> tuple[float, NothingFits]:
        return max(self.needs.values(), key=lambda need: need[0])


# Annotations whose scope a cut divides -> the operators of the whole graph that they apply to.
Meant = Mapping[Annotation, frozenset[str]]


def annotated_in_parts(graph: Graph, parts: Sequence[Graph], annotations: Sequence[Annotation]) -> Meant:
    """Return the operators of the whole graph that an annotation applies to, for annotations whose scope spans several
    parts: a part with only a bias has no matmul to split. Raises LayoutError for an annotation of no operator."""
    scopes = Counter(scope for part in parts for scope in {op.scope for op in part.ops})
    used = {annotation.source for annotation in annotations if scopes[annotation.scope]}
    for annotation in annotations:
        if annotation.source not in used:
            raise no_operator_error(annotation)
    divided = tuple(annotation for annotation in annotations if scopes[annotation.scope] > 1)
    if not divided:
        return {}
    _, factored = annotated_rules(graph, divided)
    return {
        annotation: frozenset(op.name for op in annotated_ops(graph, factored, annotation)) for annotation in divided
    }


@dataclass
class StagePlanner:
    """Planner of parts that plans equal ones once. ``cache``: has the plans so far, of other cuts too; ``meant``: of
    the whole graph; ``together``: form of a part -> how many equal ones a pipeline rank runs one after the other."""

    config: PipelineConfig
    cache: PlanningCache
    meant: Meant
    together: dict[Hashable, int] = field(default_factory=dict)

    def of_all(self, parts: tuple[Graph, ...], in_flight: tuple[int, ...], limit: float) -> list[StagePlan]:
        """Return the choices for all parts. ``in_flight``: the micro-batches that each keeps at once. Raises
        StagesDoNotFit, with the needs of all stages."""
        forms = [GraphForm.of(part) for part in parts]
        most: dict[Hashable, int] = {}
        for form, count in zip(forms, in_flight, strict=True):
            most[form.key] = max(most.get(form.key, 0), count)
        counts = Counter((form.key, place) for form, place in zip(forms, self.config.place_of, strict=True))
        for (key, _), count in counts.items():
            self.together[key] = max(self.together.get(key, 0), count)
        chosen: list[StagePlan] = []
        needs: dict[int, tuple[float, NothingFits]] = {}
        for number in reversed(range(len(parts))):
            report_progress("planning a stage", len(chosen), len(parts))
            part, following = parts[number], chosen[0] if chosen else None
            stage = self.of(part, most[forms[number].key], limit, following)
            if stage.excess(limit):
                least = self.of(part, in_flight[number], 0.0, None)
                assert least.ranking is not None, "its bytes are known"
                if least.excess(limit):
                    ranking = replace(least.ranking, limit=limit)
                    needs[number] = least.ranking.best.num_bytes, nothing_fits(ranking)
            chosen.insert(0, stage)
        if needs:
            raise StagesDoNotFit(needs)
        return chosen

    def of(self, part: Graph, in_flight: int, limit: float, following: StagePlan | None) -> StagePlan:
        """Return the choice for a part; of the least memory if nothing fits. ``limit``: the bytes of a device for it;
        ``following``: the choice for the next part, in whose layouts values are sent."""
        form = GraphForm.of(part)
        first, chosen = self._first(form, part, in_flight, limit, following)
        return chosen if first.ops == form.ops else self._renamed(chosen, first, form, part)

    def _first(
        self, form: GraphForm, part: Graph, in_flight: int, limit: float, following: StagePlan | None
    ) -> tuple[GraphForm, StagePlan]:
        """Return the first part that is planned as ``of`` plans a part, and its choice."""
        sources = {} if following is None else following.choice.sources
        taken = {name: boundary_layout(sources[name]) for name in part.cotangents or () if name in sources}
        place = {name: number for number, name in enumerate(form.ops)}
        segments = [
            (s.how, s.messages, sorted(place[n] for n in s.operators & place.keys())) for s in self.config.segments
        ]
        layouts, limits = self.config.settings.layouts, (limit, self.config.settings.known)
        kept = [next((layouts[name] for name in s.names if name in layouts), None) for s in part.sources]
        ends = tuple(taken.get(name) for name in part.cotangents or ())
        annotations = self._annotations(part)
        # Micro-batches in flight -> the first part that was planned so, and its choice.
        known: dict[int, tuple[GraphForm, StagePlan]] = self.cache.table(
            "stages", form.key, limits, str(segments), str(kept), ends, self._wishes(part, annotations)
        )
        for count, (first, chosen) in known.items():
            if count == in_flight or (count < in_flight and chosen.fits_with(in_flight - count, limit)):
                return first, chosen
        turns, together = self.config.schedule.stages_per_place, self.together.get(form.key, 1)
        settings = replace(self.config.settings, in_flight=in_flight, turns=turns, taken=taken, together=together)
        config = replace(self.config, settings=settings, annotations=annotations)
        chosen = choose_stage(config, part, limit, self.cache)
        is_taken = not limit or not chosen.excess(limit)
        known[in_flight] = (form, chosen) if is_taken else self._first(form, part, in_flight, 0.0, None)
        return known[in_flight]

    def _annotations(self, part: Graph) -> tuple[Annotation, ...]:
        names, scopes = part.op_by_name.keys(), {op.scope for op in part.ops}
        return tuple(
            annotation
            for annotation in self.config.annotations
            if annotation.scope in scopes and (annotation not in self.meant or names & self.meant[annotation])
        )

    def _wishes(self, part: Graph, annotations: Sequence[Annotation]) -> tuple[Hashable, ...]:
        """Return what annotations ask of a part, without the names of its calls and operators."""
        scopes = {scope: i for i, scope in enumerate(dict.fromkeys(op.scope for op in part.ops))}
        place = {op.name: i for i, op in enumerate(part.ops)}
        return tuple(
            (
                scopes[annotation.scope],
                repr(annotation.strategy),
                repr(annotation.out_strategy),
                tuple(sorted(place[name] for name in self.meant.get(annotation, ()) if name in place)),
            )
            for annotation in annotations
        )

    def _renamed(self, chosen: StagePlan, first: GraphForm, form: GraphForm, part: Graph) -> StagePlan:
        """Return the choice for one part under the names of an equal one."""
        op_of, value_of = first.renaming(form)
        rules = {op_of[name]: _with_keys(rule, value_of) for name, rule in chosen.factored.rules.items()}
        factored = Factored(rules, {value_of[name]: atoms for name, atoms in chosen.factored.atoms.items()})
        choice, route = chosen.choice, chosen.choice.route
        if isinstance(route, Router):
            parameters = frozenset(s.value for s in part.sources if s.kind == "parameter")
            route = Router(route.axes, route.prices, factored.atoms, parameters, route.known)
        choice = Choice(
            {op_of[name]: strategy for name, strategy in choice.strategies.items()},
            {value_of[name]: layout for name, layout in choice.sources.items()},
            {value_of[name]: layout for name, layout in choice.shared.items()},
            {value_of[name]: layout for name, layout in choice.delivered.items()},
            route,
            choice.row_chunks,
        )
        original = chosen.memory_policy.segments
        segments = (replace(s, operators=frozenset(op_of[name] for name in s.operators)) for s in original)
        memory_policy = replace(chosen.memory_policy, segments=tuple(segments))
        searched = None
        if chosen.searched is not None:
            sources = chosen.searched.search.cost.domains.graph.source_of
            names = {new_name: name for name, new_name in op_of.items()}
            called = {new_name: name for name, new_name in value_of.items()}
            names |= {source.names[0]: sources[called[source.value]].names[0] for source in part.sources}
            searched = StageSearchResult(chosen.searched.search, names)
        bucket_bytes, by_block = chosen.bucket_bytes, memory_policy.reshard_mode == "again"
        spmd = build_spmd(part, rules, choice, chosen.mesh, bucket_bytes=bucket_bytes, by_block=by_block)
        spmd = _with_lifetimes(chosen.spmd, spmd)
        return StagePlan(factored, choice, spmd, memory_policy, None, searched, chosen.ranking, bucket_bytes)


def _with_keys(rule: OpRule, value_of: Mapping[str, str]) -> OpRule:
    """Return the rule with the name of the keys that its rows follow in an equal part."""
    return rule if rule.keyed is None else replace(rule, keyed=replace(rule.keyed, keys=value_of[rule.keyed.keys]))


def _with_lifetimes(first: SpmdProgram, spmd: SpmdProgram) -> SpmdProgram:
    """Return a program with the lifetimes of one that is equal but for names. What a step does once is left out: that
    is settled when the stages are joined."""
    op_of = {op.name: renamed.name for op, renamed in zip(first.graph.ops, spmd.graph.ops, strict=True)}
    result_of = {c.result: renamed.result for c, renamed in zip(first.conversions, spmd.conversions, strict=True)}
    first_lifetimes = first.lifetimes
    lifetimes = Lifetimes(
        frozenset(op_of[name] for name in first_lifetimes.operators),
        frozenset(result_of[name] for name in first_lifetimes.conversions),
        frozenset(op_of[name] for name in first_lifetimes.offloaded),
    )
    return replace(spmd, lifetimes=lifetimes)


def choose_stage(config: PipelineConfig, part: Graph, limit: float, cache: PlanningCache) -> StagePlan:
    """Search for the choice of a part, or of a whole model. ``config``: with the annotations of its operators;
    ``limit``: the bytes of a device for it; 0: search for the least memory; ``cache``: shared with other parts."""
    if config.by_price:
        planner = memory_planner(config, part, limit, cache)
        if config.parallel.recompute != "auto":
            return planner.plan()
        fit = fit_memory if limit else least_memory
        return fit(planner, config.parallel.reshard_mode)
    settings, (mesh,) = _settings_for(config, part), config.meshes
    factored, choice = decide(part, config.annotations, mesh, config.mode, config.settings.imbalance)
    choice = apply_layouts(choice, settings.layouts, part, factored, mesh)
    program = build_program(part, factored.rules, choice, mesh, settings, cache.vjp_cache)
    prediction = None
    if config.num_stages == 1:
        prices = Prices(Links(config.stage_cluster, mesh), settings.optimizer, settings.passes)
        prediction = program.prediction(prices.with_buckets(part, settings.bucket_bytes))
    return StagePlan(
        factored,
        program.choice,
        program.spmd,
        settings.memory_policy,
        prediction,
        bucket_bytes=settings.bucket_bytes,
    )


def memory_planner(config: PipelineConfig, part: Graph, limit: float, cache: PlanningCache) -> Planner:
    """Return the planner of a part, under the memory policy that the user asks for. Arguments as ``choose_stage``."""
    settings = replace(_settings_for(config, part), memory_bytes=limit)
    return Planner.of(part, config.annotations, config.stage_cluster, config.meshes, settings, cache)


def _settings_for(config: PipelineConfig, part: Graph) -> SearchConfig:
    """Return the settings of a search for a part."""
    parallel, names = config.parallel, set(part.op_by_name)
    segments = [replace(s, operators=s.operators & names) for s in config.segments if s.operators & names]
    layouts = config.settings.layouts
    if config.num_stages > 1:
        source_names = {name for source in part.sources for name in source.names}
        layouts = {name: layout for name, layout in layouts.items() if name in source_names}
        if not blocks_of(part):  # a part with only an embedding has none
            offload = "auto" if parallel.offload == "all" else parallel.offload
            parallel = replace(parallel, offload=offload, recompute=parallel.recompute if segments else "auto")
    return replace(config.settings, memory_policy=parallel.memory_policy(part, segments), layouts=layouts)


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
    config: PipelineConfig, cut: GraphCut, planned: Sequence[StagePlan], cache: PlanningCache
) -> list[StageTiming]:
    """Return the timings of all stages. ``cache``: has those of stages of other cuts too."""
    stages = []
    for number, (part, stage) in enumerate(zip(cut.parts, planned, strict=True)):
        time = partial(_timed, config, part, stage.spmd, cut.sends(number), cache.vjp_cache)
        timed = cache.get("timings", _without_names(part, stage.choice, stage.spmd), time)
        if not number and config.schedule.splits_backward:  # no stage waits for cotangents of the first
            seconds = timed.seconds
            timed = replace(timed, seconds=replace(seconds, input=0.0, weight=seconds.input + seconds.weight))
        stages.append(timed)
    return stages


def compiled_stages(
    config: PipelineConfig,
    parts: Sequence[Graph],
    planned: Sequence[StagePlan],
    cache: PlanningCache,
    timed: Sequence[StageTiming],
) -> list[StageSeconds]:
    """Return the seconds of stages of compiled programs; none where programs run eager by default. ``timed``: eager."""
    if not config.cluster.device.is_cuda or config.schedule.splits_backward:
        return []

    def compiled(part: Graph, spmd: SpmdProgram, send: float) -> StageSeconds:
        return stage_seconds(spmd, _prices(config, part, spmd), send, cache.vjp_cache, compiled=True)

    stages = []
    for part, stage, eager in zip(parts, planned, timed, strict=True):
        make = partial(compiled, part, stage.spmd, eager.seconds.send)
        stages.append(cache.get("compiled stages", _without_names(part, stage.choice, stage.spmd), make))
    return stages


def _prices(config: PipelineConfig, part: Graph, spmd: SpmdProgram) -> Prices:
    prices = Prices(Links(config.stage_cluster, spmd.mesh), config.settings.optimizer, config.settings.passes)
    return prices.with_buckets(part, config.settings.bucket_bytes)


def _timed(
    config: PipelineConfig, part: Graph, spmd: SpmdProgram, sends: Sequence[str], vjp_cache: VjpCache
) -> StageTiming:
    prices = _prices(config, part, spmd)
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
