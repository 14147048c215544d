"""Strategies: which mesh axes split which factors of an operator, and the layouts that follow.

``"m@dp n@tp"`` splits factor m over axis dp and n over tp. An axis that is assigned to no factor makes every device
along it repeat the work (``I``, the default), or repeat it for consumers that do different work (``R@tp``), or passes a
partial sum through an operator that is linear in it (``P@tp``; ``P1@tp`` for the second group of operands it is linear
in), or gives a device the rows whose keys it owns (``K@ep``: tokens go to their experts). ``"v@tp{10,20,30,4}"`` gives
the devices along tp so many indices of v each, instead of equally many.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from shardwise.errors import LayoutError, NotationError, caret
from shardwise.layouts.choice import (
    BY_KEY,
    INVARIANT,
    REPLICATED,
    AxisChoice,
    ByKey,
    PassSum,
    Repeat,
    ShardPositions,
    Split,
    Where,
    layout_of,
    parse_choice,
)
from shardwise.layouts.layout import Atom, Layout, Ranges, Windows
from shardwise.layouts.mesh import Mesh
from shardwise.rules.rule import Dims, OpRule, Window, base_name
from shardwise.untrusted_text import check_notation, shorten_repr, whole_number

_READS = "a strategy reads m@dp n@tp"
_WORD = re.compile(r" *([A-Za-z_][\w.]*)@(\([^()]*\)|[\w.]+)(?:\{([^{}]*)\})? *", re.ASCII)


@dataclass(frozen=True)
class Strategy:
    """The choices of an operator. ``factors``: factor -> the sub-axes that split it, major first. ``rest``: sub-axis ->
    another choice.

    Sub-axes in neither are invariant (the work is repeated). ``cuts``: factor -> how many of its indices each device
    along its axes has, for those that are not split evenly.
    """

    factors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rest: tuple[tuple[str, Repeat | PassSum | ByKey], ...] = ()
    cuts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @staticmethod
    def of(choices: Mapping[str, AxisChoice]) -> Strategy:
        """From sub-axis -> choice; axes of one factor are major first in the mapping's order."""
        factors: dict[str, tuple[str, ...]] = {}
        rest: list[tuple[str, Repeat | PassSum | ByKey]] = []
        for axis, choice in choices.items():
            if isinstance(choice, Split):
                factors[choice.factor] = (*factors.get(choice.factor, ()), axis)
            elif choice != INVARIANT:
                rest.append((axis, choice))
        return Strategy(tuple(sorted(factors.items())), tuple(sorted(rest, key=lambda item: item[0])))

    @staticmethod
    def parse(text: str, mesh: Mesh) -> Strategy:
        """Invert ``format``. Raises NotationError or LayoutError."""
        return replace(Strategy.of(parse_choices(text, mesh)), cuts=tuple(sorted(parse_cuts(text).items())))

    @cached_property
    def choice_of(self) -> dict[str, AxisChoice]:
        """Sub-axis -> choice, those of one factor major first; absent: invariant."""
        return {axis: Split(factor) for factor, axes in self.factors for axis in axes} | dict(self.rest)

    @cached_property
    def axes_of(self) -> dict[str, tuple[str, ...]]:
        return dict(self.factors)

    def format(self, mesh: Mesh) -> str:
        ordered = sorted(self.factors, key=lambda item: min(map(mesh.order.__getitem__, item[1])))
        cuts = {factor: "{" + ",".join(map(str, lengths)) + "}" for factor, lengths in self.cuts}
        words = [f"{factor}@{mesh.format_axes(axes)}{cuts.get(factor, '')}" for factor, axes in ordered]
        for word in sorted({str(choice) for _, choice in self.rest}):
            axes = tuple(sorted((a for a, choice in self.rest if str(choice) == word), key=mesh.order.__getitem__))
            words.append(f"{word}@{mesh.format_axes(axes)}")
        return " ".join(words)


def _words(text: str) -> Iterator[re.Match[str]]:
    """The words of a strategy's text, one behind the other: factor or state, axes, lengths. Raises NotationError."""
    position, end = 0, len(check_notation(text, _READS).rstrip())
    while position < end:
        match = _WORD.match(text, position)
        if match is None:
            raise NotationError(caret(text, position, _READS))
        yield match
        position = match.end()


