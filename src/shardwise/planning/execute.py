"""Planning a request: capture, the choice of micro-batch, stages and layouts, and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.optimizers import is_on_host
from shardwise.costs.prices import Prices
from shardwise.errors import PlanError, PlanWarning, warn_user
from shardwise.garbage_collector import with_rare_gc
from shardwise.graph.autocast import no_autocast
from shardwise.graph.batch import batch_size
from shardwise.graph.capture import Capture, capture
from shardwise.graph.ir import Graph
from shardwise.graph.step_precision import Precision
from shardwise.graph.trees import constants_of
from shardwise.layouts.mesh import Mesh
from shardwise.plans.auto_stages import LowerBound, StageConfig, check_joint, joint_search, settings_of, tries_of
from shardwise.plans.axis_names import AxisUsage, name_axes_by_role
from shardwise.plans.bind_stages import step_graph
from shardwise.plans.listing import stage_of
from shardwise.plans.micro_batch_search import Captures, Example, MicroBatchSearch, batches_of
from shardwise.plans.pipelines import plan_captured_pipeline
from shardwise.plans.plan import Plan, PricingEntry
from shardwise.plans.request import PlanRequest, SearchName
from shardwise.plans.result import PlanningResult
from shardwise.plans.stage_estimator import StageEstimator, estimated_policies_of
from shardwise.plans.stage_planner import nothing_fits
from shardwise.programs.micro_batches import Passes
from shardwise.programs.vjp import VjpCache
from shardwise.progress import report_progress
from shardwise.report.search_reports import MeshReport, PipelineReport
from shardwise.runtime.agree import report_alive, show_progress_once
from shardwise.search.auto import PRICED_SEARCHES, MeshSearch
from shardwise.search.config import SearchConfig
from shardwise.search.decide import decide
from shardwise.search.fit_memory import fit_memory
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.mesh_shapes import candidate_meshes
from shardwise.search.planner import Planner
from shardwise.search.stored_program import build_program
from shardwise.search.user_layouts import apply_layouts


def execute(request: PlanRequest, *, exact_refusal: bool = True) -> PlanningResult:
    """Plan a request.

    Args:
        request: What to plan.
        exact_refusal: Whether a refusal of stages names the least memory over all cuts, which takes longer, or of some.

    Raises:
        ShardwiseError: The model or a setting has a fault that the user can fix.
        PlanError: Nothing fits (``NothingFits``, without suggestions), or the model cannot be cut as requested.
    """
    precision = (request.training.precision or Precision()).at_hand
    with show_progress_once("planning"), report_alive(), no_autocast(), with_rare_gc():
        planning = Planning.of(request, precision, exact_refusal)
        return planning.auto_stages() if request.parallel.stages == "auto" else planning.one_setting()


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
    def of(request: PlanRequest, precision: Precision, exact_refusal: bool) -> Planning:
        """Capture the request's module, and announce settings that lose or gain nothing."""
        if precision.lost_share:
            warn_user(
                f"parameters are stored as {precision.parameter} and used as {precision.compute}: an update smaller "
                f"than {precision.lost_share:.2g} of a parameter is lost",
                PlanWarning,
            )
        if is_on_host(request.training.optimizer):
            _announce_one_memory(request.cluster)
        report_progress("capturing the model")
        arguments, strategies = (request.args, dict(request.kwargs)), request.parallel.strategies
        captured = capture(request.module, *arguments, loss=request.loss, strategies=strategies, precision=precision)
        search = request.search.search
        if search is None:
            is_free = not captured.annotations and not captured.graph.constraints
            search = "dynamic_programming" if is_free and request.search.mode == "auto" else "sharding_propagation"
        call = Example(request.module, arguments, request.loss, strategies, precision, Captures())
        return Planning(request, call, captured, search, exact_refusal=exact_refusal)

    @property
    def by_price(self) -> bool:
        return self.request.search.mode == "auto" and self.search in PRICED_SEARCHES

    @cached_property
    def template(self) -> Plan:
        """A plan without stages, with the settings of the request."""
        request, constants = self.request, constants_of(self.call.arguments)
        return Plan(
            (), request.search.mode, self.search, request.training.optimizer, request.module.training,
            request.parallel.bucket_bytes, precision=self.call.precision, constants=constants,
        )  # fmt: skip

    @cached_property
    def config(self) -> SearchConfig:
        """The settings of a search on one mesh."""
        parallel = self.request.parallel
        return SearchConfig(
            self.search, self.request.training.optimizer, 1, self.request.search.memory_bytes, parallel.bucket_bytes,
            parallel.layouts or {}, zero=parallel.zero_config, known=self.known,
        )  # fmt: skip

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """Return the meshes to try on some devices."""
        mesh = self.request.parallel.mesh
        return candidate_meshes(cluster, self.request.search.max_mesh_axes) if mesh is None else (mesh,)

    # -- one setting of stages -----------------------------------------------------------------------------------------

    def one_setting(self) -> PlanningResult:
        """Plan with the number of stages and the schedule of the request."""
        parallel = self.request.parallel
        if parallel.stages is None and parallel.schedule is None:
            return self.without_stages()
        pipeline = plan_captured_pipeline(
            self.call, self.captured, self.request, self.config, self.template,
            by_price=self.by_price, exact_refusal=self.exact_refusal,
        )  # fmt: skip
        return PlanningResult(pipeline.plan, PipelineReport.of(pipeline))

    def without_stages(self) -> PlanningResult:
        """Plan without a pipeline; of several micro-batches take the one whose step is predicted to be the shortest."""
        request, graph = self.request, self.captured.graph
        training, chooses = request.training, self.by_price and graph.loss is not None
        batches = batches_of(
            request.example_samples, training.global_batch, training.micro_batch, request.cluster.num_devices,
            chooses=chooses,
        )  # fmt: skip
        parallel, zero = request.parallel, request.parallel.zero_config
        recompute = None if parallel.recompute == "auto" else parallel.recompute
        memory_policy = MemoryPolicy.of(
            graph, self.captured.segments, recompute, "held" if zero is None else zero.reshard_mode, parallel.offload
        )
        if memory_policy.moves_to_host:
            _announce_one_memory(request.cluster)
        config = replace(self.config, memory_policy=memory_policy)
        trials = MicroBatchSearch(self.call, graph, batches)
        for pass_graph, passes in trials:
            try:
                choose = self._searched if self.by_price else self._by_mode
                trials.add(choose(pass_graph, replace(config, passes=passes)))
            except PlanError as error:
                trials.refuse(error)
        best = trials.best()
        if memory_policy.moves_to_host and not any(entry.offloaded for entry in best.plan.operators):
            warn_user(
                "nothing is offloaded to the host: what backward needs of these parts is recomputed, is smaller than "
                "64 KiB on a device, or is kept on the device anyway",
                PlanWarning,
            )
        report = best.search_report
        if isinstance(report, MeshReport):
            best = replace(best, search_report=replace(report, tried=trials.choices))
        return best

    def _by_mode(self, graph: Graph, config: SearchConfig) -> PlanningResult:
        """Plan as the mode completes the strategies, on one mesh."""
        request = self.request
        cluster, mode = request.cluster, request.search.mode
        mesh = request.parallel.mesh or Mesh(dp=cluster.num_devices)
        if mode == "data_parallel":
            _announce_repeated(graph, mesh)
        factored, choice = decide(graph, self.captured.annotations, mesh, mode)
        choice = apply_layouts(choice, config.layouts, graph, factored, mesh)
        program = build_program(graph, factored.rules, choice, mesh, config, VjpCache())
        stages = (stage_of(graph, factored.rules, program.choice, program.spmd),)
        prices = Prices(Links(cluster, mesh), config.optimizer, config.passes)
        prediction = program.prediction(prices.with_buckets(graph, config.bucket_bytes))
        pricing = PricingEntry.of(cluster, config.memory_bytes)
        return PlanningResult(
            replace(self.template, stages=stages, pricing=pricing, predicted=prediction, micro_batches=config.passes)
        )

    def _searched(self, graph: Graph, config: SearchConfig) -> PlanningResult:
        """Plan by price, on the best of the meshes."""
        parallel, cluster = self.request.parallel, self.request.cluster
        planner = Planner.of(graph, self.captured.annotations, cluster, self.meshes(cluster), config)
        if self.call.known is not None:
            planner = replace(planner, vjp_cache=self.call.known.vjp_cache)
        if parallel.recompute == "auto":
            zero = parallel.zero_config
            reshard_mode = None if zero is None else zero.reshard_mode
            searched = fit_memory(planner, self.captured.segments, reshard_mode, parallel.offload)
        else:
            searched = planner.plan()
        if searched.ranking.excess:
            raise nothing_fits(searched.ranking)
        rules, choice = searched.factored.rules, searched.choice
        stage = stage_of(graph, rules, choice, searched.spmd)
        if parallel.mesh is None:
            (stage,) = name_axes_by_role((stage,), (AxisUsage(graph, rules, choice.strategies),))
        pricing = _pricing(cluster, config.memory_bytes, searched.search, stage.mesh)
        plan = replace(
            self.template, stages=(stage,), pricing=pricing, predicted=searched.prediction, micro_batches=config.passes
        )
        return PlanningResult(plan, MeshReport.of(plan, searched.search, searched.ranking.best.peak))

    # -- stages="auto" -------------------------------------------------------------------------------------------------

    def auto_stages(self) -> PlanningResult:
        """Plan with the number of stages, schedule and micro-batch whose step is predicted to be the shortest."""
        request, graph, captured_samples = self.request, self.captured.graph, self.request.example_samples
        cluster, parallel = request.cluster, request.parallel
        check_joint(request.module, by_price=self.by_price)
        samples = (captured_samples or 1) if request.training.global_batch is None else request.training.global_batch
        batches = batches_of(captured_samples, samples, request.training.micro_batch, cluster.num_devices, chooses=True)
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
            estimates = (lambda s: self._estimator.least(s), lambda s: self._estimator.seconds(s))
        chosen, compared = joint_search(
            settings, bound, cluster, plan_setting, tries=tries_of(graph), estimates=estimates
        )
        report = chosen.search_report
        assert isinstance(report, MeshReport | PipelineReport), "it was chosen by price"
        return PlanningResult(chosen.plan, replace(report, settings=compared))

    @cached_property
    def _estimator(self) -> StageEstimator:
        """The estimator of pipelines over a step of the request; it takes seconds to make."""
        request, graph = self.request, self.captured.graph
        step, zero = request.step_samples, request.parallel.zero_config

        def graph_of_pass(short: Graph, size: int) -> Graph:
            if size == step:
                return short
            return Passes.over(request.module, short, size, self.call.graph).graphs[size]

        whole = step_graph(graph if request.example_samples == step else self.call.graph(step))
        config = SearchConfig(
            self.search, request.training.optimizer, 1, request.search.memory_bytes, request.parallel.bucket_bytes
        )
        policies = estimated_policies_of(request.parallel.recompute, None if zero is None else zero.reshard_mode)
        return StageEstimator(
            whole, graph_of_pass, self.meshes, request.cluster, config, self.captured.segments, policies
        )


def _announce_one_memory(cluster: Cluster) -> None:
    if not cluster.device.host_bandwidth:
        warn_user(
            f"{cluster.device.name} shares its memory with the host (no host_bandwidth): offloading only adds copies "
            "and gains nothing",
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


def _pricing(cluster: Cluster, memory_bytes: float | None, search: MeshSearch, called: Mesh) -> PricingEntry:
    """Return the plan's record of its prices. ``called``: the mesh of the search with the axis names of the plan."""
    mesh, groups = search.mesh, search.cost.domains.axes.groups
    separate = tuple(
        called_name
        for (name, _), (called_name, _) in zip(mesh.axes, called.axes, strict=True)
        if len(mesh.expand(name)) > 1 and mesh.expand(name) not in groups
    )
    return PricingEntry.of(cluster, memory_bytes, separate)
