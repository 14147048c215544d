"""Tables over pairs of layouts of a value: the costs of conversions between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.layouts.routes import SHARDED, STATES, Floats, Ints, Routes


def seconds_between(routes: Routes, starts: Ints, nodes: Ints) -> Floats:
    """Return [starts, nodes] seconds; each pair of layouts is computed once, however many strategies have it."""
    rows, back = np.unique(starts, return_inverse=True)
    columns, forth = np.unique(nodes, return_inverse=True)
    small = routes.prices(columns)[rows]
    return small[back][:, forth]


def is_copied(routes: Routes, starts: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """Return [starts, nodes] whether a conversion makes another tensor. Invariant and replicated are the same one."""
    codes = np.where(routes.codes == STATES.index("R"), STATES.index("I"), routes.codes)
    return np.asarray((codes[starts][:, None, :] != codes[nodes][None, :, :]).any(axis=2))


def kept_elements(routes: Routes, starts: Ints, nodes: Ints, *, is_held: bool, resent: bool) -> tuple[Floats, Floats]:
    """Return [starts, nodes] elements that an operand which is kept in ``nodes`` holds, and 1 where its message is sent
    again. ``is_held``: the source of the conversion is kept anyway; ``resent``: messages may be sent again, which they
    are where that holds fewer elements."""
    copied = is_copied(routes, starts, nodes)
    before, after = np.broadcast_arrays(routes.numel[starts][:, None], routes.numel[nodes][None, :])
    is_resent = copied & ((before <= after) if is_held else (before < after)) & resent
    elements = np.where(is_resent, 0 if is_held else before, after * copied if is_held else after)
    return elements.astype(np.float64), is_resent.astype(np.float64)


def is_brought(routes: Routes, starts: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """Return [starts, nodes] whether forward brings what a device does not have: another tensor, and no smaller one."""
    return is_copied(routes, starts, nodes) & np.less_equal.outer(routes.numel[starts], routes.numel[nodes])


def keeps_size(routes: Routes, starts: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """Return [starts, nodes] whether a device has as many elements in both layouts."""
    return np.equal.outer(routes.numel[starts], routes.numel[nodes])


def larger_gradients(routes: Routes, starts: Ints, nodes: Ints, itemsize: int) -> tuple[Floats, Floats]:
    """Return [starts, nodes] bytes of gradients in ``nodes`` where larger than in ``starts``, and the difference."""
    itemsizes = np.where(keeps_size(routes, starts, nodes), 0.0, float(itemsize))
    whole: Floats = itemsizes * routes.numel[nodes][None, :]
    return whole, whole - itemsizes * routes.numel[starts][:, None]


def bytes_sent(routes: Routes, starts: Ints, nodes: Ints) -> Floats:
    """Return [starts, nodes] bytes of a conversion while it runs: its source, its message and its result. This is an
    estimate: intermediate layouts of a longer route are ignored."""
    before, after = routes.numel[starts][:, None], routes.numel[nodes][None, :]
    num_bytes = (before + 2.0 * np.maximum(before, after)) * max(routes.tensor.itemsize, routes.tensor.grad_itemsize)
    return np.where(is_copied(routes, starts, nodes), num_bytes, 0.0)


def sendable(routes: Routes) -> Ints:
    """Return the layouts, sharded or whole on every axis, in which a value is stored or crosses to another stage."""
    return np.flatnonzero(((routes.codes == STATES.index("I")) | (routes.codes >= SHARDED)).all(axis=1))
