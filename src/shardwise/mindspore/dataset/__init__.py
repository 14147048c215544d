"""Datasets for training programs (``import shardwise.mindspore.dataset as ds``)."""

from functools import partial
from typing import Any

from shardwise.mindspore.common import seed
from shardwise.mindspore.dataset import sources, text, transforms, vision
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.pipeline import zipped as zip
from shardwise.mindspore.dataset.sources import *
from shardwise.mindspore.named import absent, module_of

# Settings that are stored without effect: one process reads. The seed is the dialect's.
_kept: dict[str, Any] = {"num_parallel_workers": 1, "prefetch_size": 16, "enable_shared_mem": False,
                         "numa_enable": False, "auto_num_workers": False,
                         "monitor_sampling_interval": 1000}  # fmt: skip
config = module_of(f"{__name__}.config", {
    "set_seed": seed.set_seed, "get_seed": seed.data_seed,
    **{f"set_{name}": partial(_kept.__setitem__, name) for name in _kept},
    **{f"get_{name}": partial(_kept.__getitem__, name) for name in _kept},
})  # fmt: skip

__all__ = ["Dataset", "config", "text", "transforms", "vision", "zip", *sources.__all__]
__getattr__ = absent(__name__, lambda: __all__)
