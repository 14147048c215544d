"""The seed of the dialect, and the generator of initial values.

Until ``set_seed`` changes it the seed is fixed, so that all ranks make the same values by default.
"""

from __future__ import annotations

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import integer

DEFAULT_SEED = 0


_generator = torch.Generator().manual_seed(DEFAULT_SEED)
_seeds: dict[str, int] = {}  # "set": that of set_seed


def set_seed(seed: int) -> None:
    """Seed the generator of initial values, numpy and torch, as the reference does."""
    if not 0 <= integer("the seed", seed, "give an integer from 0 on") < 2**32:
        raise ValueError(problem(f"the seed is {seed}", fix="give an integer from 0 to 2**32 - 1"))
    _seeds["set"] = seed
    _generator.manual_seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


manual_seed = torch.manual_seed  # seeds torch's generator alone, that of dropout and of random functions


def get_seed() -> int | None:
    """Return the seed of ``set_seed``, or None."""
    return _seeds.get("set")


def generator() -> torch.Generator:
    """Return the generator of initial values."""
    return _generator


def drawn(seed: int | None) -> torch.Generator | None:
    """Return a new generator for a function that is given a seed. None: torch's default generator."""
    return None if seed is None else torch.Generator().manual_seed(int(seed))


def data_seed() -> int:
    """Return the seed of the order of data: that of ``set_seed``, else the fixed one."""
    return _seeds.get("set", DEFAULT_SEED)
