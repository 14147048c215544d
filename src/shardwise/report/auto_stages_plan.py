"""A plan together with the settings that it was chosen among: what ``sw.plan(..., stages="auto")`` returns."""

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
    """A plan of a joint search. ``joint``: the settings, which are no part of the plan: not of its file, not of
    comparisons, and a copy for another process is the plan alone. ``found``: the plan of the setting that was taken."""

    joint: AutoStagesReport = field(kw_only=True, repr=False)
    found: Plan = field(kw_only=True, repr=False)

    @staticmethod
    def of(found: Plan, joint: AutoStagesReport) -> AutoStagesPlan:
        return AutoStagesPlan(**entries(found), joint=joint, found=found)

    def explain(self, name: str) -> AutoStagesReport | Explanation | MicroBatches | StageExplanation:
        """``"stages"``: what was considered and why this setting was taken; other names: as the plan of that setting
        explains them. Raises PlanError for an unknown name."""
        if name == "stages":
            return self.joint
        assert isinstance(self.found, (Planned, StagedPlan)), "it was chosen by price"
        return self.found.explain(name)

    def what_if(self, name: str, choice: str) -> WhatIf | StageWhatIf:
        """As the plan of the setting that was taken says it."""
        answer: WhatIf | StageWhatIf = self.found.what_if(name, choice)
        return answer

    def top(self, k: int = 5) -> PlanRanking | PipelineRanking:
        """The best ``k`` plans of the setting that was taken; under stages the best pipelines, among them those of the
        other settings (``StagedPlan.top``)."""
        if isinstance(self.found, StagedPlan):
            return self.found.top(k, joint=self.joint)
        ranking: PlanRanking = self.found.top(k)
        return ranking

    def cost_graph(self, path: str | Path) -> None:
        """As the plan of the setting that was taken writes it."""
        self.found.cost_graph(path)

    def trace(self, path: str | Path) -> None:
        """As the plan of the setting that was taken writes it."""
        self.found.trace(path)

    def known(self) -> tuple[StageFigures, ...]:
        """What is known of the plan of the setting that was taken."""
        assert isinstance(self.found, ExplainedPlan), "it was chosen by price"
        return self.found.known()


__all__ = ["AutoStagesPlan"]
