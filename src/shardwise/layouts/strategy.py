"""Strategies: which mesh axes split which factors of an operator, and the layouts that follow.

``"m@dp n@tp"`` splits factor m over axis dp and n over tp. An axis that is assigned to no factor makes every device
along it repeat the work (``I``, the default), or repeat it for consumers that do different work (``R@tp``), or passes a
partial sum through an operator that is linear in it (``P@tp``; ``P1@tp`` for the second group of operands it is linear
in). ``"v@tp{10,20,30,4}"`` gives the devices along tp so many indices of v each, instead of equally many.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from shardwise.errors import LayoutError, NotationError, caret
from shardwise.layouts.layout import Atom, Layout, Ranges, Windows
from shardwise.layouts.mesh import Mesh
from shardwise.rules.rule import Dims, OpRule, Window, base_name

REDUCTION_STATES = {"sum": "P", "max": "Pmax", "min": "Pmin", "any": "Pany"}


@dataclass(frozen=True)
class Strategy:
    """``factors``: factor -> the sub-axes that split it, major first. ``rest``: sub-axis -> ``R`` or ``P0``, ``P1``,
    ...

    Sub-axes in neither are invariant (the work is repeated). ``cuts``: factor -> how many of its indices each device
    along its axes has, for those that are not split evenly.
    """

    factors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rest: tuple[tuple[str, str], ...] = ()
    cuts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @staticmethod
    def of(choices: Mapping[str, str]) -> Strategy:
        """From sub-axis -> factor, ``I``, ``R`` or ``P<group>``; axes of one factor are major first in the mapping's
        order."""
        factors: dict[str, tuple[str, ...]] = {}
        rest: list[tuple[str, str]] = []
        for axis, choice in choices.items():
            if choice == "I":
                continue
            if is_rest(choice):
                rest.append((axis, choice))
            else:
                factors[choice] = (*factors.get(choice, ()), axis)
        return Strategy(tuple(sorted(factors.items())), tuple(sorted(rest)))

    @cached_property
    def choice_of(self) -> dict[str, str]:
        """Sub-axis -> factor, ``R`` or ``P<group>``; absent: ``I``."""
        return {axis: factor for factor, axes in self.factors for axis in axes} | dict(self.rest)

    @cached_property
    def axes_of(self) -> dict[str, tuple[str, ...]]:
        return dict(self.factors)

    def format(self, mesh: Mesh) -> str:
        ordered = sorted(self.factors, key=lambda item: min(map(mesh.order.__getitem__, item[1])))
        cuts = {factor: "{" + ",".join(map(str, lengths)) + "}" for factor, lengths in self.cuts}
        words = [f"{factor}@{mesh.format_axes(axes)}{cuts.get(factor, '')}" for factor, axes in ordered]
        for state in sorted({state for _, state in self.rest}):
            axes = tuple(sorted((a for a, choice in self.rest if choice == state), key=mesh.order.__getitem__))
            words.append(f"{'P' if state == 'P0' else state}@{mesh.format_axes(axes)}")
        return " ".join(words)


def is_rest(choice: str) -> bool:
    """Whether a choice is a state rather than a factor (factors are lower case)."""
    return re.fullmatch(r"I|R|P\d+", choice) is not None


def parse_choices(text: str, mesh: Mesh) -> dict[str, str]:
    """``"m@dp n@(tp,sp) I@x"`` -> sub-axis -> choice, in the order written. Raises NotationError or LayoutError."""
    choices: dict[str, str] = {}
    position = 0
    for match in re.finditer(r"\s*([A-Za-z_][\w.]*)@(\([^)]*\)|[\w.]+)(?:\{[^{}]*\})?\s*", text):
        if match.start() != position:
            break
        position = match.end()
        name = "P0" if match.group(1) == "P" else match.group(1)
        for axis in mesh.parse_axes(match.group(2)):
            if axis in choices:
                raise LayoutError(f"mesh axis {axis} is used more than once in {text!r}")
            choices[axis] = name
    if position != len(text.rstrip()) and position != len(text):
        raise NotationError(caret(text, position, "a strategy reads m@dp n@tp"))
    return choices


def parse_cuts(text: str) -> dict[str, tuple[int, ...]]:
    """``"v@tp{10,20,30,4} n@dp"`` -> ``{"v": (10, 20, 30, 4)}``. Raises NotationError or LayoutError."""
    cuts: dict[str, tuple[int, ...]] = {}
    for match in re.finditer(r"([\w.]+)@(?:\([^)]*\)|[\w.]+)\{([^{}]*)\}", text):
        name, inner = match.groups()
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", inner):
            raise NotationError(caret(text, match.start(2), "an uneven split reads v@tp{10,20,30,4}"))
        if is_rest("P0" if name == "P" else name):
            raise LayoutError(f"{name} is no factor: only a factor can be split unevenly ({text!r})")
        if name in cuts:
            raise LayoutError(f"factor {name} is split unevenly twice in {text!r}")
        cuts[name] = tuple(map(int, inner.split(",")))
    return cuts


def named_factors(text: str) -> set[str]:
    """The factors and states that a strategy's text names."""
    return {word.partition("@")[0] for word in re.sub(r"\{[^{}]*\}", "", text).split()}


