"""The cases of the specification, which of them are tested, and in what words of this library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec.cited import CITED

FILE = Path(__file__).parents[3] / "shared/spec/cases.json"
FOUND: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"] if FILE.exists() else []
CASES = {case["id"]: case for case in (*CITED, *FOUND)}

# What waits for a later issue: kind, or id, -> which, and what it is about.
LATER = {
    "op_cost": "issue 5: prices",
    "cost_model_defaults": "issue 5: prices",
    "redistribution_cost": "issue 5: prices",
    "search_result": "issue 5: the exact search",
    "comm_group_name": "issue 6: names of groups in the printed IR",
    "execute_ir": "issue 6: the printed IR",
    "loss_curve": "issue 6: the quick start through Model.train",
    "defaults": "issue 6: set_auto_parallel_context",
    "allreduce_fusion": "issue 6: fusion options",
    "optimizer_parallel": "after issue 6: optimizer parallelism",
    "pipeline": "after issue 6: pipelines",
    "ctx-err-2": "issue 6: set_auto_parallel_context",
    "ctx-err-3": "issue 6: set_auto_parallel_context",
    "ctx-err-6": "issue 6: set_algo_parameters",
    "ds-strategy-1": "issue 6: dataset_strategy",
    "ds-strategy-3": "issue 6: dataset_strategy",
    "prop-none": "issue 6: search_mode without a configured operator (here it is data parallelism)",
}


def is_later(case: dict[str, Any]) -> bool:
    return case["id"] in LATER or case["kind"] in LATER


def of_kind(*kinds: str) -> Any:
    """Parametrises over the cases of some kinds that are not for later."""
    chosen = [case for case in CASES.values() if case["kind"] in kinds and not is_later(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


TESTED = frozenset(
    {
        *("redistribution_ops", "redistribution_property", "layout_unify", "reshape_redistribution", "shape_util"),
        *("comm_groups", "repeat_group_by_tensor_map", "op_layout", "forward_comm", "mirror", "virtual_div"),
        *("strategy_enumeration", "strategy_completion", "propagation", "propagation_conflict", "accept", "error"),
        "named_layout",
    }
)
