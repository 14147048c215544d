"""The seed of the dialect, and the one generator from which initial values come.

It has a fixed seed until ``set_seed`` gives another one, so that all ranks make the same values without a word.
"""

from __future__ import annotations

import numpy as np
import torch

from shardwise.errors import problem

DEFAULT_SEED = 0


class _Random:
    """The state of this process."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.generator = torch.Generator().manual_seed(DEFAULT_SEED)


_random = _Random()


def set_seed(seed: int) -> None:
    """Start initial values anew, and numpy's and torch's random numbers too, as the reference does."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        what = f"the seed is {seed!r}, of type {type(seed).__name__}"
        raise TypeError(problem(what, fix="give an integer from 0 on"))
    if not 0 <= seed < 2**32:
        raise ValueError(problem(f"the seed is {seed}", fix="give an integer from 0 to 2**32 - 1"))
    _random.seed = seed
    _random.generator.manual_seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_seed() -> int | None:
    """The seed that was set; None if none was."""
    return _random.seed


def generator() -> torch.Generator:
    """Where initial values come from."""
    return _random.generator


def drawn(seed: int | None) -> torch.Generator | None:
    """A generator of its own for a function that is given a seed; None: torch's."""
    return None if seed is None else torch.Generator().manual_seed(int(seed))


def data_seed() -> int:
    """The seed of the order of data: the one that was set, else the fixed one."""
    return DEFAULT_SEED if _random.seed is None else _random.seed
