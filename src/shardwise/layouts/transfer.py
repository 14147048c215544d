"""Values between stages: the layout in which one crosses.

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

from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.renaming import Renaming


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
