"""Planning wide graphs takes bounded memory: unrolled recurrences, dense blocks and skips on meshes of three axes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GIGABYTE = 1e9
LONGER = ("mamba2-16", "cells-16", "gru-16", "rwkv-16", "hyper-6")


@pytest.mark.parametrize("model", ["mamba-16", *(pytest.param(model, marks=pytest.mark.long) for model in LONGER)])
def test_planning_a_wide_model_takes_bounded_memory_and_has_a_small_gap(model):
    command = [sys.executable, "-m", "search.wide_plans", model, "a=2,b=2,c=2"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["bytes"] < 2 * GIGABYTE
    assert 0 < found["bound"] <= found["price"] * (1 + 1e-9)
    assert found["gap"] < 0.02
