"""Ranks with emulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulated_gpu.build import library, missing_tool
from launch.gloo_ranks import run_on_ranks


@pytest.fixture
def run_gpu_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """As ``run_ranks``, with an emulated GPU on every rank and a group of nccl."""
    if reason := missing_tool():
        pytest.skip(reason)
    library()

    def run(function: Callable[..., Any], num_ranks: int, *args: Any, time_limit_seconds: float = 600.0) -> list[Any]:
        return run_on_ranks(function, num_ranks, args, tmp_path, time_limit_seconds, on_gpus=True)

    return run
