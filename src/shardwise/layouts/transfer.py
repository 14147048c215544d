"""Values between stages: the layout in which one crosses, and layouts on a mesh whose axes have other names.

On every axis of either end a value is sharded (``S``) or whole (``I``): then its cotangent lies as the value does, and
goes back the same way. The other states are turned inside the stages, by the table of conversions:

=====================  ===========================================  =====================
the stage has it       conversion (forward / backward)              the boundary has it
=====================  ===========================================  =====================
sends it replicated    R -> I   none / keep_one                     whole
sends it partial       P -> I   all_reduce / none                   whole
wants it replicated    I -> R   none / all_reduce                   whole
=====================  ===========================================  =====================
"""

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


def boundary_layout(layout: Layout) -> Layout:
    """Return the layout in which a value of some layout crosses a boundary: what is replicated or partial is whole
    there, and windows that overlap are slices."""
    plain = layout.moved(dict.fromkeys(dict(layout.states), "I"))
    return plain if tiles(plain) else plain.without_windows


def tiles(layout: Layout) -> bool:
    """Return whether every row of the value is in one window."""
    return all(window.tile(layout.dims[window.dim][window.atom].size) for window in layout.windows)


def on_mesh(layout: Layout, mesh: Mesh) -> Layout | None:
    """Return the layout that gives every device of another mesh what ``layout`` gives the device of the same number, or
    None where the sub-axes have other sizes or another order, unless it is whole."""
    if tuple(layout.mesh.sizes.values()) != tuple(mesh.sizes.values()):
        return None if layout.positions or layout.states else Layout.whole(mesh, layout.shape)
    return Renaming(layout.mesh, mesh).layout(layout)
