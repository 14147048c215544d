"""Distinguishes rounding from errors where the plain comparison finds a difference.

A plan changes the order of sums, so every result differs in its last bits. The effect depends on the model:

* Within a step rounding grows with the condition number of the computation. A gradient that is mathematically zero (of
  a bias before a normalization) consists only of the rounding of its summands.
* Between steps an optimizer that divides by a gradient's size turns such a gradient into a step of full length. Two
  runs then diverge permanently, without an error in either.

So the effect of rounding is measured instead of raising the tolerance. *Disturbed runs* are the module on one device,
with inputs, parameters and buffers that differ from the original's by some units in the last place. No program in
float64 can be expected to agree with the original better than they do: every operator on the way adds its own rounding
error. The rounding of a tensor is the distance of disturbed runs from the original. A difference is explained if

1. in every single step, with ranks and disturbed runs starting from the state of one device, it is at most ``MARGIN``
   times the rounding of that tensor in this step. So nothing has grown over steps. A tensor whose rounding exceeds
   ``USELESS`` of its size cannot be judged. If it is a parameter, its gradient in the same step is judged instead and
   must be explained (optimizers work element by element, so a plan affects nothing after the gradient). Any other such
   tensor is not explained; and
2. it is at most ``MARGIN`` times the rounding after as many steps as were compared.

A missing all-reduce is not mistaken for rounding: the gradient over a part of the summands is as large as its summands
even if the full one is mathematically zero, which is far beyond (1). A fault passes as rounding only if it changes a
tensor by no more than disturbing the last bits does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from shardwise.graph.capture import Capture
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, compare
from shardwise.proof.ranks import VirtualRanks
from shardwise.proof.runs import OneDevice, RunStart, as_leaf

RUNS = 5
DISTURBANCE = 2.0**-50  # of every number, up or down: the rounding of a reordered sum of some hundred terms
MARGIN = 32.0  # a plan is a sixth run that sums more terms, so its rounding may exceed the worst of five
USELESS = 1e-3


@dataclass(frozen=True, slots=True)
class Rounding:
    """The analysis of tensors that differ by more than the tolerance.

    Every difference is paired with the distance of disturbed runs from the original (None: not measured, because the
    difference exceeds ``USELESS``). ``unexplained``: of the first wrong step, worst first; ``by_gradient``: parameters
    that were only compared by their gradients, before the optimizer.
    """

    explained: tuple[tuple[TensorError, float], ...]
    unexplained: tuple[tuple[TensorError, float | None], ...]
    by_gradient: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        if self.unexplained:
            worst, moved = self.unexplained[0]
            line = f"not rounding: {worst.kind} {worst.name} differs by {worst.error:.2g} on rank {worst.rank}"
            if moved is not None:
                why = "too much to decide: verify with other values" if MARGIN * moved > USELESS else "not as much"
                line += f"; a change of last bits moves it by {moved:.2g}, {why}"
            return [line]
        worst, moved = self.explained[0]
        lines = [
            f"rounding: {len(self.explained)} tensors differ no more than one device when the last bits of its "
            f"initial values change ({worst.kind} {worst.name}: {moved:.2g}), also step by step"
        ]
        if self.by_gradient:
            lines.append(f"compared by their gradients, before the optimizer: {', '.join(self.by_gradient)}")
        return lines


def explain(ranks: VirtualRanks, wrong: Sequence[TensorError], steps: int, tolerance: float) -> Rounding:
    """Decide which differences are rounding. ``wrong``: those beyond the tolerance after ``steps`` steps, worst first.
    ``ranks`` run the steps again."""
    beyond, by_gradient = _step_by_step(ranks, steps, tolerance)
    if beyond:
        return Rounding((), beyond)
    moved = _moved(ranks.start, steps)
    both = [(d, moved.get((d.kind, d.name), 0.0)) for d in wrong]
    explained = tuple((d, by) for d, by in both if d.error <= MARGIN * by)
    return Rounding(explained, tuple((d, by) for d, by in both if not d.error <= MARGIN * by), by_gradient)


def _moved(start: RunStart, steps: int) -> dict[Key, float]:
    """Return the largest distance per tensor of disturbed runs from the original after some steps."""
    original, disturbed = OneDevice(start), disturbed_runs(start)
    worst: dict[Key, TensorError] = {}
    earlier: list[tuple[Values, list[Values]]] = []
    for number, run in enumerate(disturbed):
        disturb(run, number)
    for step in range(steps):
        expected = original.step(step)
        actual = [run.step(step) for run in disturbed]
        for want, have in (*earlier, (expected, actual)):
            for number, values in enumerate(have):
                compare(want, values, number, worst)
        earlier.append((of_sources(expected, start.captured), [of_sources(v, start.captured) for v in actual]))
    return {key: difference.error for key, difference in worst.items()}


Unexplained = tuple[tuple[TensorError, float | None], ...]


def _step_by_step(ranks: VirtualRanks, steps: int, tolerance: float) -> tuple[Unexplained, tuple[str, ...]]:
    """Return the differences of the first step with any that rounding does not explain, worst first, and the parameters
    judged by their gradients. Both runs begin every step in the same state."""
    start = ranks.start
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
    """Return the largest distance per tensor of disturbed runs from the original after one step from ``before``."""
    worst: dict[Key, TensorError] = {}
    for number, run in enumerate(disturbed):
        run.adopt(before)
        disturb(run, number, by)
        compare(expected, run.step(step), number, worst)
    return {key: difference.error for key, difference in worst.items()}


def _parameter(key: Key, captured: Capture) -> str:
    """Return the name of the parameter that a tensor is, also as an output; empty if it is none."""
    kind, name = key
    if kind == "output":
        memory = captured.memories[int(name[1:-1])]
        source = None if memory is None else captured.graph.source_of.get(memory.name)
        return source.names[0] if source is not None and source.kind == "parameter" else ""
    return name if kind == "parameter" else ""


def disturbed_runs(start: RunStart, by: float = DISTURBANCE) -> list[OneDevice]:
    """Return runs with disturbed inputs: every number is changed by the fraction ``by``."""
    runs = []
    for number in range(RUNS):
        draw = torch.Generator().manual_seed(number)

        def off(tensor: torch.Tensor, draw: torch.Generator = draw) -> torch.Tensor:
            return as_leaf(_off(tensor.detach(), draw=draw, by=by), tensor)

        args, kwargs = pytree.tree_map_only(torch.Tensor, off, (start.args, start.kwargs))
        runs.append(OneDevice(replace(start, args=args, kwargs=kwargs)))
    return runs


def disturb(run: OneDevice, number: int, by: float = DISTURBANCE) -> None:
    """Change the last bits of parameters and buffers: every number by the fraction ``by``."""
    draw = torch.Generator().manual_seed(RUNS + number)
    with torch.no_grad():
        for tensor in run.tensors.values():
            tensor.copy_(_off(tensor, draw=draw, by=by))


def _off(tensor: torch.Tensor, *, draw: torch.Generator, by: float = DISTURBANCE) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    signs = torch.randint(2, tensor.shape, generator=draw, dtype=torch.int8).double() * 2 - 1
    return torch.where(tensor.isfinite(), (tensor * (1 + signs * by)).to(tensor.dtype), tensor)


def of_sources(values: Values, captured: Capture) -> Values:
    """Return the outputs that share memory with a parameter, buffer or input on one device."""
    sources = {source.value for source in captured.graph.sources}
    names = {f"[{i}]" for i, memory in enumerate(captured.memories) if memory is not None and memory.name in sources}
    return {key: value for key, value in values.items() if key[0] == "output" and key[1] in names}
