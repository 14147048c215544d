"""Plans pipelines: cuts the model into stages, plans every stage, and simulates the step.

Start here to see who decides where a stage begins (``PipelinePlanner.plan``):

* the user, with ``stages="marked"`` (``graph.stage_marks``);
* else ``search.stage_partition``. Its cuts are planned, best first, until no other can be better.

``plans.auto_stages`` chooses only the number of stages, the schedule and the micro-batch.

The searches for whole models plan each part, on the mesh and the devices of its stage. Then the ends of stages are made
to agree. A value crosses in the receiver's layout. A parameter of several stages has the same layout in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from statistics import fmean

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.pipeline_simulation import (
    Order,
    PipelinePrediction,
    StagePrediction,
    StageSeconds,
    simulate_pipeline,
)
from shardwise.costs.prices import Prices
from shardwise.errors import NothingFits, PlanError, listed
from shardwise.graph.batch import num_samples
from shardwise.graph.capture import Capture
from shardwise.graph.cut import GraphCut
from shardwise.graph.ir import Graph
from shardwise.graph.stage_marks import check_marks, marked_parts, marks_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_dtype, format_layout
from shardwise.layouts.transfer import Renaming, on_mesh
from shardwise.plans.bind_stages import check_last, cut_for_stages, delivered_layouts, meeting, refined, step_graph
from shardwise.plans.entries import PricingEntry, Stage, TensorEntry
from shardwise.plans.listing import stage_of
from shardwise.plans.micro_batch_search import (
    Example,
    MicroBatchOptions,
    announce_statistics,
    batches_of,
    best_micro_batch,
)
from shardwise.plans.plan import Plan
from shardwise.plans.quantities import format_bytes
from shardwise.plans.request import PlanRequest, TrainingConfig
from shardwise.plans.schedule import SCHEDULES, Schedule, format_order, order_of, schedule_of
from shardwise.plans.stage_planner import (
    PipelineConfig,
    StagePlanner,
    StagesDoNotFit,
    StageTiming,
    annotated_in_parts,
    compiled_stages,
    timed_stages,
)
from shardwise.programs.builder import Choice
from shardwise.programs.micro_batches import Passes
from shardwise.programs.spmd import SpmdProgram, build_spmd
from shardwise.progress import STOPPED, stop_with
from shardwise.search.axis_names import AxisUsage, meshes_by_roles
from shardwise.search.constants import (
    MAX_BOUNDARY_TRIES,
    MAX_FASTER_CUTS,
    MAX_PLANNED_CUTS,
    OVER_LIMIT_PENALTY,
    PARTITION_TOLERANCE,
)
from shardwise.search.orders import OrderProblem, least_seconds, solve_order
from shardwise.search.planner import StagePlan, StageSearchResult
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.stage_partition import StageCut, StagePartition
from shardwise.search.stored_program import SearchConfig, as_grad_accum


def pipeline_config(
    request: PlanRequest, captured: Capture, settings: SearchConfig, *, by_price: bool
) -> PipelineConfig:
    """Return the configuration of a request's pipeline. Raises PlanError for stages that the schedule, the marks of the
    module or the devices do not allow."""
    parallel, cluster = request.parallel, request.cluster
    schedule = schedule_of(parallel.schedule or "1F1B")
    marks = marks_of(request.module)
    num_stages = _num_stages(parallel.stages, marks)
    stage_cluster = _stage_cluster(cluster, num_stages, schedule)
    if parallel.mesh is not None and parallel.mesh.num_devices != stage_cluster.num_devices:
        raise PlanError(
            f"{parallel.mesh} has {parallel.mesh.num_devices} devices, a stage has {stage_cluster.num_devices} of "
            f"the cluster's {cluster.num_devices}",
            fix="with stages, mesh is that of a stage",
        )
    return PipelineConfig.of(
        request, captured, settings, stage_cluster, by_price=by_price, num_stages=num_stages, schedule=schedule,
        marks=marks,
    )  # fmt: skip


def plan_pipeline(
    config: PipelineConfig,
    call: Example,
    graph: Graph,
    training: TrainingConfig,
    template: Plan,
    *,
    exact_refusal: bool,
) -> PipelineResult:
    """Return the plan of a pipeline for a captured call; of several micro-batch sizes the one with the shortest
    predicted step. ``graph``: of the call; ``template``: a plan with all settings. Raises PlanError for what cannot be
    cut, divided or scheduled; NothingFits names the least memory over all cuts if ``exact_refusal``, which takes
    longer."""
    refused: list[PipelinePlanner] = []

    def plan_passes(passes: Passes) -> PipelineResult:
        num_passes = len(passes.sizes)
        config_of_size = replace(config, settings=replace(config.settings, passes=num_passes))
        of_size = replace(template, micro_batches=num_passes)
        planner = PipelinePlanner(config_of_size, passes, of_size, PlanningCache(call.cache))
        try:
            return planner.plan()
        except NothingFits:
            refused.append(planner)
            raise

    batches = _batches(call, training, config)
    whole = step_graph(
        graph if batches is None or num_samples(call.arguments) == batches.step else call.graph(batches.step)
    )
    try:
        best, _, others = best_micro_batch(call, whole, batches, plan_passes, staged=True)
        return replace(best, others=others)
    except PlanError:
        if not refused or not exact_refusal:
            raise
    best = refused[-1].plan(exact_refusal=True)  # after the except block: its error has no other as its context
    announce_statistics(sorted(best.planner.passes.statistics))
    return best


def step_seconds(plan: Plan) -> float:
    """Return the simulated seconds of a step; 0 if it was not chosen by price."""
    return 0.0 if plan.pipeline is None else plan.pipeline.step_seconds


def _num_stages(stages: int | str | None, marks: Mapping[str, int]) -> int:
    if stages is None:
        raise PlanError("a schedule orders stages, and there are none", fix='give stages=4, or stages="marked"')
    if stages == "marked" or marks:
        return check_marks(dict(marks), None if stages == "marked" else _checked(stages))
    return _checked(stages)


def _checked(stages: int | str) -> int:
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 2:
        raise PlanError(f"stages is {stages!r}", fix='a whole number from 2, "marked" (sw.stage) or "auto"')
    return stages


def _stage_cluster(cluster: Cluster, num_stages: int, schedule: Schedule) -> Cluster:
    places, rest = divmod(num_stages, schedule.stages_per_place)
    if rest or places < 2:
        raise PlanError(
            f"{schedule.name} has {schedule.stages_per_place} stages on every place: {num_stages} stages are "
            f"{num_stages / schedule.stages_per_place:g} places",
            fix=f"choose a multiple of {schedule.stages_per_place}, from {2 * schedule.stages_per_place}",
        )
    if cluster.num_devices % places:
        raise PlanError(
            f"{cluster.num_devices} devices do not divide into {places} equal places: {cluster.num_devices} / "
            f"{places} = {cluster.num_devices / places:.4g}",
            fix="choose a number of stages that divides the devices",
        )
    return cluster.with_devices(cluster.num_devices // places)


def _batches(call: Example, training: TrainingConfig, config: PipelineConfig) -> MicroBatchOptions | None:
    """Return the micro-batches to try: those that fill the schedule, else the smallest; without prices the largest."""
    samples = num_samples(call.arguments)
    if samples is None and training.micro_batch is None and training.global_batch is None:
        return None
    step = samples if training.global_batch is None else training.global_batch
    batches = batches_of(samples, step, training.micro_batch, config.stage_cluster.num_devices, chooses=True)
    assert batches is not None, "a global batch was given"
    filling = [s for s in batches.candidates if not config.schedule.fault(config.num_places, batches.step // s)]
    candidates = tuple(filling) or batches.candidates[-1:]
    return replace(batches, candidates=candidates if config.by_price else candidates[:1])


@dataclass(frozen=True, eq=False)
class PipelineResult:
    """A plan and the search for each of its stages. ``planner``: of the step, for other cuts; ``parts``: the operators
    of every stage; ``others``: plans with other micro-batch sizes that were considered."""

    plan: Plan
    searched: tuple[StageSearchResult | None, ...]
    planner: PipelinePlanner
    parts: tuple[tuple[str, ...], ...]
    others: tuple[Plan, ...] = ()

    @property
    def graph(self) -> Graph:
        """The graph of a micro-batch."""
        return self.planner.graph

    @property
    def prelude(self) -> Graph | None:
        """The graph of what a step computes ahead of its micro-batches."""
        return self.planner.passes.prelude


@dataclass(frozen=True, eq=False)
class PipelinePlanner:
    """Planner of a step's micro-batches in stages. ``template``: a plan with all settings, whose stages are ignored;
    ``cache``: of the stages that were planned for any cut; ``refused``: the cuts that do not fit."""

    config: PipelineConfig
    passes: Passes
    template: Plan
    cache: PlanningCache
    refused: dict[tuple[int, ...], StagesDoNotFit] = field(default_factory=dict)

    @cached_property
    def graph(self) -> Graph:
        return self.passes.graphs[self.passes.sizes[0]]

    @property
    def num_passes(self) -> int:
        return len(self.passes.sizes)

    @cached_property
    def order(self) -> Order:
        """The order of all actions. Raises PlanError if the schedule cannot run so many micro-batches."""
        config = self.config
        if fault := config.schedule.fault(config.num_places, self.num_passes):
            raise PlanError(fault, fix="choose a smaller micro_batch, or another schedule (GPipe takes any number)")
        return order_of(config.schedule, config.num_places, self.num_passes)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Return, for every stage, how many micro-batches it keeps at once if all took equally long. The inner stages
        of a pipeline rank are about equal and share its memory: each counts as many as they keep on average."""
        config, stages = self.config, range(self.config.num_stages)
        in_flight = simulate_pipeline(self.order, [StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)] * len(stages)).in_flight
        of_place: dict[int, list[int]] = {}
        for stage in stages[1:-1]:
            of_place.setdefault(config.place_of[stage], []).append(in_flight[stage])
        inner = (ceil(fmean(of_place[config.place_of[stage]])) for stage in stages[1:-1])
        return in_flight[0], *inner, in_flight[-1]

    def plan(self, *, exact_refusal: bool = False) -> PipelineResult:
        """Return the plan of the best cut (``search.stage_partition``), or of the marked one. Raises PlanError if there
        is none. If no cut fits, the error has the least memory over all cuts if ``exact_refusal``, which takes longer,
        else that of some."""
        config = self.config
        if config.marks:
            parts = marked_parts(self.graph, dict(config.marks), config.num_stages)
            try:
                return self.of_cut(parts)[0]
            except StagesDoNotFit as error:
                raise error.most[1] from None
        schedule, devices = config.schedule, config.stage_cluster.num_devices
        prices = Prices(Links(config.stage_cluster, config.meshes[0]), config.settings.optimizer, self.num_passes)
        limit = config.limit / schedule.stages_per_place
        partition = StagePartition.of(self.graph, prices, limit, self.in_flight)
        best: PipelineResult | None = None
        best_cut: StageCut | None = None
        planned: set[tuple[int, ...]] = set()
        failure: tuple[float, NothingFits] | None = None
        value, left = inf, MAX_PLANNED_CUTS
        while left:
            cut = partition.next_cut()
            if failure is not None and cut.value >= OVER_LIMIT_PENALTY and not exact_refusal:
                break
            if partition.is_settled(cut, value):
                near = [] if best_cut is None else [c for c in partition.moved(best_cut) if c.starts not in planned]
                if best_cut is None or not near:
                    break
                cut = min(near, key=lambda moved: self._estimate(partition, moved))
                if self._estimate(partition, cut) >= (1 - PARTITION_TOLERANCE) * self._estimate(partition, best_cut):
                    break
            planned.add(cut.starts)
            left -= 1
            try:
                if cut.starts in self.refused:
                    raise self.refused[cut.starts]
                result, seconds = self.of_cut(partition.parts(cut))
            except StagesDoNotFit as error:
                self.refused[cut.starts] = error
                partition.refuse(cut, {stage: devices * need for stage, (need, _) in error.needs.items()})
                failure = min([error.most, *([] if failure is None else [failure])], key=lambda need: need[0])
                value = OVER_LIMIT_PENALTY * failure[0] / limit if best is None else value
                continue
            except STOPPED:
                stop_with(best is not None)
                break
            except PlanError:  # not faster than a plan that is known
                if best is None:
                    raise
                break
            if not config.by_price:
                return result
            value = min(value, partition.learn(cut, seconds))
            if best is None or step_seconds(result.plan) < step_seconds(best.plan):
                best, best_cut = result, cut
            left = min(left, MAX_FASTER_CUTS) if partition.memory_binds(cut) else 0
        if best is None:
            assert failure is not None, "a cut was planned"
            raise failure[1]
        return best

    def _estimate(self, partition: StagePartition, cut: StageCut) -> float:
        """Return the seconds of a step of a cut, by what is known of its stages. Forward is a third of them."""
        thirds = [seconds / 3 for seconds in partition.stage_values(cut.starts)]
        return simulate_pipeline(self.order, [StageSeconds(part, part, part, 0.0, 0.0) for part in thirds]).seconds

    def of_cut(self, parts: Sequence[Sequence[str]]) -> tuple[PipelineResult, list[float]]:
        """Return the plan of stages with these operators, and the seconds of a micro-batch in each. Raises PlanError if
        they cannot be stages, and StagesDoNotFit."""
        config = self.config
        cut = cut_for_stages(self.graph, parts, self.passes.prelude)
        check_last(cut, self.graph)
        _check_parameters(cut)
        meant = annotated_in_parts(self.graph, cut.parts, config.annotations)
        stage_planner = StagePlanner(config, self.cache, meant)
        joined, timed = self._joined(cut, stage_planner)
        meshes = [stage.mesh for stage in joined]
        if config.chooses_mesh:
            pairs = zip(cut.parts, joined, strict=True)
            usages = [AxisUsage(part, stage.factored.rules, stage.choice.strategies) for part, stage in pairs]
            meshes = meshes_by_roles(meshes, usages)
        ends = enumerate(zip(joined, meshes, strict=True))
        stages = tuple(_listed(config, cut, number, *end) for number, end in ends)
        schedule, order, pipeline, pricing = config.schedule, self.order, None, None
        if schedule.is_solved:
            schedule = _solved(config, timed)
            order = schedule.actions
        if config.by_price:
            compiled = compiled_stages(config, cut.parts, joined, self.cache, timed)
            pipeline = _predicted(config, timed, order, compiled)
            pricing = PricingEntry.of(config.cluster, config.settings.memory_bytes)
        lines = format_order(schedule.actions)
        plan = replace(
            self.template, stages=stages, schedule=schedule.name, order=lines, pipeline=pipeline, pricing=pricing
        )
        searched, operators = tuple(stage.searched for stage in joined), tuple(map(tuple, parts))
        seconds = [stage.seconds.forward + stage.seconds.input + stage.seconds.weight for stage in timed]
        return PipelineResult(plan, searched, self, operators), seconds

    def _joined(self, cut: GraphCut, stage_planner: StagePlanner) -> tuple[list[StagePlan], list[StageTiming]]:
        """Return plans of the stages whose ends agree, with their timings.

        What the ends add may break the limit. The stages are then planned under lower limits, and in the end for the
        least memory. Raises StagesDoNotFit.
        """
        config, flying, per_place = self.config, self.in_flight, self.config.schedule.stages_per_place
        limits = [config.limit / per_place] * config.num_stages
        chosen = stage_planner.of_all(cut.parts, flying, limits[0])
        for left in reversed(range(MAX_BOUNDARY_TRIES + 1)):
            joined = _together(cut, chosen, config.settings)
            needs_times = config.by_price or config.schedule.is_solved
            timed = timed_stages(config, cut, joined, self.cache) if needs_times else []
            over = _excess(config, timed, self.order) if config.by_price else {}
            if not over:
                break
            if not left:
                number = max(over, key=over.__getitem__)
                need = (config.limit + over[number]) / per_place
                raise StagesDoNotFit({number: (need, _too_much(config, cut, flying, over))})
            if left == 1:
                chosen = [stage_planner.of(*pair, 0.0, None) for pair in zip(cut.parts, flying, strict=True)]
                continue
            # The stages of a pipeline rank first share its excess; if that is not enough, each is reduced by all of it.
            # A stage sends in the layouts of the latest choice for the next one.
            sharing = per_place if left == MAX_BOUNDARY_TRIES else 1
            for number, num_bytes in sorted(over.items(), reverse=True):
                limits[number] = max(0.0, limits[number] - num_bytes / sharing)
                following = chosen[number + 1] if number + 1 < len(chosen) else None
                chosen[number] = stage_planner.of(cut.parts[number], flying[number], limits[number], following)
        return joined, timed


