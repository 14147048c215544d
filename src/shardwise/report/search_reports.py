"""Reports of the searches that chose a plan: what ``sw.plan(...).report`` is for a plan chosen by price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.costs.ledger import Peak
from shardwise.costs.trace import Track, write_trace
from shardwise.errors import PlanError
from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_layout
from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.micro_batch_search import MicroBatchOutcome
from shardwise.plans.pipelines import PipelineResult
from shardwise.plans.plan import Plan
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.plans.stage_planner import StageSearchResult
from shardwise.programs.rank_program import RankProgram
from shardwise.report.alternatives import PlanRanking, WhatIf, top, what_if
from shardwise.report.cost_graph_file import write_cost_graph
from shardwise.report.expert_ways import ExpertWays, expert_ways
from shardwise.report.explain import Explanation, explain
from shardwise.report.outline import alternatives
from shardwise.report.page import OperatorLookup, StageFigures, write_page
from shardwise.report.pipeline_ranking import PipelineRanking, rank_pipelines
from shardwise.report.stage_passes import StagePass, stage_passes, stage_peak, tracks_of, with_saved
from shardwise.runtime.pipeline_profile import PipelineProfile
from shardwise.runtime.step_profile import StepProfile
from shardwise.search.auto import MeshSearch
from shardwise.untrusted_text import shorten_repr

MOST_PLANS = 1000  # the limit of k of ``top``


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batch sizes that were tried, in this order, and the one that was taken."""

    tried: tuple[MicroBatchOutcome, ...]
    taken: int | None

    def __str__(self) -> str:
        if not self.tried:
            return f"a micro-batch has {self.taken} samples, as requested; no other size was tried"
        lines = [f"a micro-batch has {self.taken} samples; tried, the largest first, until steps got longer:"]
        for size in self.tried:
            fits = f"step {format_seconds(size.step_seconds)}, peak {format_bytes(int(size.num_bytes))}"
            lines.append(f"  {size.micro_batch} ({size.passes} micro-batches): {size.refused or fits}")
        return "\n".join(lines)


class SearchReport:
    """The report of a search, whatever was searched. ``plan``: the plan that was chosen; ``settings``: the numbers of
    stages, schedules and micro-batches that it was compared with, if these were chosen."""

    plan: Plan
    settings: AutoStagesReport | None

    def passes(self) -> tuple[StagePass, ...]:
        """Return a simulated pass over a micro-batch for every stage."""
        raise NotImplementedError

    def alternatives_of(self, name: str) -> Mapping[str, Any] | None:
        """Return table rows on the choice of an operator; None if it was not chosen by price."""
        raise NotImplementedError

    def stage_figures(self) -> tuple[StageFigures, ...]:
        """Return the figures of every stage, with all micro-batches in flight, for a page; none without prices."""
        if self.plan.pipeline is None and self.plan.predicted is None:
            return ()
        figures = []
        for number, of_stage in enumerate(self.passes()):
            step, waiting = of_stage.step, 0
            if self.plan.pipeline is not None:
                waiting = stage_peak(self.plan, number, step).num_bytes - step.peak_bytes
            over = tuple(with_saved(peak, waiting) for peak in of_stage.over)
            step = replace(step, peak=with_saved(step.peak, waiting))
            figures.append(
                StageFigures(step, over, *_types_and_reads(of_stage.graph, of_stage.program), self.alternatives_of)
            )
        return tuple(figures)

    def write(
        self,
        path: str | Path,
        *,
        other: Plan | PlanningResult | None = None,
        profile: StepProfile | PipelineProfile | None = None,
    ) -> None:
        """Write the plan as one HTML file that loads nothing from a network.

        It shows where time and memory go in a simulated pass, how stages run, which rank holds what, and of every
        operator the types, the messages and the alternatives.

        Args:
            path: The file.
            other: A plan to set beside this one.
            profile: A measured step (``par.profile``) to lay over the prediction.
        """
        searched = other.search_report if isinstance(other, PlanningResult) else None
        beside = searched.stage_figures() if isinstance(searched, SearchReport) else ()
        write_page(path, self.plan, self.stage_figures(), profile=profile, other=plan_of(other), other_figures=beside)


