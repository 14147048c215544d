"""Tables over pairs of layouts of a value: what conversions between them take and make."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.layouts.routes import SHARDED, STATES, Floats, Ints, Routes


def seconds_between(routes: Routes, made: Ints, nodes: Ints) -> Floats:
    """[made, nodes] seconds; each pair of layouts once, however many strategies have it."""
    rows, back = np.unique(made, return_inverse=True)
    columns, forth = np.unique(nodes, return_inverse=True)
    small = routes.prices(columns)[rows]
    return small[back][:, forth]


def is_copied(routes: Routes, made: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """[made, nodes]: whether a conversion makes another tensor. Between invariant and replicated it is the same one."""
    codes = np.where(routes.codes == STATES.index("R"), STATES.index("I"), routes.codes)
    return np.asarray((codes[made][:, None, :] != codes[nodes][None, :, :]).any(axis=2))


def kept_of(routes: Routes, made: Ints, nodes: Ints, *, is_held: bool, resent: bool) -> tuple[Floats, Floats]:
    """[made, nodes] elements that an operand which is kept in ``nodes`` holds; and 1 where its message is sent again.
    ``is_held``: what it is made from is there without it; ``resent``: whether messages may be sent again, which they
    are where that holds fewer elements."""
    copied = is_copied(routes, made, nodes)
    before, after = np.broadcast_arrays(routes.numel[made][:, None], routes.numel[nodes][None, :])
    again = copied & ((before <= after) if is_held else (before < after)) & resent
    held = np.where(again, 0 if is_held else before, after * copied if is_held else after)
    return held.astype(np.float64), again.astype(np.float64)


def is_brought(routes: Routes, made: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """[made, nodes]: whether forward brings what a device does not have: another tensor, and no smaller one."""
    return is_copied(routes, made, nodes) & np.less_equal.outer(routes.numel[made], routes.numel[nodes])


def keeps_size(routes: Routes, made: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """[made, nodes]: whether a device has as many elements in both layouts."""
    return np.equal.outer(routes.numel[made], routes.numel[nodes])


def larger(routes: Routes, made: Ints, nodes: Ints, itemsize: int) -> tuple[Floats, Floats]:
    """[made, nodes] bytes of gradients in ``nodes`` where these are larger than in ``made``, and by how many."""
    itemsizes = np.where(keeps_size(routes, made, nodes), 0.0, float(itemsize))
    whole: Floats = itemsizes * routes.numel[nodes][None, :]
    return whole, whole - itemsizes * routes.numel[made][:, None]


def bytes_sent(routes: Routes, made: Ints, nodes: Ints) -> Floats:
    """[made, nodes] bytes of a conversion while it runs: what is sent, the message, what is made of it. An estimate:
    what lies between on a longer route is not looked at."""
    before, after = routes.numel[made][:, None], routes.numel[nodes][None, :]
    held = (before + 2.0 * np.maximum(before, after)) * max(routes.tensor.itemsize, routes.tensor.grad_itemsize)
    return np.where(is_copied(routes, made, nodes), held, 0.0)


def sendable(routes: Routes) -> Ints:
    """The layouts that are sharded or whole on every axis: in which a value is stored, or crosses to another stage."""
    return np.flatnonzero(((routes.codes == STATES.index("I")) | (routes.codes >= SHARDED)).all(axis=1))