def _check_parameters(cut: GraphCut) -> None:
    for number, part in enumerate(cut.parts):
        if not any(source.kind == "parameter" for source in part.sources):
            names = [op.name for op in part.ops]
            raise PlanError(
                f"stage {number} has no parameters: {listed(names)}",
                fix="ask for fewer stages, or mark modules that have parameters",
            )


def _together(cut: GraphCut, chosen: Sequence[StagePlan], settings: SearchConfig) -> list[StagePlan]:
    """Return plans that agree on the values that cross and on parameters of several stages."""
    bindings = [(stage.factored, choice) for stage, choice in zip(chosen, _equally_stored(cut, chosen), strict=True)]
    choices = meeting(cut, bindings, [stage.mesh for stage in chosen])
    ends = zip(cut.parts, chosen, choices, strict=True)
    return [replace(stage, choice=choice, spmd=_rebuilt(part, stage, choice, settings)) for part, stage, choice in ends]


def _equally_stored(cut: GraphCut, chosen: Sequence[StagePlan]) -> list[Choice]:
    """Return the choices with every parameter of several stages in the layout of the last of them, device by device. It
    is stored whole if one of the stages cannot have that layout."""
    choices = [part_choice.choice for part_choice in chosen]
    parameters = {source.value for part in cut.parts for source in part.sources if source.kind == "parameter"}
    for name, stages in cut.shared.items():
        if name not in parameters:
            continue
        layout = choices[stages[-1]].sources[name]
        fitted: dict[int, Layout] = {}
        for stage in stages:
            there = on_mesh(layout, chosen[stage].mesh)
            layout_there = None if there is None else refined(there, chosen[stage].factored.atoms[name])
            if layout_there is not None:
                fitted[stage] = layout_there
        for stage in stages:
            stored = fitted[stage] if len(fitted) == len(stages) else Layout.whole(chosen[stage].mesh, layout.shape)
            choices[stage] = replace(choices[stage], sources={**choices[stage].sources, name: stored})
    return choices


