"""Every test of the dialect begins with the default context and no note printed, and leaves the context and the process
group so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import shardwise.mindspore as ms
from shardwise.mindspore import checks


def _reset() -> None:
    ms.reset_context()
    ms.reset_auto_parallel_context()
    ms.reset_algo_parameters()


@pytest.fixture(autouse=True)
def _default_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checks, "_told", set())
    _reset()
    was_initialized = dist.is_initialized()
    yield
    _reset()
    if dist.is_initialized() and not was_initialized:  # a program that ran in this process made the group
        dist.destroy_process_group()