def check_strategy(rule: OpRule, strategy: Strategy, mesh: Mesh) -> None:
    """Raise LayoutError unless the strategy is one of the operator's."""
    known = {factor.name: factor for factor in rule.factors}
    seen: set[str] = set()
    for name, axes in strategy.factors:
        if name not in known:
            raise LayoutError(f"the operator has no factor {name!r}: {rule}")
        if known[name].kind == "whole":
            raise LayoutError(f"factor {name} of {rule} can not be split")
        for axis in axes:
            mesh.expand(axis)
            if axis in seen:
                raise LayoutError(f"mesh axis {axis} splits two factors")
            seen.add(axis)
    for axis, state in strategy.rest:
        mesh.expand(axis)
        if axis in seen:
            raise LayoutError(f"mesh axis {axis} is used twice")
        if state != "R" and int(state[1:]) >= len(rule.linear):
            raise LayoutError(f"a partial sum does not pass through {rule}: not linear ({state}@{axis})")
    lowers = any(known[name].kind == "lowered" for name, axes in strategy.factors if axes)
    for name, lengths in strategy.cuts:
        if name not in known:
            raise LayoutError(f"the operator has no undivided factor {name!r}, so it can not be split by hand: {rule}")
        factor, axes = known[name], strategy.axes_of.get(name, ())
        if factor.kind not in ("sum", "parallel") or rule.windows or lowers:
            raise LayoutError(f"factor {name} of {rule} can only be split evenly")
        if len(lengths) != mesh.size_of(axes):
            raise LayoutError(
                f"{len(lengths)} lengths {_listed(lengths)} for factor {name}, which is split over "
                f"{mesh.size_of(axes)} devices ({mesh.format_axes(axes)})"
            )
        if sum(lengths) != factor.size:
            added = " + ".join(map(str, lengths))
            raise LayoutError(f"factor {name} has size {factor.size}, its parts make {added} = {sum(lengths)}")


def _listed(lengths: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, lengths)) + "}"


def piece_of(strategy: Strategy, name: str, size: int, index: int, count: int) -> tuple[int, int]:
    """(offset, length) of a factor's part on the ``index``-th of the ``count`` devices along its axes."""
    lengths = dict(strategy.cuts).get(name)
    if lengths is not None:
        return sum(lengths[:index]), lengths[index]
    start = index * size // count
    return start, (index + 1) * size // count - start