def _rebuilt(part: Graph, part_choice: StagePlan, choice: Choice, settings: SearchConfig) -> SpmdProgram:
    """Return the program of a choice with other boundary layouts, but the same recomputation and offloading."""
    repeated = {
        (c.origin, c.target) for c in part_choice.spmd.conversions if c.result in part_choice.spmd.lifetimes.conversions
    }
    parameters = {source.value for source in part.sources if source.kind == "parameter"}
    by_block = any(origin in parameters for origin, _ in repeated)
    rules, bucket_bytes = part_choice.factored.rules, part_choice.bucket_bytes
    spmd = build_spmd(part, rules, choice, part_choice.mesh, bucket_bytes=bucket_bytes, by_block=by_block)
    conversions = frozenset(c.result for c in spmd.conversions if (c.origin, c.target) in repeated)
    spmd = replace(spmd, lifetimes=replace(part_choice.spmd.lifetimes, conversions=conversions, once=frozenset()))
    return as_grad_accum(spmd, replace(settings, memory_policy=part_choice.memory_policy))


def _listed(config: PipelineConfig, cut: GraphCut, number: int, planned: StagePlan, called: Mesh) -> Stage:
    """Return a part as a stage of the plan. ``called``: its mesh under the axis names of the plan."""
    part, choice, spmd, names = cut.parts[number], planned.choice, planned.spmd, Renaming(planned.mesh, called)
    stage = stage_of(part, planned.factored.rules, choice, spmd, called)
    delivered = delivered_layouts(part, spmd)

    def entry(name: str, layout: Layout) -> TensorEntry:
        value = part.by_name[name]
        return TensorEntry(
            name, format_dtype(value.dtype), value.shape, format_layout(names.layout(layout), value.dtype)
        )

    received = [source.value for source in part.sources if source.kind == "activation"]
    return replace(
        stage,
        placement=config.place(number, called),
        receives=tuple(entry(name, choice.sources[name]) for name in received),
        sends=tuple(entry(name, delivered[name]) for name in cut.sends(number)),
    )


