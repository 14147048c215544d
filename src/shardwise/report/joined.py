"""A plan together with the settings that it was chosen among: what ``sw.plan(..., stages="auto")`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardwise.plans.joint import Joint
from shardwise.plans.plan import Plan
from shardwise.report.alternatives import Ranking, WhatIf
from shardwise.report.explain import Explanation
from shardwise.report.page import Pass
from shardwise.report.pipelines import PipelineRanking
from shardwise.report.planned import InStage, Known, MicroBatches, Planned, Staged, WhatIfInStage, entries


@dataclass(frozen=True, eq=False)
class Joined(Known):
    """A plan of a joint search. ``joint``: the settings, which are no part of the plan: not of its file, not of
    comparisons, and a copy for another process is the plan alone. ``found``: the plan of the setting that was taken."""

    joint: Joint = field(kw_only=True, repr=False)
    found: Plan = field(kw_only=True, repr=False)

    @staticmethod
    def of(found: Plan, joint: Joint) -> Joined:
        return Joined(**entries(found), joint=joint, found=found)

    def explain(self, name: str) -> Joint | Explanation | MicroBatches | InStage:
        """``"stages"``: what was considered and why this setting was taken; other names: as the plan of that setting
        explains them. Raises PlanError for an unknown name."""
        if name == "stages":
            return self.joint
        assert isinstance(self.found, (Planned, Staged)), "it was chosen by price"
        return self.found.explain(name)

    def what_if(self, name: str, choice: str) -> WhatIf | WhatIfInStage:
        """As the plan of the setting that was taken says it."""
        answer: WhatIf | WhatIfInStage = self.found.what_if(name, choice)
        return answer

    def top(self, k: int = 5) -> Ranking | PipelineRanking:
        """The best ``k`` plans of the setting that was taken; under stages the best pipelines, among them those of the
        other settings (``Staged.top``)."""
        if isinstance(self.found, Staged):
            return self.found.top(k, joint=self.joint)
        ranking: Ranking = self.found.top(k)
        return ranking

    def cost_graph(self, path: str | Path) -> None:
        """As the plan of the setting that was taken writes it."""
        self.found.cost_graph(path)

    def trace(self, path: str | Path) -> None:
        """As the plan of the setting that was taken writes it."""
        self.found.trace(path)

    def known(self) -> tuple[Pass, ...]:
        """What is known of the plan of the setting that was taken."""
        assert isinstance(self.found, Known), "it was chosen by price"
        return self.found.known()


__all__ = ["Joined"]
