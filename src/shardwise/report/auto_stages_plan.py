"""The plan that ``sw.plan(..., stages="auto")`` returns: it also holds the settings that were compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.plan import Plan
from shardwise.report.alternatives import PlanRanking, WhatIf
from shardwise.report.explain import Explanation
from shardwise.report.page import StageFigures
from shardwise.report.pipeline_ranking import PipelineRanking
from shardwise.report.planned import (
    ExplainedPlan,
    MicroBatches,
    Planned,
    StagedPlan,
    StageExplanation,
    StageWhatIf,
    entries,
)


@dataclass(frozen=True, eq=False)
class AutoStagesPlan(ExplainedPlan):
    """The plan of a joint search over stages, schedule and micro-batch. ``joint``: the settings that were compared;
    ``found``: the plan of the setting that was taken. Neither is saved, compared or copied to other processes."""

    joint: AutoStagesReport = field(kw_only=True, repr=False)
    found: Plan = field(kw_only=True, repr=False)

    @staticmethod
    def of(found: Plan, joint: AutoStagesReport) -> AutoStagesPlan:
        return AutoStagesPlan(**entries(found), joint=joint, found=found)

    def explain(self, name: str) -> AutoStagesReport | Explanation | MicroBatches | StageExplanation:
        """Explain one choice of the plan.

        Args:
            name: ``"stages"`` for the settings that were considered and why this one was taken; or a name that
                ``Planned.explain`` or ``StagedPlan.explain`` takes.

        Raises:
            PlanError: The name is unknown.
        """
        if name == "stages":
            return self.joint
        assert isinstance(self.found, (Planned, StagedPlan)), "it was chosen by price"
        return self.found.explain(name)

    def what_if(self, name: str, choice: str) -> WhatIf | StageWhatIf:
        """Return the best plan with one choice changed, as ``Planned.what_if`` or ``StagedPlan.what_if`` does."""
        answer: WhatIf | StageWhatIf = self.found.what_if(name, choice)
        return answer

    def top(self, k: int = 5) -> PlanRanking | PipelineRanking:
        """Return the best ``k`` plans of the setting that was taken. With stages, return the best pipelines, those of
        the other settings included (``StagedPlan.top``)."""
        if isinstance(self.found, StagedPlan):
            return self.found.top(k, joint=self.joint)
        ranking: PlanRanking = self.found.top(k)
        return ranking

    def cost_graph(self, path: str | Path) -> None:
        """Write the cost graph of the setting that was taken (``Planned.cost_graph``)."""
        self.found.cost_graph(path)

    def trace(self, path: str | Path) -> None:
        """Write a trace of the setting that was taken (``Planned.trace``, ``StagedPlan.trace``)."""
        self.found.trace(path)

    def stage_figures(self) -> tuple[StageFigures, ...]:
        """Return the figures of every stage of the setting that was taken."""
        assert isinstance(self.found, ExplainedPlan), "it was chosen by price"
        return self.found.stage_figures()


__all__ = ["AutoStagesPlan"]
