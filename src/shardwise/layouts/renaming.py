"""Layouts and strategies on a mesh whose axes have other names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy


@dataclass(frozen=True)
class Renaming:
    """From the names of one mesh (``source``) to those of another of the same shape (``target``)."""

    source: Mesh
    target: Mesh

    @cached_property
    def _names(self) -> dict[str, str]:
        return dict(zip(self.source.sub_axes, self.target.sub_axes, strict=True))

    def axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._names[axis] for axis in axes)

    def move(self, move: Move) -> Move:
        return replace(
            move, source=self.layout(move.source), target=self.layout(move.target), axes=self.axes(move.axes)
        )

    def layout(self, layout: Layout) -> Layout:
        if self.source == self.target:
            return layout
        dims = tuple(tuple(replace(atom, axes=self.axes(atom.axes)) for atom in dim) for dim in layout.dims)
        states = tuple((self._names[axis], state) for axis, state in layout.states)
        return Layout(self.target, dims, states, layout.windows)

    def strategy(self, strategy: Strategy) -> Strategy:
        factors = tuple((factor, self.axes(axes)) for factor, axes in strategy.factors)
        rest = sorted((self._names[axis], choice) for axis, choice in strategy.rest)
        return replace(strategy, factors=factors, rest=tuple(rest))
