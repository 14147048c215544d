"""A plan together with the search that chose it: what ``sw.plan`` returns for a plan chosen by price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.costs.ledger import Peak
from shardwise.costs.memory import busiest_program, memory_of_program
from shardwise.costs.timeline import SimulatedStep, simulate_program
from shardwise.costs.trace import Track, write_trace
from shardwise.errors import PlanError, problem
from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_layout
from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.bind import program_of
from shardwise.plans.other_pipelines import rank_pipelines
from shardwise.plans.pipelines import PipelineResult
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import prices_of
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.plans.stage_planner import StageSearchResult
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache
from shardwise.report.alternatives import PlanRanking, WhatIf, top, what_if
from shardwise.report.cost_graph_file import write_cost_graph
from shardwise.report.explain import Explanation, explain
from shardwise.report.outline import alternatives
from shardwise.report.page import StageFigures, OperatorLookup, write_page
from shardwise.report.pipeline_ranking import PipelineRanking
from shardwise.report.stage_passes import StagePass, stage_passes, stage_peak, with_saved
from shardwise.report.stage_traces import tracks_of
from shardwise.runtime.pipeline_profile import PipelineProfile
from shardwise.runtime.step_profile import StepProfile
from shardwise.search.auto import MeshSearch
from shardwise.search.micro_batch import MicroBatchOutcome
from shardwise.untrusted_text import shorten_repr

MOST_PLANS = 1000  # that are ranked


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches that were tried, in this order, and the one that was taken."""

    tried: tuple[MicroBatchOutcome, ...]
    taken: int | None

    def __str__(self) -> str:
        if not self.tried:
            return f"a pass is over {self.taken} samples, as was said; nothing else was tried"
        lines = [f"a pass is over {self.taken} samples; tried, the largest first, until steps got longer:"]
        for size in self.tried:
            fits = f"step {format_seconds(size.step_seconds)}, peak {format_bytes(int(size.num_bytes))}"
            lines.append(f"  {size.micro_batch} ({size.passes} passes): {size.refused or fits}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ExplainedPlan(Plan):
    """A plan of which more is known than its file says: from the search that chose it. Copies for other processes are
    the plan alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, tuple(entries(self).values())

    def known(self) -> tuple[StageFigures, ...]:
        """What the search says of the plan, stage by stage, for a page."""
        raise NotImplementedError

    def report(
        self, path: str | Path, *, other: Plan | None = None, profile: StepProfile | PipelineProfile | None = None
    ) -> None:
        """Write the plan as a page that one looks at: where time and memory go in a simulated pass, how stages run,
        who holds what, and of every operator the types, the messages and the alternatives; a single file without
        anything from a network. ``other``: a plan to set beside this one; ``profile``: a measured step
        (``par.profile``) to lay over the prediction."""
        beside = other.known() if isinstance(other, ExplainedPlan) else ()
        write_page(path, self, self.known(), profile=profile, other=other, other_known=beside)


@dataclass(frozen=True, eq=False)
class Planned(ExplainedPlan):
    """A plan that can be explained. ``finished_search``: the search that chose it, which is no part of the plan: not of
    its file, not of comparisons, and a copy for another process is the plan alone; ``peak``: of its fullest device."""

    finished_search: MeshSearch = field(kw_only=True, repr=False)
    peak: Peak = field(kw_only=True, repr=False)
    tried: tuple[MicroBatchOutcome, ...] = field(
        default=(), kw_only=True, repr=False
    )  # micro-batches, if one was chosen

    @staticmethod
    def of(plan: Plan, finished_search: MeshSearch, peak: Peak) -> Planned:
        return Planned(**entries(plan), finished_search=replace(finished_search, called=plan.mesh), peak=peak)

    def explain(self, name: str) -> Explanation | MicroBatches:
        """Why an operator (or the storage of a parameter) is as it is: its alternatives with their prices, term by
        term, and the neighbour that made the choice; ``"micro_batch"``: which were tried, where it was chosen. Raises
        PlanError for an unknown name."""
        if name == "micro_batch":
            return MicroBatches(self.tried, self.micro_batch)
        return explain(self.finished_search, name)

    def what_if(self, name: str, choice: str) -> WhatIf:
        """What the best plan would be if an operator had the strategy (or a parameter the layout) ``choice``. Raises
        PlanError for a name or a choice that there is not."""
        return what_if(self.finished_search, name, choice)

    def top(self, k: int = 5) -> PlanRanking:
        """The best ``k`` plans of the search (up to ``MOST_PLANS``), by the same prices."""
        return top(self.finished_search, _checked_count(k))

    def cost_graph(self, path: str | Path) -> None:
        """Write what the search minimised, with the chosen entries marked: JSON, or DOT if the path ends in
        ``.dot``."""
        write_cost_graph(self.finished_search, path)

    def trace(self, path: str | Path) -> None:
        """Write a simulated pass as a trace, which https://ui.perfetto.dev and chrome://tracing open: operators, and
        the messages of every group of devices, with lines of the model, and the memory that is held meanwhile."""
        program, step, over = self._simulated()
        lines = {op.name: op.source for op in program.spmd.graph.ops}
        write_trace(path, [Track.of(f"a rank of {self.mesh}, simulated", step.events, self.mesh, lines, over)])

    def known(self) -> tuple[StageFigures, ...]:
        """What the search says of the plan, for a page."""
        program, step, over = self._simulated()

        def why(name: str) -> Mapping[str, Any]:
            return alternatives_of(self.finished_search, name)

        return (StageFigures(step, over, *_told_by(self.finished_search.cost.domains.graph, program), why),)

    def _simulated(self) -> tuple[RankProgram, SimulatedStep, tuple[Peak, ...]]:
        """The program of the fullest rank, a pass of it, and the most that is held at every operator."""
        program = busiest_program(program_of(self, self.finished_search.cost.domains.graph), VjpCache())
        prices = prices_of(self)
        return program, simulate_program(program, prices), memory_of_program(program, prices, over_time=True).over


@dataclass(frozen=True, slots=True)
class StageExplanation:
    """Why something is as it is in its ``stage``. ``alike``: what it is called in the first of equal stages, whose
    search this is; empty: by its own name."""

    stage: int
    alike: str
    explanation: Explanation

    def __str__(self) -> str:
        alike = f", planned as an equal one: there it is {self.alike}" if self.alike else ""
        return f"in stage {self.stage}{alike}\n{self.explanation}"


@dataclass(frozen=True, slots=True)
class StageWhatIf:
    """The best plan of a ``stage`` in which one of its choices is another; predicted is a pass of that stage."""

    stage: int
    found: WhatIf


@dataclass(frozen=True, eq=False)
class StagedPlan(ExplainedPlan):
    """The plan of a pipeline. ``searched``: the search for each stage; ``found``: how it was found. Both are no part of
    the plan."""

    searched: tuple[StageSearchResult | None, ...] = field(default=(), kw_only=True, repr=False)
    found: PipelineResult = field(kw_only=True, repr=False)

    @staticmethod
    def of(found: PipelineResult) -> StagedPlan:
        """Equal stages have one search, and equal meshes have equal names."""
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
        return StagedPlan(**entries(plan), searched=searches, found=found)

    def explain(self, name: str) -> StageExplanation:
        """Why an operator (or the storage of a parameter) is as it is in its stage: as ``Planned.explain``. What
        crosses between stages, and parameters that several have, were brought together afterwards. Raises PlanError for
        an unknown name, and where no stage was chosen by price."""
        number, searched = self._home(name)
        called = searched.names[name]
        return StageExplanation(number, "" if called == name else called, explain(searched.search, called))

    def what_if(self, name: str, choice: str) -> StageWhatIf:
        """What the best plan of its stage would be if an operator had the strategy (or a parameter the layout)
        ``choice``: as ``Planned.what_if``, of a pass of that stage. The other stages, and what crosses between them,
        stay as they are. Raises as ``explain`` does, and for a choice that there is not."""
        number, searched = self._home(name)
        answer = what_if(searched.search, searched.names[name], choice)
        names = {called: name for name, called in searched.names.items()}

        def in_stage(shown: str) -> str:
            kind, space, called = shown.rpartition(" ")  # "shared add", "received add", or a name alone
            return f"{kind}{space}{names.get(called, called)}"

        changed = tuple(change._replace(name=in_stage(change.name)) for change in answer.changed)
        return StageWhatIf(number, replace(answer, changed=changed))

    def top(self, k: int = 5, *, joint: AutoStagesReport | None = None) -> PipelineRanking:
        """The best ``k`` pipelines (up to ``MOST_PLANS``) of those that are near: every cut moved by a block (or an
        operator, where there are none), and micro-batches of the other sizes that were looked at; each is planned and
        simulated as the chosen one was. ``joint``: the settings of a joint search, which are compared as well. Raises
        PlanError where no stage was chosen by price."""
        return PipelineRanking(*rank_pipelines(self.found, _checked_count(k), joint))

    def _home(self, name: str) -> tuple[int, StageSearchResult]:
        """The stage that has an operator or a parameter, and its search."""
        for number, searched in enumerate(self.searched):
            if searched is not None and name in searched.names:
                return number, searched
        known = [name for searched in self.searched if searched is not None for name in searched.names]
        if not known:
            raise PlanError(problem("no stage was chosen by price", fix='plan with search="dynamic_programming"'))
        near = ", ".join(get_close_matches(name, known, 3) or known[:6])
        raise PlanError(problem(f"no stage has {name!r}", fix=f"one of {near}, ..."))

    def passes(self) -> tuple[StagePass, ...]:
        """Every stage with a simulated pass over a micro-batch."""
        return stage_passes(self, self.found.graph, self.found.prelude)

    def trace(self, path: str | Path) -> None:
        """Write a simulated step as a trace, which https://ui.perfetto.dev and chrome://tracing open: of every place
        its actions, what its stages send, the operators and messages of the first micro-batch, with lines of the model,
        and the memory that a device holds meanwhile. Raises PlanError for stages that were not chosen by price."""
        write_trace(path, tracks_of(self, self.passes()))

    def known(self) -> tuple[StageFigures, ...]:
        """Of every stage a simulated pass; of its operators the types, what they read and the alternatives there."""
        if self.pipeline is None:
            return ()
        asked: dict[tuple[int, str], Mapping[str, Any]] = {}  # equal stages have one search

        def why(name: str) -> Mapping[str, Any] | None:
            home = self._searched_as(name)
            if home is None:
                return None
            searched, called = home
            key = id(searched.search), called
            if key not in asked:
                asked[key] = alternatives_of(searched.search, called)
            said = f"as {called} of an equal stage: " if called != name else ""
            return {**asked[key], "said": said + asked[key]["said"]}

        passes = []
        for number, of_stage in enumerate(self.passes()):
            over = memory_of_program(of_stage.program, of_stage.prices, over_time=True).over
            waiting = stage_peak(self, number, of_stage.step).num_bytes - of_stage.step.peak_bytes
            with_waiting = tuple(with_saved(peak, waiting) for peak in over)
            step = replace(of_stage.step, peak=with_saved(of_stage.step.peak, waiting))
            passes.append(StageFigures(step, with_waiting, *_told_by(of_stage.graph, of_stage.program), why))
        return tuple(passes)

    def _searched_as(self, name: str) -> tuple[StageSearchResult, str] | None:
        """The search for the stage of an operator, and what the operator is called there."""
        for searched in self.searched:
            if searched is not None and searched.names.get(name) in searched.search.cost.domains.graph.op_by_name:
                return searched, searched.names[name]
        return None


def _told_by(graph: Graph, program: RankProgram) -> tuple[OperatorLookup, OperatorLookup]:
    """The types of the results of an operator, and the operators whose results it reads."""
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
        raise PlanError(problem(f"the best {shorten_repr(k)} plans are asked for", fix=fix))
    return k


def alternatives_of(search: MeshSearch, name: str) -> Mapping[str, Any]:
    """Rows for a page; or, of an operator that has no choice of its own, a sentence that says so."""
    try:
        return alternatives(explain(search, name))
    except PlanError as error:
        return {"said": str(error).partition("\n")[0], "rows": [], "more": 0}


def entries(plan: Plan) -> dict[str, Any]:
    """What a plan is made of, by name."""
    return {entry.name: getattr(plan, entry.name) for entry in fields(Plan)}