def parse_choices(text: str, mesh: Mesh) -> dict[str, AxisChoice]:
    """``"m@dp n@(tp,sp) I@x"`` -> sub-axis -> choice, in the order written. Raises NotationError or LayoutError."""
    choices: dict[str, AxisChoice] = {}
    for match in _words(text):
        for axis in mesh.parse_axes(match.group(2)):
            if axis in choices:
                raise LayoutError(f"mesh axis {axis} is used more than once in {shorten_repr(text)}")
            choices[axis] = parse_choice(match.group(1))
    return choices


def parse_cuts(text: str) -> dict[str, tuple[int, ...]]:
    """``"v@tp{10,20,30,4} n@dp"`` -> ``{"v": (10, 20, 30, 4)}``. Raises NotationError or LayoutError."""
    cuts: dict[str, tuple[int, ...]] = {}
    for match in _words(text):
        name, _, inner = match.groups()
        if inner is None:
            continue
        lengths = [whole_number(length.strip()) for length in inner.split(",")]
        explicit = tuple(length for length in lengths if length is not None)
        if len(explicit) < len(lengths):
            raise NotationError(caret(text, match.start(3), "an uneven split reads v@tp{10,20,30,4}"))
        if not isinstance(parse_choice(name), Split):
            raise LayoutError(f"{name} is not a factor: only factors can be split unevenly ({shorten_repr(text)})")
        if name in cuts:
            raise LayoutError(f"factor {name} is split unevenly twice in {shorten_repr(text)}")
        cuts[name] = explicit
    return cuts


def named_factors(text: str) -> set[str]:
    """Return the factors and states that a strategy's text names."""
    return {word.partition("@")[0] for word in re.sub(r"\{[^{}]*\}", "", text).split()}


def check_strategy(rule: OpRule, strategy: Strategy, mesh: Mesh) -> None:
    """Raise LayoutError unless the strategy is one of the operator's."""
    factors = {factor.name: factor for factor in rule.factors}
    seen: set[str] = set()
    for name, axes in strategy.factors:
        if name not in factors:
            raise LayoutError(f"the operator has no factor {shorten_repr(name)}: {rule}")
        if factors[name].kind == "whole":
            raise LayoutError(f"factor {name} of {rule} cannot be split")
        for axis in axes:
            mesh.expand(axis)
            if axis in seen:
                raise LayoutError(f"mesh axis {axis} splits two factors")
            seen.add(axis)
    for axis, choice in strategy.rest:
        mesh.expand(axis)
        if axis in seen:
            raise LayoutError(f"mesh axis {axis} is used twice")
        if isinstance(choice, PassSum) and choice.group >= len(rule.linear):
            raise LayoutError(f"a partial sum cannot pass through {rule}: not linear ({choice}@{axis})")
        if choice == REPLICATED and rule.largest is not None:
            raise LayoutError(f"products in float8 round whole cotangents: R@{axis} leaves partial ones (omit it)")
        if isinstance(choice, ByKey):
            if rule.keyed is None:
                raise LayoutError(f"rows cannot follow keys through {rule} (K@{axis})")
            if strategy.axes_of.get(rule.keyed.owned or ""):
                what = f"factor {rule.keyed.owned} is split over another axis"
                raise LayoutError(f"rows cannot follow keys through {rule} (K@{axis}): {what}")
    lowers = any(factors[name].kind == "lowered" for name, axes in strategy.factors if axes)
    for name, lengths in strategy.cuts:
        if name not in factors:
            raise LayoutError(
                f"the operator has no undivided factor {shorten_repr(name)}, so it cannot be split by hand: {rule}"
            )
        factor, axes = factors[name], strategy.axes_of.get(name, ())
        if factor.kind not in ("sum", "parallel") or rule.windows or lowers:
            raise LayoutError(f"factor {name} of {rule} can only be split evenly")
        if len(lengths) != mesh.size_of(axes):
            raise LayoutError(
                f"{len(lengths)} lengths {_listed(lengths)} for factor {name}, which is split over "
                f"{mesh.size_of(axes)} devices ({mesh.format_axes(axes)})"
            )
        if sum(lengths) != factor.size:
            added = " + ".join(map(str, lengths[:16])) + " + ..." * (len(lengths) > 16)
            raise LayoutError(f"factor {name} has size {factor.size}, its parts make {added} = {sum(lengths)}")