def _work(config: PipelineConfig, stages: Sequence[StageTiming], orders: Sequence[Order] = ()) -> OrderProblem:
    """Return the ordering problem. The room of a pipeline rank is its limit less parameters and what a single
    micro-batch takes. Without prices no stage was fitted, so the room is at least what known orders keep."""
    kept = tuple(stage.kept for stage in stages)
    room = tuple(config.limit - num_bytes for num_bytes in _fixed_bytes(config, stages))
    seconds = tuple(stage.seconds for stage in stages)
    work = OrderProblem(seconds, config.place_of, config.settings.passes, kept, room)
    peaks = [work.peaks(order) for order in orders]
    return replace(work, room=tuple(map(max, zip(room, *peaks, strict=True)))) if peaks else work


def _fixed_bytes(config: PipelineConfig, stages: Sequence[StageTiming]) -> list[float]:
    """Return, for every pipeline rank, the bytes of its device that are not kept for backward: what its stages hold
    between micro-batches, and the largest working memory of one of them, as they take turns."""
    rests, moments = [0.0] * config.num_places, [0.0] * config.num_places
    for number, stage in enumerate(stages):
        place = config.place_of[number]
        rests[place] += stage.rests - stage.kept
        moments[place] = max(moments[place], stage.peak - stage.rests)
    return [rest + moment for rest, moment in zip(rests, moments, strict=True)]


