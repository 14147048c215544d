"""The cases of the specification, which of them are tested, and in what words of this library.

``cases.json``: figures from the public tests and documents of the reference system, each with its source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("cases.json")
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in json.loads(FILE.read_text(encoding="utf-8"))}

# What the tests of the dialect check: kind, or id, -> where in tests/.
ELSEWHERE = {
    "search_result": "mindspore/test_cases.py",
    "allreduce_fusion": "mindspore/test_cases.py",
    "optimizer_parallel": "mindspore/test_parallel_optimizer.py",
    "pipeline": "mindspore/test_pipelines.py",
    "prop-none": "mindspore/test_cases.py",
    "comm_group_name": "mindspore/test_communication.py",
    "execute_ir": "mindspore/test_ir.py",
    "loss_curve": "mindspore/test_documents.py",
    "defaults": "mindspore/test_context.py",
    "ctx-err-2": "mindspore/test_context.py",
    "ctx-err-3": "mindspore/test_context.py",
    "ctx-err-6": "mindspore/test_context.py",
    "ds-strategy-1": "mindspore/test_context.py",
    "ds-strategy-3": "mindspore/test_context.py",
}


# Figures of the reference's model of prices, which counts bytes and elements with weights: kind -> what is here
# instead. Prices here are seconds, and compared with what was measured.
OTHERWISE = {
    "op_cost": "costs/test_measured_collectives.py, search/test_exact_search.py",
    "cost_model_defaults": "clusters/*.toml, each figure with its source",
    "redistribution_cost": "costs/test_collectives.py",
}


def is_not_here(case: dict[str, Any]) -> bool:
    return any(case[key] in table for key in ("id", "kind") for table in (ELSEWHERE, OTHERWISE))


def of_kind(*kinds: str) -> Any:
    """Parametrises over the cases of some kinds that are tested here."""
    chosen = [case for case in CASES.values() if case["kind"] in kinds and not is_not_here(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


TESTED = frozenset(
    {
        *("redistribution_ops", "redistribution_property", "layout_unify", "reshape_redistribution", "shape_util"),
        *("comm_groups", "repeat_group_by_tensor_map", "op_layout", "forward_comm", "mirror", "virtual_div"),
        *("strategy_enumeration", "strategy_completion", "propagation", "propagation_conflict", "accept", "error"),
        "named_layout",
    }
)