def _listed(lengths: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, lengths[:16])) + ",..." * (len(lengths) > 16) + "}"


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


@lru_cache(maxsize=20_000)
def apply_strategy(rule: OpRule, strategy: Strategy, mesh: Mesh) -> Applied:
    """Rule + strategy -> layouts. A lowered factor gives the layouts around the lowering: results that lack it are
    invariant."""
    places, choices = ShardPositions.of(rule), strategy.choice_of
    by_key = sorted((axis for axis, choice in choices.items() if choice == BY_KEY), key=mesh.order.__getitem__)
    choices = {axis: choice for axis, choice in choices.items() if choice != BY_KEY} | dict.fromkeys(by_key, BY_KEY)
    sizes = {factor.name: factor.size for factor in rule.factors}

    def layout(dims: Dims, where: Mapping[str, Where]) -> Layout:
        atoms = tuple(tuple(sizes[factor] for factor in dim) or (1,) for dim in dims)
        plain = layout_of(where, atoms, mesh)
        if strategy.cuts:
            plain = _cut(dims, plain, strategy)
        return _windowed(rule, dims, plain) if rule.windows else plain

    operands, results = (
        tuple(layout(dims, {axis: at(i, choice) for axis, choice in choices.items()}) for i, dims in enumerate(tensors))
        for tensors, at in ((rule.operands, places.operand), (rule.results, places.result))
    )
    return Applied(operands, results)


def _cut(dims: Dims, plain: Layout, strategy: Strategy) -> Layout:
    cuts = dict(strategy.cuts)
    windows = []
    for d, dim in enumerate(dims):
        for i, factor in enumerate(dim):
            if factor in cuts:
                size, count = plain.dims[d][i].size, len(cuts[factor])
                even = tuple((n + 1) * size // count - n * size // count for n in range(count))
                windows += [Windows.of_lengths(d, i, cuts[factor])] if cuts[factor] != even else []
    return replace(plain, windows=tuple(windows))


def _windowed(rule: OpRule, dims: Dims, plain: Layout) -> Layout:
    """The layout of a tensor whose factors are read through windows, where these are split: its parts are one atom."""
    through = dict(rule.windows)
    atoms: list[tuple[Atom, ...]] = []
    windows: list[Windows] = []
    for d, (factors, atoms_of_dim) in enumerate(zip(dims, plain.dims, strict=True)):
        new_atoms: list[Atom] = []
        for base, group in itertools.groupby(zip(factors, atoms_of_dim, strict=False), lambda pair: base_name(pair[0])):
            parts = tuple(atom for _, atom in group)
            window, axes = through.get(base), parts[0].axes
            if window is None or not axes:
                new_atoms.extend(parts)
                continue
            size, count = prod(atom.size for atom in parts), plain.mesh.size_of(axes)
            major, *minor = rule.parts_of(window.factor)
            ranges = _ranges(window, major.size, prod(part.size for part in minor), count)
            if any(rows != ((i * size // count, (i + 1) * size // count),) for i, rows in enumerate(ranges)):
                windows.append(Windows(d, len(new_atoms), ranges))
            new_atoms.append(Atom(size, axes))
        atoms.append(tuple(new_atoms) or atoms_of_dim)
    return Layout(plain.mesh, tuple(atoms), plain.states, tuple(windows))


@lru_cache(maxsize=10_000)
def _ranges(window: Window, size: int, stride: int, count: int) -> tuple[Ranges, ...]:
    """The rows that each of ``count`` devices needs, when the result's factor has ``size`` blocks of ``stride``."""
    bounds = [i * size // count * stride for i in range(count + 1)]
    return tuple(
        window.ranges(start, stop - start) if stop > start else () for start, stop in itertools.pairwise(bounds)
    )
