"""A seeded share of torch's databases; ``make sweep`` runs all of them."""

from __future__ import annotations

import random

import pytest

from oracle.databases import database
from oracle.optimizers import optimizer_outcomes
from oracle.outcomes import FAULTS, Outcome, outcomes
from oracle.page import BEGIN, END, tables, with_tables, without_rule

NUM_OPERATORS, NUM_MODULES = 16, 5
FOUND = (  # once wrong, or a traceback
    "bernoulli",
    "chalf",
    "corrcoef",
    "hash_tensor",
    "histogramdd",
    "linalg_eig",
    "nn_functional_conv_transpose3d",
    "normal",
)


def share(kind: str, count: int) -> list[str]:
    return sorted(random.Random(f"{kind} 1").sample(sorted(database(kind)), count))


def check(kind: str, name: str) -> None:
    found = list(outcomes(name, database(kind)[name], 2 if name in FOUND else 1, 3 if kind == "modules" else 1))
    faults = [o for o in found if o.ended in FAULTS]
    assert not faults, faults
    assert kind == "operators" or any(o.split for o in found), "no plan splits an operator of the module"


@pytest.mark.parametrize("name", [*share("operators", NUM_OPERATORS), *FOUND])
@pytest.mark.sampled(8)
def test_operators_of_torchs_database_are_equal_or_refused(name: str) -> None:
    check("operators", name)


@pytest.mark.parametrize("name", share("modules", NUM_MODULES))
def test_modules_of_torchs_database_are_equal_or_refused(name: str) -> None:
    check("modules", name)


@pytest.mark.parametrize("name", database("optimizers"))
def test_optimizers_that_may_update_shards_give_what_one_device_has(name: str) -> None:
    faults = [o for o in optimizer_outcomes(name, 3) if o.ended in FAULTS]
    assert not faults, faults


def test_tables_tell_what_became_of_samples() -> None:
    results = {
        "operators": [
            Outcome("abs", "equal", captured=True, planned=True, split=True),
            Outcome("abs", "eager", "not a sample"),
            Outcome("qr", "equal", captured=True, planned=True, without_rule=["aten.linalg_qr.default"]),
            Outcome("nonzero", "refused", "CaptureError: a result of 3 elements"),
            Outcome("svd", "traceback", "KeyError at graph/ir.py:3: 'x'"),
        ]
    }
    text = tables(results)
    assert "| operators | 4 | 4 | 2 | 2 | 1 | 2 | 0 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "| 1 | CaptureError: a result of N elements | `nonzero` |" in text
    assert "| `svd` | traceback | KeyError at graph/ir.py:3: 'x' |" in text
    assert without_rule(results) == {"aten.linalg_qr.default": ["qr"]}
    assert with_tables(f"a\n{BEGIN}old{END}b", text) == f"a\n{BEGIN}{text}{END}b"
