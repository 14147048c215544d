"""For which dtypes a plan was priced, where ranks run others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwise.layouts.text import parse_dtype

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan


def not_executed(plan: Plan) -> str:
    """A sentence where a plan was priced for other dtypes than ranks run, which are those of the model; else empty."""
    if plan.pricing is None:
        return ""
    stored = _floating(entry.dtype for stage in plan.stages for entry in stage.parameters)
    computed = stored | _floating(entry.dtype for stage in plan.stages for entry in stage.inputs)
    wanted = (
        ("compute", plan.pricing.compute, computed),
        ("parameter", plan.pricing.parameter, stored),
        ("reduce", plan.pricing.reduce, stored),
    )
    priced = [f"{name}={dtype}" for name, dtype, own in wanted if dtype and own - {dtype}]
    if not priced:
        return ""
    return (
        f"priced for Precision({', '.join(priced)}), which is not executed: ranks compute, store and reduce in the "
        f"dtypes of the model ({', '.join(sorted(computed))})"
    )


def _floating(dtypes: Iterable[str]) -> set[str]:
    return {dtype for dtype in dtypes if parse_dtype(dtype).is_floating_point}