def _excess(config: PipelineConfig, stages: Sequence[StageTiming], order: Order) -> dict[int, float]:
    """Return by how many bytes the pipeline rank of a stage exceeds its limit, for stages where it does. Their own
    searches fitted them, but the layouts of what crosses and of shared parameters were settled afterwards."""
    work = _work(config, stages)
    over = [peak - room for peak, room in zip(work.peaks(order), work.room, strict=True)]
    return {stage: over[place] for stage, place in enumerate(work.place_of) if over[place] > 0}


def _too_much(config: PipelineConfig, cut: GraphCut, flying: Sequence[int], over: Mapping[int, float]) -> NothingFits:
    number = max(over, key=over.__getitem__)
    return NothingFits(
        f"stage {number} fits alone, but its pipeline rank needs {format_bytes(int(config.limit + over[number]))} per "
        f"device with {flying[number]} micro-batches in flight (limit {format_bytes(int(config.limit))}): boundary "
        "activations and tied weights add the rest",
        [("begins", f"with {cut.parts[number].ops[0].name}")],
        "choose a smaller micro_batch, more stages, or a mesh of fewer axes",
    )


def _solved(config: PipelineConfig, stages: Sequence[StageTiming]) -> Schedule:
    """Return the schedule with an order solved for these stages, from torch's orders for the same placement."""
    size = config.num_places, config.settings.passes
    others = [s for s in SCHEDULES.values() if s.folded and not s.is_solved and not s.fault(*size)]
    orders = [order_of(schedule, *size) for schedule in others]
    work = _work(config, stages, () if config.by_price else orders)
    return replace(config.schedule, actions=solve_order(work, orders).order)


def _predicted(
    config: PipelineConfig, timed: Sequence[StageTiming], order: Order, compiled: Sequence[StageSeconds] = ()
) -> PipelinePrediction:
    step = simulate_pipeline(order, [stage.seconds for stage in timed])
    stages = tuple(
        StagePrediction(
            stage.seconds.forward,
            stage.seconds.input + stage.seconds.weight,
            stage.peak + (step.in_flight[number] - 1) * stage.kept,
            stage.sent,
            step.bubble(config.place_of[number]),
            stage.seconds.weight,
            stage.seconds.send,
            stage.seconds.update,
        )
        for number, stage in enumerate(timed)
    )
    work = _work(config, timed)
    bound = min(least_seconds(work), step.seconds)  # their sums round differently
    peaks = [sum(parts) for parts in zip(work.peaks(order), _fixed_bytes(config, timed), strict=True)]
    compiled_seconds = simulate_pipeline(order, compiled).seconds if compiled else 0.0
    return PipelinePrediction(step.seconds, step.bubbles, bound, stages, max(peaks), compiled_seconds)