@dataclass(frozen=True, eq=False)
class MeshReport(SearchReport):
    """The report of the search for a plan without pipeline stages. ``peak``: of the fullest device; ``tried``: the
    micro-batches, if one was chosen."""

    plan: Plan
    finished_search: MeshSearch
    peak: Peak
    tried: tuple[MicroBatchOutcome, ...] = ()
    settings: AutoStagesReport | None = None

    @staticmethod
    def of(plan: Plan, finished_search: MeshSearch, peak: Peak) -> MeshReport:
        return MeshReport(plan, replace(finished_search, called=plan.mesh), peak)

    def explain(self, name: str) -> AutoStagesReport | Explanation | ExpertWays | MicroBatches:
        """Explain one choice: its alternatives with their prices, term by term, and the neighbour that made the choice.

        Args:
            name: An operator or a parameter, as the plan prints it; ``"micro_batch"`` for the sizes that were tried;
                ``"stages"`` for the settings that were compared, if ``sw.plan`` chose the stages; ``"experts"`` for the
                ways in which rows come to their experts, layer by layer.

        Raises:
            PlanError: The name is unknown.
        """
        if name == "stages" and self.settings is not None:
            return self.settings
        if name == "experts":
            return expert_ways([(self.finished_search, {})], self.plan.imbalance)
        if name == "micro_batch":
            return MicroBatches(self.tried, self.plan.micro_batch)
        return explain(self.finished_search, name)

    def what_if(self, name: str, choice: str) -> WhatIf:
        """Return the best plan in which one choice is changed, and all choices that change with it.

        Args:
            name: An operator or a parameter, as the plan prints it.
            choice: Its strategy (of a parameter, its layout), as ``explain`` prints it.

        Raises:
            PlanError: The name or the choice is unknown.
        """
        return what_if(self.finished_search, name, choice)

    def top(self, k: int = 5) -> PlanRanking:
        """Return the best ``k`` plans of the search (1 to ``MOST_PLANS``) at the same prices, the chosen one first."""
        return top(self.finished_search, _checked_count(k))

    def cost_graph(self, path: str | Path) -> None:
        """Write the cost graph that the search minimised, with the chosen entries marked: as JSON, or as DOT if the
        path ends in ``.dot``."""
        write_cost_graph(self.finished_search, path)

    def trace(self, path: str | Path) -> None:
        """Write a simulated pass as a trace for https://ui.perfetto.dev or chrome://tracing. It has the operators with
        their lines of the model, the messages of every group of devices, and the memory in use."""
        (whole,), mesh = self.passes(), self.plan.mesh
        lines = {op.name: op.source for op in whole.program.spmd.graph.ops}
        write_trace(path, [Track.of(f"a rank of {mesh}, simulated", whole.step.events, mesh, lines, whole.over)])

    def passes(self) -> tuple[StagePass, ...]:
        return stage_passes(self.plan, self.finished_search.cost.domains.graph, None)

    def alternatives_of(self, name: str) -> Mapping[str, Any]:
        return _alternatives(self.finished_search, name)


@dataclass(frozen=True, slots=True)
class StageExplanation:
    """An explanation of a choice in its ``stage``. Equal stages share the search of the first one; ``alike`` is the
    name there, or empty if it is the same."""

    stage: int
    alike: str
    explanation: Explanation

    def __str__(self) -> str:
        shared = f", planned as an equal stage, where its name is {self.alike}" if self.alike else ""
        return f"in stage {self.stage}{shared}\n{self.explanation}"


@dataclass(frozen=True, slots=True)
class StageWhatIf:
    """The best plan of a ``stage`` with one choice changed. The prediction is for a pass of that stage."""

    stage: int
    found: WhatIf


