"""Planning a request: capture, the choice of micro-batch, stages and layouts, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import busiest_program
from shardwise.costs.optimizers import is_on_host
from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import figures_of, simulate_program
from shardwise.errors import NothingFits, PlanError, PlanWarning, ShardwiseError, listed, warn_user
from shardwise.garbage_collector import with_rare_gc
from shardwise.graph.autocast import no_autocast
from shardwise.graph.batch import batch_size
from shardwise.graph.capture import Capture, capture
from shardwise.graph.grouped import grouped_mm, stacked_weights
from shardwise.graph.ir import Graph
from shardwise.graph.stage_marks import marks_of
from shardwise.graph.step_precision import Precision
from shardwise.graph.trees import constants_of
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import named_factors
from shardwise.planning.first_verdict import FirstVerdict, first_verdict
from shardwise.planning.plan_cache import PlanCache, key_of_graph, remembered
from shardwise.plans.auto_stages import LowerBound, StageConfig, check_joint, joint_search, settings_of, tries_of
from shardwise.plans.bind_stages import step_graph
from shardwise.plans.entries import PricingEntry
from shardwise.plans.listing import stage_of
from shardwise.plans.micro_batch_search import Example, MicroBatchOptions, batches_of, best_micro_batch
from shardwise.plans.nothing_fits import nothing_fits, refuse_division
from shardwise.plans.pipelines import pipeline_config, plan_pipeline
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import figures
from shardwise.plans.printing import ADVISED_HOST_SHARE
from shardwise.plans.quantities import format_bytes
from shardwise.plans.request import PlanRequest, SearchName
from shardwise.plans.result import PlanningResult
from shardwise.plans.stage_estimator import StageEstimator, estimated_policies_of
from shardwise.plans.stage_planner import PipelineConfig, choose_stage
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.programs.micro_batches import APART, Passes
from shardwise.progress import (
    STOPPED,
    OutOfTime,
    finishing,
    has_stopped,
    is_shown,
    report_progress,
    report_verdict,
    stop_with,
    until_deadline,
)
from shardwise.report.search_reports import SearchReport
from shardwise.rules.keyed_rows import IMBALANCE
from shardwise.runtime.agree import rank_and_world_size, report_alive, show_progress_once
from shardwise.search.auto import PRICED_SEARCHES, MeshSearch
from shardwise.search.axis_names import AxisUsage, mesh_by_roles
from shardwise.search.constants import BUCKET_SIZES
from shardwise.search.decide import check_layout_names
from shardwise.search.planner import StagePlan
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.stored_program import SearchConfig


def execute(
    request: PlanRequest,
    *,
    exact_refusal: bool = True,
    captures: list[Planning] | None = None,
    seconds: float = inf,
    clock: Callable[[], float] = time.monotonic,
    cache: PlanCache | None = None,
) -> PlanningResult:
    """Plan a request.

    Args:
        request: What to plan.
        exact_refusal: Whether this is the question itself, not a variant of it: a first verdict is shown, and a refusal
            of stages names the least memory over all cuts, which takes longer, not of some. Of a variant that moves
            values to the host, the first size of a micro-batch that fits is taken.
        captures: Earlier requests with what was captured for them; a variant of one that changes neither the call nor
            its dtypes is not captured again. This one is added.
        seconds: When planning ends with the best plan so far, which is announced with its gap. A first Ctrl-C
            ends it as well, unless ranks wait for the plan.
        clock: Returns the time in seconds.
        cache: Where the answer is looked up and kept; None: it is searched.

    Raises:
        ShardwiseError: The model or a setting has a fault that the user can fix.
        PlanError: Nothing fits (``NothingFits``, without suggestions), the model cannot be cut as requested, or
            nothing was found in time.
        KeyboardInterrupt: Ctrl-C before a plan was found.
    """
    begun, precision = time.process_time(), (request.training.precision or Precision()).at_hand
    on_interrupt = rank_and_world_size()[1] == 1
    with (
        show_progress_once("planning"),
        report_alive(),
        no_autocast(),
        torch.autograd.set_detect_anomaly(False),  # fake tensors hold no values to look at
        with_rare_gc(),
        until_deadline(seconds, clock, on_interrupt=on_interrupt) as deadline,
    ):
        try:
            planning = Planning.of(request, precision, exact_refusal, captures if captures is not None else [])
            search = partial(planning.searched, quickly=exact_refusal and (is_shown() or seconds < inf))
            again = partial(execute, request, exact_refusal=exact_refusal, captures=captures)
            found = (
                search()
                if cache is None
                else remembered(cache, planning.key, planning.call, search, again, deadline, begun)
            )
        except OutOfTime as error:
            if deadline.outer is not None:
                raise
            fix = "allow more seconds, or less choice: a mesh=, stages=, recompute= or micro_batch="
            raise PlanError(f"planning ended {error}, before any plan was found", fix=fix) from None
    if deadline.why:
        warn_user(f"planning ended {deadline.why}: this is the best plan so far{_gap_of(found)}", PlanWarning)
    if exact_refusal:
        _announce_held_experts(found.plan, planning.captured.graph)
    return found


def _seconds_of(found: PlanningResult) -> float:
    known = figures(found.plan)
    return inf if known is None else known[0]


def _gap_of(found: PlanningResult) -> str:
    """Format how far the step of a plan is from what is known to be its least."""
    plan, report = found.plan, found.search_report
    if isinstance(report, SearchReport) and report.settings is not None and report.settings.bound:
        step = figures(plan)
        assert step is not None, "it was chosen by price"
        return f"; its step is {step[0] / report.settings.bound - 1:.0%} above the least of all settings"
    gap = None if plan.predicted is None else plan.predicted.optimality_gap
    return "" if gap is None else f"; its price is {gap:.1%} above the least of its micro-batch size"


@dataclass(frozen=True)
class Planning:
    """A request with what was captured for it. ``known``: the step seconds of the best plan so far;
    ``exact_refusal``: see ``execute``."""

    request: PlanRequest
    call: Example
    captured: Capture
    search: SearchName
    known: float = inf
    exact_refusal: bool = True

    @staticmethod
    def of(request: PlanRequest, precision: Precision, exact_refusal: bool, captures: list[Planning]) -> Planning:
        """Capture the request's module, and announce settings that lose or gain nothing. ``captures``: as there."""
        if precision.lost_share:
            warn_user(
                f"parameters are stored as {precision.parameter} and used as {precision.compute}: an update smaller "
                f"than {precision.lost_share:.2g} of a parameter is lost",
                PlanWarning,
            )
        if is_on_host(request.training.optimizer):
            _announce_one_memory(request.cluster)
        earlier = next((planning for planning in captures if planning._is_call_of(request, precision)), None)
        arguments, strategies = (request.args, dict(request.kwargs)), request.parallel.strategies
        terms = tuple(request.training.per_micro_batch)
        if earlier is None:
            report_progress("capturing the model")
            captured = capture(
                request.module, *arguments, loss=request.loss, strategies=strategies, precision=precision,
                heads=request.cluster.num_devices,
            ).with_terms(terms)  # fmt: skip
            call = Example(request.module, arguments, request.loss, strategies, precision, terms, captured.fused_heads)
        else:
            captured, call = earlier.captured, earlier.call
        _check_imbalance(request, captured.graph)
        search = request.search.search
        if search is None:
            is_free = not captured.annotations and not captured.graph.constraints
            search = "dynamic_programming" if is_free and request.search.mode == "auto" else "sharding_propagation"
        planning = Planning(request, call, captured, search, exact_refusal=exact_refusal)
        captures.append(planning)
        return planning

    def _is_call_of(self, request: PlanRequest, precision: Precision) -> bool:
        """Return whether a request is of the call that was captured."""
        own = self.request
        return (
            all(
                mine is other
                for mine, other in (
                    (own.module, request.module), (own.args, request.args), (own.kwargs, request.kwargs),
                    (own.loss, request.loss), (own.parallel.strategies, request.parallel.strategies),
                )
            )
            and self.call.precision == precision
            and self.call.per_micro_batch == tuple(request.training.per_micro_batch)
        )  # fmt: skip

    def key(self) -> str:
        """Return the key of everything that decides the plan. Raises NoKey."""
        request, captured, module = self.request, self.captured, self.request.module
        return key_of_graph(
            captured.graph, captured.constants, captured.annotations, captured.segments, captured.output_names,
            self.call.precision, self.search, self.exact_refusal, request.cluster, request.parallel, request.training,
            request.search, request.candidates, request.example_samples, constants_of(self.call.arguments),
            module.training, marks_of(module), hasattr(module, APART),
        )  # fmt: skip

    # -- the search ----------------------------------------------------------------------------------------------------

    def searched(self, *, quickly: bool) -> PlanningResult:
        """Return the plan of the request. ``quickly``: a first verdict is shown, and its plan is taken if the search
        ends early, before it has a faster one."""
        self.refuse_division()
        first = self.first_verdict() if quickly else None
        known = None if first is None or not first.fits else first.plan
        found: PlanningResult | None = None
        stopped: BaseException | None = None
        try:
            found = self.auto_stages() if self.request.parallel.stages == "auto" else self.one_setting()
        except STOPPED as error:
            stop_with(known is not None)
            stopped = error
        if found is not None and (known is None or not has_stopped() or _seconds_of(found) <= known.seconds):
            return found
        assert first is not None, "what was stopped without a plan has raised"
        assert known is not None, "what was stopped without a plan has raised"
        with finishing():
            stage = known.searched(first.least_seconds)
            if not stage.excess(first.limit):  # else its programs need more than was extrapolated
                result = self._result(known.config, known.passes, stage)
                return result if found is None else min(found, result, key=_seconds_of)
        if found is None:
            assert stopped is not None, "a search that was not stopped has a plan or raises"
            raise stopped
        return found

    def refuse_division(self) -> None:
        """Raise NothingFits if no division of what stays from step to step fits, before anything is searched."""
        if self.by_price:
            request, parallel = self.request, self.request.parallel
            staged = parallel.stages is not None or parallel.schedule is not None
            try:
                refuse_division(
                    self.captured.graph, request.training.optimizer, request.cluster, request.limit, staged=staged
                )
            except NothingFits as refusal:
                if self.exact_refusal:
                    report_verdict(f"does not fit: {refusal.what}")
                raise

    @property
    def by_price(self) -> bool:
        return self.request.search.mode == "auto" and self.search in PRICED_SEARCHES

    @cached_property
    def template(self) -> Plan:
        """A plan without stages, with the settings of the request."""
        request, constants = self.request, constants_of(self.call.arguments)
        return Plan(
            (), request.search.mode, self.search, request.training.optimizer, request.module.training,
            self.config.bucket_bytes, precision=self.call.precision, constants=constants,
            per_micro_batch=self.call.per_micro_batch,
            imbalance=float(request.parallel.imbalance), row_chunks=request.parallel.row_chunks or 1,
        )  # fmt: skip

    @cached_property
    def config(self) -> SearchConfig:
        """The settings of a search on one mesh."""
        parallel = self.request.parallel
        bucket_bytes = BUCKET_BYTES if parallel.bucket_bytes is None else parallel.bucket_bytes
        message_sizes = None
        if bucket_bytes and parallel.stages is None and parallel.schedule is None:
            message_sizes = BUCKET_SIZES if parallel.bucket_bytes is None else ()
        return SearchConfig(
            self.search, self.request.training.optimizer, 1, self.request.search.memory_bytes, bucket_bytes,
            message_sizes, layouts=parallel.layouts or {}, zero=parallel.zero_config, known=self.known,
            imbalance=float(parallel.imbalance),
            row_chunks=parallel.row_chunks or (1 if message_sizes is None else None),
        )  # fmt: skip

    @cached_property
    def _whole_config(self) -> PipelineConfig:
        """The configuration of a plan without stages."""
        request = self.request
        return PipelineConfig.of(request, self.captured, self.config, request.cluster, by_price=self.by_price)

    @cached_property
    def _batches(self) -> MicroBatchOptions | None:
        """The sizes of a micro-batch that may be chosen; None: one pass. With stages they are chosen later."""
        request, training = self.request, self.request.training
        samples, is_joint = training.global_batch, request.parallel.stages == "auto"
        if is_joint and samples is None:
            samples = request.example_samples or 1
        chooses = is_joint or (self.by_price and self.captured.graph.loss is not None)
        devices = request.cluster.num_devices
        return batches_of(request.example_samples, samples, training.micro_batch, devices, chooses=chooses)

    def first_verdict(self) -> FirstVerdict | None:
        """Return the first verdict, and show it; None if there are no prices, or the search ends before it."""
        parallel, devices = self.request.parallel, self.request.cluster.num_devices
        if not self.by_price:
            return None
        is_whole = parallel.stages is None and parallel.schedule is None
        if parallel.stages == "auto":  # a setting of one stage is among those that are searched
            is_whole = parallel.mesh is None or parallel.mesh.num_devices == devices
        report_progress("first verdict")
        try:
            config = self._whole_config if is_whole else None
            verdict = first_verdict(self.request, self.call, self.captured.graph, self._batches, config)
        except ShardwiseError:  # which the search raises again
            return None
        report_verdict(str(verdict))
        return verdict

    # -- one setting of stages -----------------------------------------------------------------------------------------

    def one_setting(self) -> PlanningResult:
        """Plan with the number of stages and the schedule of the request; of several micro-batch sizes take the one
        whose step is predicted to be the shortest."""
        request, parallel, by_price = self.request, self.request.parallel, self.by_price
        has_mesh = parallel.mesh is not None or not by_price
        check_layout_names(parallel.layouts or {}, self.captured.graph, has_mesh=has_mesh)
        is_staged = parallel.stages is not None or parallel.schedule is not None
        if is_staged:
            config = pipeline_config(request, self.captured, self.config, by_price=by_price)
        else:
            config = self._whole_config
        training, graph = request.training, self.captured.graph
        memory_policy = parallel.memory_policy(graph, self.captured.segments)  # raises if impossible
        if is_staged:
            pipeline = plan_pipeline(
                config, self.call, graph, training, self.template, exact_refusal=self.exact_refusal
            )
            report = SearchReport.of(pipeline.plan, pipeline.searched, pipeline.graph, found=pipeline)
            return PlanningResult(pipeline.plan, report)
        if memory_policy.moves_to_host:
            _announce_one_memory(request.cluster)
        batches = self._batches
        whole = graph if batches is None or request.example_samples == batches.step else self.call.graph(batches.step)
        best, tried, _ = best_micro_batch(
            self.call, whole, batches, partial(self._plan_passes, config), staged=False,
            to_host=memory_policy.moves_to_host or not self.exact_refusal,  # a variant's first size that fits will do
        )  # fmt: skip
        if memory_policy.moves_to_host and not any(entry.offloaded for entry in best.plan.operators):
            warn_user(
                "nothing is offloaded to the host: what backward needs of these parts is recomputed, is smaller than "
                "64 KiB on a device, or is kept on the device anyway",
                PlanWarning,
            )
        if isinstance(best.search_report, SearchReport):
            return replace(best, search_report=replace(best.search_report, tried=tried))
        return best

    def _plan_passes(self, config: PipelineConfig, passes: Passes) -> PlanningResult:
        """Plan a step without a pipeline."""
        graph, settings = passes.graphs[passes.sizes[0]], replace(self.config, passes=len(passes.sizes))
        if self.request.search.mode == "data_parallel":
            _announce_repeated(graph, config.meshes[0])
        cache = PlanningCache(self.call.cache)
        planned = choose_stage(replace(config, settings=settings), graph, config.limit, cache)
        if planned.excess(config.limit):
            assert planned.ranking is not None, "its bytes are known"
            raise nothing_fits(planned.ranking)
        return self._result(config, passes, planned)

    def _result(self, config: PipelineConfig, passes: Passes, planned: StagePlan) -> PlanningResult:
        """Return the result of a step without a pipeline."""
        graph, settings = passes.graphs[passes.sizes[0]], replace(self.config, passes=len(passes.sizes))
        rules, choice = planned.factored.rules, planned.choice
        mesh = planned.mesh
        if config.chooses_mesh:
            mesh, _ = mesh_by_roles(mesh, (AxisUsage(graph, rules, choice.strategies),))
        stage = stage_of(graph, rules, choice, planned.spmd, mesh)
        searched = planned.searched
        separate = () if searched is None else _separate_axes(searched.search, stage.mesh)
        pricing = PricingEntry.of(self.request.cluster, settings.memory_bytes, separate)
        plan = replace(
            self.template, stages=(stage,), pricing=pricing, predicted=self._predicted(planned),
            micro_batches=settings.passes, bucket_bytes=planned.bucket_bytes, prefetch=planned.spmd.lifetimes.prefetch,
            row_chunks=planned.choice.row_chunks,
        )  # fmt: skip
        if searched is None or planned.ranking is None:
            return PlanningResult(plan)
        return PlanningResult(plan, SearchReport.of(plan, (searched,), graph, peak=planned.ranking.best.peak))

    def _predicted(self, planned: StagePlan) -> Prediction | None:
        """Return the prediction of a plan without stages: of its compiled step, where compiling is the default."""
        prediction, cluster = planned.prediction, self.request.cluster
        if prediction is None or not prediction.simulated_seconds or not cluster.device.is_cuda:
            return prediction
        prices = Prices(Links(cluster, planned.mesh), self.request.training.optimizer, prediction.passes)
        program = busiest_program(planned.spmd, self.call.cache.vjp_cache)
        compiled = simulate_program(program, prices, compiled=True)
        graphs = 0.0
        if compiled.host_wait >= ADVISED_HOST_SHARE * compiled.seconds and not planned.spmd.lifetimes.offloaded:
            graphs = simulate_program(program, prices, compiled=True, graphs=True).seconds
        return replace(prediction, graph_seconds=graphs, **figures_of(compiled, "compiled_seconds"))

    # -- stages="auto" -------------------------------------------------------------------------------------------------

    def auto_stages(self) -> PlanningResult:
        """Plan with the number of stages, schedule and micro-batch whose step is predicted to be the shortest."""
        request, graph, captured_samples = self.request, self.captured.graph, self.request.example_samples
        cluster, parallel = request.cluster, request.parallel
        check_joint(request.module, by_price=self.by_price)
        batches = self._batches
        assert batches is not None, "the samples of a step are known"
        step = batches.step
        stage_devices = None if parallel.mesh is None else parallel.mesh.num_devices
        settings = settings_of(graph, batches, cluster.num_devices, parallel.schedule, stage_devices)

        def plan_setting(setting: StageConfig, known: float) -> PlanningResult:
            varied = request.varied(
                stages=setting.stages if setting.stages > 1 else None, schedule=setting.schedule or None,
                global_batch=step, micro_batch=setting.micro_batch,
            )  # fmt: skip
            return replace(self, request=varied, known=known, exact_refusal=False).one_setting()

        bound = LowerBound.of(graph, step / (captured_samples or 1), cluster)
        estimates: tuple[Callable[[StageConfig], float], ...] = ()
        if graph.loss is not None:  # the estimator is made if it is asked
            estimates = (lambda s: self._estimator.roughly(s), lambda s: self._estimator.seconds(s))
        chosen, compared = joint_search(
            settings, bound, cluster, plan_setting, tries=tries_of(graph), estimates=estimates
        )
        report = chosen.search_report
        assert isinstance(report, SearchReport), "it was chosen by price"
        return PlanningResult(chosen.plan, replace(report, settings=compared))

    @cached_property
    def _estimator(self) -> StageEstimator:
        """The estimator of pipelines over a step of the request; it takes seconds to make."""
        request, graph, step = self.request, self.captured.graph, self.request.step_samples
        whole = step_graph(graph if request.example_samples == step else self.call.graph(step))
        settings = replace(self.config, layouts={}, zero=None, known=inf)
        policies = estimated_policies_of(request.parallel.recompute, request.parallel.reshard_mode)
        return StageEstimator(whole, request, self.call, settings, self.captured.segments, policies)


