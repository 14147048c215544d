"""Settings of datasets. The seed is the dialect's. The others are stored without effect: one process reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.mindspore.common import seed as seeds

_kept: dict[str, Any] = {"num_parallel_workers": 1, "prefetch_size": 16, "enable_shared_mem": False,
                         "numa_enable": False, "auto_num_workers": False,
                         "monitor_sampling_interval": 1000}  # fmt: skip


def set_seed(seed: int) -> None:
    """Set the seed of shuffled orders."""
    seeds.set_seed(seed)


def get_seed() -> int:
    return seeds.data_seed()


def __getattr__(name: str) -> Callable[..., Any]:
    word, _, setting = name.partition("_")
    if word not in ("set", "get") or setting not in _kept:
        raise AttributeError(name)
    return (lambda value: _kept.__setitem__(setting, value)) if word == "set" else lambda: _kept[setting]