@dataclass(frozen=True)
class Applied:
    """The layouts that a strategy gives to the operands and results of an operator."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


def apply_strategy(rule: OpRule, strategy: Strategy, mesh: Mesh) -> Applied:
    """Rule + strategy -> layouts. A lowered factor gives the layouts around the lowering: results that lack it are
    invariant."""
    kinds = {factor.name: factor for factor in rule.factors}

    def layout(dims: Dims, states: dict[str, str]) -> Layout:
        present = {factor for dim in dims for factor in dim}
        atoms = tuple(
            tuple(Atom(kinds[f].size, strategy.axes_of.get(f, ())) for f in dim) or (Atom(1),) for dim in dims
        )
        rest = {axis: s for axis, s in states.items() if s != "I" and strategy.choice_of.get(axis) not in present}
        plain = Layout(mesh, atoms, tuple(sorted(rest.items(), key=lambda item: mesh.order[item[0]])))
        if strategy.cuts:
            plain = _cut(dims, plain, strategy)
        return _windowed(rule, dims, plain, strategy) if rule.windows else plain

    operands = []
    for position, dims in enumerate(rule.operands):
        states = {axis: "R" for _, axes in strategy.factors for axis in axes}
        for axis, state in strategy.rest:
            passes = state != "R" and position in rule.linear[int(state[1:])]
            states[axis] = "P" if passes else "R"
        operands.append(layout(dims, states))
    results = []
    for dims in rule.results:
        states = {axis: REDUCTION_STATES.get(kinds[f].kind, "I") for f, axes in strategy.factors for axis in axes}
        states |= {axis: "R" if state == "R" else "P" for axis, state in strategy.rest}
        results.append(layout(dims, states))
    return Applied(tuple(operands), tuple(results))


def _cut(dims: Dims, plain: Layout, strategy: Strategy) -> Layout:
    """The layout with the parts of factors that are split by hand."""
    cuts = dict(strategy.cuts)
    windows = []
    for d, dim in enumerate(dims):
        for i, factor in enumerate(dim):
            if factor in cuts:
                size, count = plain.dims[d][i].size, len(cuts[factor])
                even = tuple((n + 1) * size // count - n * size // count for n in range(count))
                windows += [Windows.of_lengths(d, i, cuts[factor])] if cuts[factor] != even else []
    return replace(plain, windows=tuple(windows))


def _windowed(rule: OpRule, dims: Dims, plain: Layout, strategy: Strategy) -> Layout:
    """The layout of an operand whose factors are read through windows, where these are split."""
    through = dict(rule.windows)
    atoms: list[tuple[Atom, ...]] = []
    windows: list[Windows] = []
    axes_of_windows: set[str] = set()
    for d, (factors, atoms_of_dim) in enumerate(zip(dims, plain.dims, strict=True)):
        new_atoms: list[Atom] = []
        for base, group in itertools.groupby(zip(factors, atoms_of_dim, strict=False), lambda pair: base_name(pair[0])):
            parts = tuple(atom for _, atom in group)
            window = through.get(base)
            major = rule.parts_of(window.factor)[0] if window is not None else None
            axes = strategy.axes_of.get(major.name, ()) if major is not None else ()
            size, count = prod(atom.size for atom in parts), plain.mesh.size_of(axes)
            if window is None or major is None or not axes or not size:
                new_atoms.extend(parts)
                continue
            stride = prod(part.size for part in rule.parts_of(window.factor)[1:])
            ranges = _ranges(window, major.size, stride, count)
            if any(rows != ((i * size // count, (i + 1) * size // count),) for i, rows in enumerate(ranges)):
                windows.append(Windows(d, len(new_atoms), ranges))
            new_atoms.append(Atom(size, axes))
            axes_of_windows.update(axes)
        atoms.append(tuple(new_atoms) or atoms_of_dim)
    states = tuple((axis, state) for axis, state in plain.states if axis not in axes_of_windows)
    return Layout(plain.mesh, tuple(atoms), states, tuple(windows))


@lru_cache(maxsize=10_000)
def _ranges(window: Window, size: int, stride: int, count: int) -> tuple[Ranges, ...]:
    """The rows that each of ``count`` devices needs, when the result's factor has ``size`` blocks of ``stride``."""
    bounds = [i * size // count * stride for i in range(count + 1)]
    return tuple(
        window.ranges(start, stop - start) if stop > start else () for start, stop in itertools.pairwise(bounds)
    )
