"""A plan together with the settings that it was chosen among: what ``sw.plan(..., stages="auto")`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.plans.joint import Joint
from shardwise.plans.plan import Plan
from shardwise.report.alternatives import Ranking, WhatIf
from shardwise.report.explain import Explanation
from shardwise.report.planned import InStage, MicroBatches, Planned, Staged, WhatIfInStage, entries
from shardwise.runtime.step_profile import StepProfile


@dataclass(frozen=True, eq=False)
class Joined(Plan):
    """A plan of a joint search. ``joint``: the settings, which are no part of the plan: not of its file, not of
    comparisons, and a copy for another process is the plan alone. ``found``: the plan of the setting that was taken."""

    joint: Joint = field(kw_only=True, repr=False)
    found: Plan = field(kw_only=True, repr=False)

    @staticmethod
    def of(found: Plan, joint: Joint) -> Joined:
        return Joined(**entries(found), joint=joint, found=found)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, tuple(entries(self).values())

    def explain(self, name: str) -> Joint | Explanation | MicroBatches | InStage:
        """``"stages"``: what was considered and why this setting was taken; other names: as the plan of that setting
        explains them. Raises PlanError for an unknown name."""
        if name == "stages":
            return self.joint
        assert isinstance(self.found, (Planned, Staged)), "it was chosen by price"
        return self.found.explain(name)

    def what_if(self, name: str, choice: str) -> WhatIf | WhatIfInStage:
        """As the plan of the setting that was taken says it."""
        found: WhatIf | WhatIfInStage = self.found.what_if(name, choice)
        return found

    def top(self, k: int = 5) -> Ranking:
        """The best ``k`` plans of the setting that was taken. Raises PlanError under stages, which have a search
        each."""
        found: Ranking = self.found.top(k)
        return found

    def report(self, path: str | Path, *, other: Plan | None = None, profile: StepProfile | None = None) -> None:
        """Write the plan as a page that one looks at, as a plan of that setting does."""
        self.found.report(path, other=other, profile=profile)


__all__ = ["Joined"]