@dataclass(frozen=True, eq=False)
class PipelineReport(SearchReport):
    """The report of the searches for a pipeline's stages. ``searched``: of each stage its search; ``found``: how the
    pipeline was found."""

    plan: Plan
    searched: tuple[StageSearchResult | None, ...]
    found: PipelineResult
    settings: AutoStagesReport | None = None

    @staticmethod
    def of(found: PipelineResult) -> PipelineReport:
        """Make the report. Equal stages have one search, and equal meshes have equal names."""
        plan = found.plan
        called: dict[int, MeshSearch] = {}
        searches = tuple(
            None
            if searched is None
            else replace(
                searched, search=called.setdefault(id(searched.search), replace(searched.search, called=stage.mesh))
            )
            for stage, searched in zip(plan.stages, found.searched, strict=True)
        )
        return PipelineReport(plan, searches, found)

    def explain(self, name: str) -> AutoStagesReport | ExpertWays | StageExplanation:
        """Explain one choice in its stage, ``"stages"`` or ``"experts"``, as ``MeshReport.explain`` does.

        The layouts of values between stages, and of parameters in several stages, were unified after the search.

        Args:
            name: An operator or a parameter, as the plan prints it.

        Raises:
            PlanError: The name is unknown, or no stage was chosen by price.
        """
        if name == "stages" and self.settings is not None:
            return self.settings
        if name == "experts":
            return expert_ways(self._searches(), self.plan.imbalance)
        number, searched = self._home(name)
        called = searched.names[name]
        return StageExplanation(number, "" if called == name else called, explain(searched.search, called))

    def what_if(self, name: str, choice: str) -> StageWhatIf:
        """Return the best plan of a stage in which one choice is changed, as ``MeshReport.what_if`` does.

        The prediction is for a pass of that stage. The other stages, and the values between stages, are not changed.

        Args:
            name: An operator or a parameter, as the plan prints it.
            choice: Its strategy (of a parameter, its layout), as ``explain`` prints it.

        Raises:
            PlanError: The name or the choice is unknown, or no stage was chosen by price.
        """
        number, searched = self._home(name)
        answer = what_if(searched.search, searched.names[name], choice)
        names = {called: name for name, called in searched.names.items()}

        def in_stage(shown: str) -> str:
            kind, space, called = shown.rpartition(" ")  # "shared add", "received add", or a name alone
            return f"{kind}{space}{names.get(called, called)}"

        changed = tuple(change._replace(name=in_stage(change.name)) for change in answer.changed)
        return StageWhatIf(number, replace(answer, changed=changed))

    def top(self, k: int = 5) -> PipelineRanking:
        """Return the best ``k`` of the pipelines that are close to this one.

        Each cut is moved by a block (by an operator, if there are no blocks), and the other micro-batch sizes and
        settings that were tried are taken. Each pipeline is planned and simulated as the chosen one was.

        Args:
            k: The number of pipelines, 1 to ``MOST_PLANS``.

        Raises:
            PlanError: No stage was chosen by price.
        """
        return PipelineRanking(*rank_pipelines(self.found, _checked_count(k), self.settings))

    def _searches(self) -> list[tuple[MeshSearch, Mapping[str, list[str]]]]:
        """Return every search once, with the names that its operators have in the stages that share it."""
        found: dict[int, tuple[MeshSearch, dict[str, list[str]]]] = {}
        for searched in self.searched:
            if searched is not None:
                _, names = found.setdefault(id(searched.search), (searched.search, {}))
                for name, called in searched.names.items():
                    names.setdefault(called, []).append(name)
        return list(found.values())

    def _home(self, name: str) -> tuple[int, StageSearchResult]:
        """Return the stage that has an operator or a parameter, and its search."""
        for number, searched in enumerate(self.searched):
            if searched is not None and name in searched.names:
                return number, searched
        names = [name for searched in self.searched if searched is not None for name in searched.names]
        if not names:
            raise PlanError("no stage was chosen by price", fix='plan with search="dynamic_programming"')
        near = ", ".join(get_close_matches(name, names, 3) or names[:6])
        raise PlanError(f"no stage has {name!r}", fix=f"one of {near}, ...")

    def passes(self) -> tuple[StagePass, ...]:
        return stage_passes(self.plan, self.found.graph, self.found.prelude)

    def trace(self, path: str | Path) -> None:
        """Write a simulated step as a trace for https://ui.perfetto.dev or chrome://tracing.

        It has the actions of every pipeline rank, its sends, the operators and messages of the first micro-batch with
        their lines of the model, and the memory that a device uses. Raises PlanError for stages that were not chosen by
        price.
        """
        write_trace(path, tracks_of(self.plan, self.passes()))

    def cost_graph(self, path: str | Path) -> None:
        """Raise PlanError: every stage has a cost graph of its own."""
        raise PlanError(
            "a pipeline has a search for every stage and none over all of them",
            fix="explain(name) and what_if(name, choice) ask the stage of an operator",
        )

    def alternatives_of(self, name: str) -> Mapping[str, Any] | None:
        for searched in self.searched:
            if searched is None or searched.names.get(name) not in searched.search.cost.domains.graph.op_by_name:
                continue
            called = searched.names[name]
            prefix = f"as {called} of an equal stage: " if called != name else ""
            rows = self._explained.get((id(searched.search), called)) or _alternatives(searched.search, called)
            self._explained[id(searched.search), called] = rows  # equal stages have one search
            return {**rows, "said": prefix + rows["said"]}
        return None

    @cached_property
    def _explained(self) -> dict[tuple[int, str], Mapping[str, Any]]:
        return {}


def _types_and_reads(graph: Graph, program: RankProgram) -> tuple[OperatorLookup, OperatorLookup]:
    makers = {name: op.name for op in graph.ops for name in op.results}
    layouts = program.spmd.layouts

    def types(name: str) -> tuple[str, ...]:
        results = [value for value in graph.op_by_name[name].results if value in layouts]
        return tuple(format_layout(layouts[value], graph.by_name[value].dtype) for value in results)

    def reads(name: str) -> tuple[str, ...]:
        return tuple(makers[value] for value in graph.op_by_name[name].operands if value in makers)

    return types, reads


def _checked_count(k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_PLANS:
        fix = f"a whole number from 1 to {MOST_PLANS:,}"
        raise PlanError(f"k is {shorten_repr(k)}", fix=fix)
    return k


def _alternatives(search: MeshSearch, name: str) -> Mapping[str, Any]:
    """Return table rows for the page; for an operator without alternatives, the reason."""
    try:
        return alternatives(explain(search, name))
    except PlanError as error:
        return {"said": str(error).partition("\n")[0], "rows": [], "more": 0}
