"""The proof of a plan, as most tests of plans need it."""

from __future__ import annotations

from typing import Any

from torch import nn

import shardwise as sw
from shardwise.plans.result import PlanningResult
from shardwise.proof.verify import Report


def prove(module: nn.Module, inputs: Any, plan: sw.Plan | PlanningResult, **settings: Any) -> Report:
    """Verify a plan, which must equal one device, and return the report."""
    report = sw.verify(module, inputs, plan, **settings)
    assert report.ok, f"{report}\n{plan}"
    return report
