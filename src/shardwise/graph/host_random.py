"""Detection of random numbers that a model draws from Python's ``random`` or numpy while it runs.

Capture runs the model's Python once, so such numbers (which time steps SpecAugment masks, which layers LayerDrop skips)
would be the same in every step. They are detected by the generators' states before and after; only then the model runs
once more, traced line by line, to name the line that draws. Generators that the model makes or holds itself
(``numpy.random.default_rng()``) are not detected.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwise.errors import CaptureError
from shardwise.graph.change_line import Watching, watch_changes

State = tuple[Any, bytes]


def host_random_state() -> State:
    """Return the states of the generators of ``random`` and ``numpy.random``, in a comparable form."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def reject_host_random(before: State, run: Callable[[Watching], object]) -> None:
    """Raise CaptureError naming the first line of the model that draws.

    ``before``: the state when the model was captured; ``run``: captures it again inside the given context manager. If
    that run does not change the state, the draws came from another thread, or the model sets a seed in every call
    (BigBird's blocks) and every step draws the same.
    """
    drew = host_random_state()
    if drew == before:
        return
    lines: list[str] = []
    run(lambda: watch_changes(lines, host_random_state))
    after = host_random_state()
    _restore(drew)
    if lines and after != drew:
        raise CaptureError(
            "the model draws random numbers in Python or numpy: every step would get the same",
            source=lines[0],
            fix="draw with torch (torch.rand, torch.bernoulli), pass the drawn values as inputs, or switch it off "
            "(Hugging Face: mask_time_prob=0, layerdrop=0)",
        )


def _restore(state: State) -> None:
    random.setstate(state[0])
    np.random.set_state(pickle.loads(state[1]))
