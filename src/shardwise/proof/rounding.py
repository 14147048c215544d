"""Rounding told from error, where the plain comparison finds a difference.

A plan changes the order of sums, so every result differs in its last bits. What becomes of that depends on the model:

* Within a step it grows by the condition of what is computed. A gradient that is zero by mathematics (of a bias ahead
  of a normalisation) is nothing but the rounding of its summands.
* Between steps an optimizer that divides by a gradient's size makes a step of full length of such a gradient. Two runs
  part for good there, without an error in either.

So rounding is not guessed by a larger tolerance; it is measured. *Disturbed runs* are the module on one device, whose
inputs, parameters and buffers differ from the original's by some units in the last place. No program in float64 can be
expected to agree with the original better than they do: on the way they meet every operator with a rounding error of
its own. How far they are from the original is, tensor by tensor, what rounding does. A difference is explained if

1. step by step, ranks and disturbed runs having adopted the state of one device before each, it is at most ``MARGIN``
   times what rounding does to that tensor in this one step. Nothing has grown over steps here. What rounding moves by
   more than ``USELESS`` of its size can not be judged: if it is a parameter, it is judged before the optimizer, by its
   gradient in the same step, which must be explained (an optimizer works element by element, so a plan decides nothing
   behind the gradient); if it is anything else, it is not explained; and
2. it is at most ``MARGIN`` times what rounding does in as many steps as were compared.

The gradient of a part of the summands is no rounding: without its all-reduce a gradient that is zero by mathematics is
as large as its summands, which is far beyond (1). A fault is called rounding only if it changes a tensor by no more
than disturbing the last bits does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils import _pytree as pytree

from shardwise.graph.capture import Capture
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, compare
from shardwise.proof.runs import OneDevice, Ranks, RunStart, as_leaf

RUNS = 5
DISTURBANCE = 2.0**-50  # of every number, up or down: what the sum of some hundred terms in another order may err
MARGIN = 32.0  # the rounding of a plan is one more run, and seldom the like of the worst of five: it sums more terms
USELESS = 1e-3


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding does to tensors that differ by more than the tolerance.

    Differences are with how far disturbed runs are from the original (None: not asked, where the difference is beyond
    ``USELESS``). ``unexplained``: of the first wrong step, worst first; ``by_gradient``: parameters that were compared
    before the optimizer only.
    """

    explained: tuple[tuple[TensorError, float], ...]
    unexplained: tuple[tuple[TensorError, float | None], ...]
    by_gradient: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """As a report says it."""
        if self.unexplained:
            worst, moved = self.unexplained[0]
            line = f"not rounding: {worst.kind} {worst.name} differs by {worst.error:.2g} on rank {worst.rank}"
            if moved is not None:
                why = "too far to tell: verify at other values" if MARGIN * moved > USELESS else "not so far"
                line += f"; last bits move one device's by {moved:.2g}, {why}"
            return [line]
        worst, moved = self.explained[0]
        lines = [
            f"rounding: {len(self.explained)} tensors differ no further than one device does from itself when the last "
            f"bits of what it starts from are changed ({worst.kind} {worst.name}: {moved:.2g}); so does each step alone"
        ]
        if self.by_gradient:
            lines.append(f"compared by their gradients, before the optimizer: {', '.join(self.by_gradient)}")
        return lines


def explain(start: RunStart, ranks: Ranks, wrong: Sequence[TensorError], steps: int, tolerance: float) -> Rounding:
    """Which of the differences are rounding. ``wrong``: beyond the tolerance after ``steps`` steps, worst first.
    ``ranks`` go through the steps again."""
    beyond, by_gradient = _step_by_step(start, ranks, steps, tolerance)
    if beyond:
        return Rounding((), beyond)
    moved = _moved(start, steps)
    both = [(d, moved.get((d.kind, d.name), 0.0)) for d in wrong]
    explained = tuple((d, by) for d, by in both if d.error <= MARGIN * by)
    return Rounding(explained, tuple((d, by) for d, by in both if not d.error <= MARGIN * by), by_gradient)


def _moved(start: RunStart, steps: int) -> dict[Key, float]:
    """How far disturbed runs are from the original after some steps."""
    original, disturbed = OneDevice(start), disturbed_runs(start)
    worst: dict[Key, TensorError] = {}
    earlier: list[tuple[Values, list[Values]]] = []
    for number, run in enumerate(disturbed):
        disturb(run, number)
    for step in range(steps):
        expected = original.step(step)
        actual = [run.step(step) for run in disturbed]
        for want, have in (*earlier, (expected, actual)):
            compare(want, have, _itself, worst)
        earlier.append((of_sources(expected, start.captured), [of_sources(v, start.captured) for v in actual]))
    return {key: difference.error for key, difference in worst.items()}