def _check_imbalance(request: PlanRequest, graph: Graph) -> None:
    """Raise ShardwiseError if no device can have as many rows as the request plans for, or if no rows travel."""
    imbalance, stages = request.parallel.imbalance, request.parallel.stages
    num_stages = max(stages, 1) if isinstance(stages, int) else 1  # wrong ones are refused later
    owners = request.cluster.num_devices // num_stages
    if imbalance != IMBALANCE and not any(op.target == grouped_mm._opoverload for op in graph.ops):
        raise ShardwiseError(
            f"imbalance is {imbalance:g}, and the model has no product by expert: none of its rows travel",
            fix="leave imbalance= out",
        )
    if imbalance > max(owners, IMBALANCE):
        what = f"imbalance is {imbalance:g}, and {owners} devices at most own the experts of a layer: the busiest has "
        raise ShardwiseError(what + f"all rows at most, {owners} times the mean", fix=f"imbalance= from 1 to {owners}")


def _announce_one_memory(cluster: Cluster) -> None:
    if not cluster.device.host_bandwidth:
        warn_user(
            f"{cluster.device.name} shares its memory with the host (no host_bandwidth): offloading only adds copies "
            "and gains nothing",
            PlanWarning,
        )


def _announce_held_experts(plan: Plan, graph: Graph) -> None:
    """Warn about experts that are divided by a strategy while every device holds the parameters of all of them."""
    held: dict[str, int] = {}
    layouts = {name: layout for stage in plan.stages for name, layout in stage.layouts.items()}
    for op in graph.ops:
        stack = stacked_weights(graph, op)
        if stack is None or not named_factors(str(plan.strategies.get(op.name, ""))) & {"e", "K"}:
            continue
        for name in stack.operands:
            layout = layouts.get(name)
            if layout is not None and layout.max_local_shape == layout.shape:
                held[name] = graph.by_name[name].num_bytes
    if held:
        warn_user(
            "parameters of experts in a list of modules stay whole on every device "
            f"({format_bytes(sum(held.values()))}: {listed([*held])}): the axes of the experts divide no dim of these. "
            "For less memory choose sizes that they divide, or keep the weights of all experts in one parameter, "
            "nn.Parameter(torch.empty(num_experts, inputs, outputs))",
            PlanWarning,
        )


def _announce_repeated(graph: Graph, mesh: Mesh) -> None:
    samples = batch_size(graph)
    if samples is not None and samples < mesh.num_devices:
        warn_user(
            f"a batch of {samples} on {mesh.num_devices} devices: some devices repeat the work of others. Use a "
            f"micro-batch of at least {mesh.num_devices} samples.",
            PlanWarning,
        )


def _separate_axes(search: MeshSearch, called: Mesh) -> tuple[str, ...]:
    """Return the axes whose parts the search treated differently. ``called``: its mesh with the axis names of the
    plan."""
    mesh, groups = search.mesh, search.cost.domains.axes.groups
    return tuple(
        called_name
        for (name, _), (called_name, _) in zip(mesh.axes, called.axes, strict=True)
        if len(mesh.expand(name)) > 1 and mesh.expand(name) not in groups
    )
