"""Reports of the searches that chose a plan: what ``sw.plan(...).report`` is for a plan chosen by price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.costs.ledger import Peak
from shardwise.costs.trace import Track, write_trace
from shardwise.errors import PlanError
from shardwise.graph.ir import Graph
from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.micro_batch_search import MicroBatchOutcome
from shardwise.plans.pipelines import PipelineResult
from shardwise.plans.plan import Plan
from shardwise.plans.printing import format_tie
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.report.alternatives import (
    ExpertWays,
    PipelineRanking,
    PlanRanking,
    WhatIf,
    expert_ways,
    rank_pipelines,
    top,
    what_if,
)
from shardwise.report.cost_graph_file import write_cost_graph
from shardwise.report.explain import Explanation, explain
from shardwise.report.outline import alternatives
from shardwise.report.page import write_page
from shardwise.report.stage_passes import StagePass, stage_passes, stage_peak, tracks_of
from shardwise.runtime.step_profile import PipelineProfile, StepProfile
from shardwise.search.auto import MeshSearch
from shardwise.search.planner import StageSearchResult
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
class SearchReport:
    """The report of the searches that chose a plan, one for every stage.

    Attributes:
        plan: The plan.
        searched: Of each stage its search; None: it was not chosen by price. Equal stages have one search.
        graph: The graph of a micro-batch.
        peak: Without pipeline stages, the peak of the fullest device.
        tried: The micro-batches that were tried, if one was chosen, without pipeline stages.
        found: How a pipeline was found.
        settings: The numbers of stages, schedules and micro-batches that were compared, if these were chosen.
    """

    plan: Plan
    searched: tuple[StageSearchResult | None, ...]
    graph: Graph
    peak: Peak | None = None
    tried: tuple[MicroBatchOutcome, ...] = ()
    found: PipelineResult | None = None
    settings: AutoStagesReport | None = None

    @staticmethod
    def of(plan: Plan, searched: Sequence[StageSearchResult | None], graph: Graph, **others: Any) -> SearchReport:
        """Make the report, whose searches have the axis names of the plan. ``others``: fields by name."""
        called: dict[int, MeshSearch] = {}
        searches = list(searched)
        for number, (stage, one) in enumerate(zip(plan.stages, searched, strict=True)):
            if one is not None:
                search = called.setdefault(id(one.search), replace(one.search, called=stage.mesh))
                searches[number] = replace(one, search=search)
        return SearchReport(plan, tuple(searches), graph, **others)

    @property
    def finished_search(self) -> MeshSearch:
        """The search for a plan without pipeline stages. Raises PlanError for a pipeline."""
        if self.plan.is_pipeline:
            raise PlanError(
                "a pipeline has a search for every stage and none over all of them",
                fix="explain(name) and what_if(name, choice) ask the stage of an operator",
            )
        return self._home("")[1].search

    def explain(self, name: str) -> AutoStagesReport | Explanation | ExpertWays | MicroBatches | StageExplanation:
        """Explain one choice: its alternatives with their prices, term by term, and the neighbour that made the choice.

        In a pipeline this is the choice in its stage. The layouts of values between stages, and of parameters in
        several stages, were unified after the search.

        Args:
            name: An operator or a parameter, as the plan prints it; ``"micro_batch"`` for the sizes that were tried
                (without pipeline stages); ``"stages"`` for the settings that were compared, if ``sw.plan`` chose the
                stages; ``"experts"`` for the ways in which rows come to their experts, layer by layer.

        Raises:
            PlanError: The name is unknown, or no stage was chosen by price.
        """
        if name == "stages" and self.settings is not None:
            return self.settings
        if name == "experts":
            return expert_ways(self._searches(), self.plan.imbalance)
        if name == "micro_batch" and not self.plan.is_pipeline:
            return MicroBatches(self.tried, self.plan.micro_batch)
        number, searched = self._home(name)
        called = searched.names.get(name, name)
        explanation = explain(searched.search, called)
        if self.plan.is_pipeline:
            return StageExplanation(number, "" if called == name else called, explanation)
        cost = self.plan.predicted
        return replace(explanation, tie="" if cost is None else format_tie(cost))

    def what_if(self, name: str, choice: str) -> WhatIf | StageWhatIf:
        """Return the best plan in which one choice is changed, and all choices that change with it.

        In a pipeline, the prediction is for a pass of the stage that has the choice. The other stages, and the values
        between stages, are not changed.

        Args:
            name: An operator or a parameter, as the plan prints it.
            choice: Its strategy (of a parameter, its layout), as ``explain`` prints it.

        Raises:
            PlanError: The name or the choice is unknown, or no stage was chosen by price.
        """
        number, searched = self._home(name)
        answer = what_if(searched.search, searched.names.get(name, name), choice)
        if not self.plan.is_pipeline:
            return answer
        names = {called: name for name, called in searched.names.items()}

        def in_stage(shown: str) -> str:
            kind, space, called = shown.rpartition(" ")  # "shared add", "received add", or a name alone
            return f"{kind}{space}{names.get(called, called)}"

        changed = tuple(change._replace(name=in_stage(change.name)) for change in answer.changed)
        return StageWhatIf(number, answer._replace(changed=changed))

    def top(self, k: int = 5) -> PlanRanking | PipelineRanking:
        """Return the best ``k`` plans of the search at the same prices, the chosen one first.

        Of a pipeline, return the best of those that are close to it. Each cut is moved by a block (by an operator, if
        there are no blocks), and the other micro-batch sizes and settings that were tried are taken. Each pipeline is
        planned and simulated as the chosen one was.

        Args:
            k: The number of plans, 1 to ``MOST_PLANS``.

        Raises:
            PlanError: No stage was chosen by price.
        """
        count = _checked_count(k)
        if self.found is not None:
            return PipelineRanking(*rank_pipelines(self.found, count, self.settings))
        return top(self.finished_search, count)

    def cost_graph(self, path: str | Path) -> None:
        """Write the cost graph that the search minimised, with the chosen entries marked: as JSON, or as DOT if the
        path ends in ``.dot``. Raises PlanError for a pipeline: every stage has a cost graph of its own."""
        write_cost_graph(self.finished_search, path)

    def trace(self, path: str | Path) -> None:
        """Write a simulated step as a trace for https://ui.perfetto.dev or chrome://tracing.

        It has the operators of a pass over a micro-batch with their lines of the model, the messages of every group of
        devices, and the memory in use; of a pipeline also the actions of every pipeline rank and its sends. Raises
        PlanError for stages that were not chosen by price.
        """
        passes = self.passes()
        if self.plan.is_pipeline:
            write_trace(path, tracks_of(self.plan, passes))
            return
        (whole,), mesh = passes, self.plan.mesh
        lines = {op.name: op.source for op in whole.program.spmd.graph.ops}
        write_trace(path, [Track.of(f"a rank of {mesh}, simulated", whole.step.events, mesh, lines, whole.over)])

    def passes(self) -> tuple[StagePass, ...]:
        """Return a simulated pass over a micro-batch for every stage."""
        return stage_passes(self.plan, self.graph, None if self.found is None else self.found.prelude)

    def alternatives_of(self, name: str) -> Mapping[str, Any] | None:
        """Return table rows on the choice of an operator; None if it was not chosen by price."""
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
        """Return the stage that has an operator or a parameter (without a pipeline, the only one), and its search."""
        for number, searched in enumerate(self.searched):
            if searched is not None and (name in searched.names or not self.plan.is_pipeline):
                return number, searched
        names = [name for searched in self.searched if searched is not None for name in searched.names]
        if not names:
            raise PlanError("no stage was chosen by price", fix='plan with search="dynamic_programming"')
        near = ", ".join(get_close_matches(name, names, 3) or names[:6])
        raise PlanError(f"no stage has {name!r}", fix=f"one of {near}, ...")

    def stage_figures(self) -> tuple[StagePass, ...]:
        """Return a pass of every stage, with all micro-batches in flight, for a page; none without prices."""
        if self.plan.pipeline is None and self.plan.predicted is None:
            return ()
        figures = []
        for number, of_stage in enumerate(self.passes()):
            peak = of_stage.step.peak
            if self.plan.pipeline is not None:
                peak = stage_peak(self.plan, number, of_stage.step)
            waiting = peak.num_bytes - of_stage.step.peak_bytes
            step = replace(of_stage.step, peak=peak)
            figures.append(replace(of_stage, step=step, waiting=waiting, why=self.alternatives_of))
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
        searched = None
        with suppress(PlanError):  # one that was not chosen by price
            searched = other.report if isinstance(other, PlanningResult) else None
        beside = searched.stage_figures() if isinstance(searched, SearchReport) else ()
        write_page(path, self.plan, self.stage_figures(), profile=profile, other=plan_of(other), other_figures=beside)


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