Unexplained = tuple[tuple[TensorError, float | None], ...]


def _step_by_step(start: RunStart, ranks: Ranks, steps: int, tolerance: float) -> tuple[Unexplained, tuple[str, ...]]:
    """The differences of the first step that rounding does not explain, every step beginning in the same state, worst
    first; and parameters that were judged by their gradients."""
    original, before, disturbed = OneDevice(start), OneDevice(start), disturbed_runs(start)
    by_gradient: dict[str, None] = {}
    for step in range(steps):
        before.adopt(original)
        ranks.adopt(original)
        expected = original.step(step)
        differences: dict[Key, TensorError] = {}
        ranks.compare(expected, ranks.step(step), differences)
        wrong = sorted((d for d in differences.values() if not d.error <= tolerance), key=lambda d: -d.error)
        judged = {key: ("gradient", _parameter(key, start.captured)) in expected for key in differences}
        if hopeless := [d for d in wrong if not (d.error <= USELESS or judged[d.kind, d.name])]:
            return tuple((d, None) for d in hopeless), ()
        moved = moved_in_step(before, disturbed, expected, step) if wrong else {}
        beyond = []
        for difference in wrong:
            key = difference.kind, difference.name
            by = moved.get(key, 0.0)
            if judged[key] and not MARGIN * by <= USELESS:
                by_gradient[_parameter(key, start.captured)] = None
            elif not difference.error <= min(MARGIN * by, USELESS):
                beyond.append((difference, by))
        if beyond:
            return tuple(beyond), ()
    return (), tuple(by_gradient)


def moved_in_step(
    before: OneDevice, disturbed: Sequence[OneDevice], expected: Values, step: int, by: float = DISTURBANCE
) -> dict[Key, float]:
    """How far disturbed runs are from the original after one step from the state ``before``."""
    for number, run in enumerate(disturbed):
        run.adopt(before)
        disturb(run, number, by)
    worst: dict[Key, TensorError] = {}
    compare(expected, [run.step(step) for run in disturbed], _itself, worst)
    return {key: difference.error for key, difference in worst.items()}


def _parameter(key: Key, captured: Capture) -> str:
    """The parameter that a tensor is, if it is one: it may have been returned."""
    kind, name = key
    if kind == "output":
        memory = captured.memories[int(name[1:-1])]
        source = None if memory is None else captured.graph.source_of.get(memory.name)
        return source.names[0] if source is not None and source.kind == "parameter" else ""
    return name if kind == "parameter" else ""


def disturbed_runs(
    start: RunStart, by: float = DISTURBANCE, alone: Callable[[RunStart], OneDevice] = OneDevice
) -> list[OneDevice]:
    """Runs whose inputs are disturbed, every number by the share ``by``. ``alone``: makes a run."""
    runs = []
    for number in range(RUNS):
        draw = torch.Generator().manual_seed(number)
        off = partial(_leaf_off, draw=draw, by=by)
        args, kwargs = pytree.tree_map_only(torch.Tensor, off, (start.args, start.kwargs))
        runs.append(alone(replace(start, args=args, kwargs=kwargs)))
    return runs


def disturb(run: OneDevice, number: int, by: float = DISTURBANCE) -> None:
    """Change the last bits of parameters and buffers: the share ``by`` of every number."""
    draw = torch.Generator().manual_seed(RUNS + number)
    with torch.no_grad():
        for tensor in run.tensors.values():
            tensor.copy_(_off(tensor, draw=draw, by=by))


def _off(tensor: torch.Tensor, *, draw: torch.Generator, by: float = DISTURBANCE) -> torch.Tensor:
    """The tensor with every number a little larger or smaller."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    signs = torch.randint(2, tensor.shape, generator=draw, dtype=torch.int8).double() * 2 - 1
    return torch.where(tensor.isfinite(), (tensor * (1 + signs * by)).to(tensor.dtype), tensor)


def _leaf_off(tensor: torch.Tensor, *, draw: torch.Generator, by: float) -> torch.Tensor:
    """The same of an input, which requires a gradient if the input does."""
    return as_leaf(_off(tensor.detach(), draw=draw, by=by), tensor)


def _itself(_: Key, whole: torch.Tensor, __: int) -> torch.Tensor:
    return whole


def of_sources(values: Values, captured: Capture) -> Values:
    """The outputs that have the memory of a parameter, buffer or input on one device."""
    sources = {source.value for source in captured.graph.sources}
    names = {f"[{i}]" for i, memory in enumerate(captured.memories) if memory is not None and memory.name in sources}
    return {key: value for key, value in values.items() if key[0] == "output" and key[1] in names}
