"""Random numbers that a model draws in Python's ``random`` or in numpy while it runs.

Capture runs the model's Python once, so that such numbers (which time steps SpecAugment masks, which layers LayerDrop
leaves out) would be the same in every step ever after. They are noticed by the generators' states before and after;
only then the model runs once more, line by line, to name the line that draws. Generators that the model makes or holds
itself (``numpy.random.default_rng()``) are not seen.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwise.errors import CaptureError, problem
from shardwise.graph.change_line import Watching, watch_changes

State = tuple[Any, bytes]


def host_random_state() -> State:
    """The states of the generators that ``random`` and ``numpy.random`` draw from; two of them can be compared."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def reject_host_random(before: State, run: Callable[[Watching], object]) -> None:
    """Raises CaptureError naming the first line of the model that draws.

    ``before``: the state when the model was captured; ``run``: captures it again, inside the context manager that it is
    given. What that leaves as it was came from another thread, or from a seed that the model sets in every call
    (BigBird's blocks): then every step draws the same.
    """
    drew = host_random_state()
    if drew == before:
        return
    lines: list[str] = []
    run(lambda: watch_changes(lines, host_random_state))
    again = host_random_state()
    _restore(drew)
    if lines and again != drew:
        raise CaptureError(
            problem(
                "the model draws random numbers in Python or numpy, which capture would repeat in every step",
                source=lines[0],
                fix="draw with torch (torch.rand, torch.bernoulli), pass what was drawn as an input, or switch it off "
                "(Hugging Face: mask_time_prob=0, layerdrop=0)",
            )
        )


def _restore(state: State) -> None:
    random.setstate(state[0])
    np.random.set_state(pickle.loads(state[1]))
