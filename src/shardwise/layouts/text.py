"""Layouts as types: ``bf16[32@dp, 512, 4096@(tp,sp)]``, ``f64[64, (3 12@tp 64)] partial(sum@tp) replicated(dp)``.

Axes that are not mentioned are invariant. Windows are listed device by device: ``[2, 16@sp{0:5|3:9|7:13|11:16}]``,
several ranges of one device with a plus: ``{14:16+0:6|...}``.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

import torch

from shardwise.errors import LayoutError, NotationError, caret
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import PARTIAL_KINDS, Atom, Layout, Ranges, Windows
from shardwise.layouts.mesh import Mesh
from shardwise.rules.keyed_rows import keyed
from shardwise.untrusted_text import MAX_NUMBER, check_notation, shorten_repr, whole_number

_READS = "a layout reads [32@dp, 512, 4096@tp]"
_MOST_ATOMS = 256  # of all dims together
_HEAD = re.compile(r" *(?:\w+ *)?\[", re.ASCII)
_ATOM = re.compile(r" *([0-9]+)(?:@(\([^()]*\)|[\w.]+)(?:\{([^{}]*)\})?)? *", re.ASCII)
_FACTOR = re.compile(r"[1-9][0-9]{0,5}(\.[0-9]{1,5})?")
_STATES = re.compile(r" *(replicated|partial|keyed)\(([^()]*)\) *")

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def format_dtype(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(name: str) -> torch.dtype:
    """Invert ``format_dtype``. Raises NotationError."""
    for dtype, dtype_name in DTYPE_NAMES.items():
        if name in (dtype_name, str(dtype).removeprefix("torch.")):
            return dtype
    raise NotationError(f"{shorten_repr(name)} is not a dtype: use one of {', '.join(DTYPE_NAMES.values())}")


def format_layout(layout: Layout, dtype: torch.dtype | None = None) -> str:
    """Return the layout as a type, with atoms merged where that changes nothing."""
    return (format_dtype(dtype) if dtype else "") + str(layout)


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Invert ``format_layout``; a leading dtype is ignored. Raises NotationError (with a caret) or LayoutError."""
    match = _HEAD.match(check_notation(text, _READS))
    if match is None:
        raise NotationError(caret(text, 0, _READS))
    close = text.find("]", match.end())
    if close < 0:
        raise NotationError(caret(text, len(text), "']' is missing"))
    dims: list[tuple[Atom, ...]] = []
    windows: list[Windows] = []
    column = match.end()
    for item in _split_dims(text[match.end() : close]):
        if sum(map(len, dims)) > _MOST_ATOMS:
            raise LayoutError(f"more than {_MOST_ATOMS} dims and parts of dims in {shorten_repr(text)}")
        atoms, windows_of_dim = _parse_dim(text, column, item, mesh)
        windows.extend(Windows(len(dims), i, ranges) for i, ranges in windows_of_dim.items())
        dims.append(atoms)
        column += len(item) + 1
    states = _parse_states(text, close + 1, mesh)
    split = Counter(chain(states, *(atom.axes for dim in dims for atom in dim)))
    twice = sorted(axis for axis, count in split.items() if count > 1)
    if twice:
        raise LayoutError(f"mesh axis {', '.join(twice)} is used more than once in {shorten_repr(text)}")
    ordered = tuple(sorted(states.items(), key=lambda item: mesh.order[item[0]]))
    layout = Layout(mesh, tuple(dims), ordered, tuple(windows))
    if max(layout.shape, default=0) > MAX_NUMBER:
        raise LayoutError(f"a dim of {shorten_repr(text)} has more elements than 64 bits count")
    for window in windows:
        atom = dims[window.dim][window.atom]
        for start, stop in chain.from_iterable(window.ranges):
            if not start < stop <= atom.size:
                what = f"the window {start}:{stop} of {atom.size}@{mesh.format_axes(atom.axes)} in {shorten_repr(text)}"
                raise LayoutError(f"{what}: it has rows from 0 to {atom.size}")
    return layout


def _parse_states(text: str, column: int, mesh: Mesh) -> dict[str, str]:
    """``replicated(dp) partial(sum@tp)`` from a column on: sub-axis -> state."""
    states: dict[str, str] = {}
    kinds = {kind: state for state, kind in PARTIAL_KINDS.items()}
    end = len(text.rstrip())
    while column < end:
        word = _STATES.match(text, column)
        if word is None:
            start = end - len(text[column:end].lstrip())
            raise NotationError(caret(text, start, "expected replicated(axes), partial(sum@axes) or keyed(axes)"))
        inner, state = word.group(2), "R"
        if word.group(1) == "partial":
            kind, _, inner = inner.partition("@")
            if kind.strip() not in kinds or not inner:
                raise NotationError(caret(text, word.start(1), "a partial sum reads partial(sum@tp)"))
            state = kinds[kind.strip()]
        elif word.group(1) == "keyed":
            copies, at, rest = inner.rpartition("@")
            inner, star, factor = rest.partition("*")
            count = whole_number(copies.strip()) if at else 1
            if not count or (star and not _FACTOR.fullmatch(factor)):
                what = "a keyed layout reads keyed(ep), keyed(2@ep) or keyed(2@ep*1.5)"
                raise NotationError(caret(text, word.start(1), what))
            state = keyed(count, float(factor)) if star else keyed(count)
        for axis in mesh.parse_axes(inner):
            if axis in states:
                raise LayoutError(f"mesh axis {axis} has two states in {shorten_repr(text)}")
            states[axis] = state
        column = word.end()
    return states


def format_move(move: Move) -> str:
    """``tp: [16@tp, 8] -> [16, 8]``: one step of a conversion, with its atoms as they are."""
    return f"{move.source.mesh.format_axes(move.axes)}: {move.source.text} -> {move.target.text}"


def parse_move(text: str, mesh: Mesh) -> Move:
    """Invert ``format_move``. Raises NotationError or LayoutError."""
    axes, colon, ends = text.partition(": ")
    source, arrow, target = ends.partition(" -> ")
    if not colon or not arrow:
        raise NotationError(caret(text, 0, "a move reads tp: [16@tp, 8] -> [16, 8]"))
    move = Move(parse_layout(source, mesh), parse_layout(target, mesh), mesh.parse_axes(axes))
    if move.source.shape != move.target.shape:
        raise LayoutError(f"{text}: from shape {list(move.source.shape)} to shape {list(move.target.shape)}")
    return move


def _split_dims(text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    items, depth, start = [], 0, 0
    for match in re.finditer(r"[(),]", text):
        depth += (match.group() == "(") - (match.group() == ")")
        if match.group() == "," and depth == 0:
            items.append(text[start : match.start()])
            start = match.end()
    return [*items, text[start:]] if text.strip() else []


def _parse_dim(text: str, column: int, item: str, mesh: Mesh) -> tuple[tuple[Atom, ...], dict[int, tuple[Ranges, ...]]]:
    column += len(item) - len(item.lstrip())
    inner = item.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner, column = inner[1:-1], column + 1
    atoms: list[Atom] = []
    windows: dict[int, tuple[Ranges, ...]] = {}
    position = 0
    while position < len(inner) or not atoms:
        match = _ATOM.match(inner, position)
        size = None if match is None else whole_number(match.group(1))
        if match is None or size is None:
            reads = "a dim reads 4096, 4096@tp, 4096@(dp,tp) or (3 12@tp 64)"
            raise NotationError(caret(text, column + position, reads))
        position = match.end()
        axes = mesh.parse_axes(match.group(2)) if match.group(2) else ()
        if match.group(3) is not None:
            count = match.group(3).count("|") + 1
            if count != mesh.size_of(axes):
                what = f"{count:,} windows for {size}@{mesh.format_axes(axes)} in {shorten_repr(text)}"
                raise LayoutError(f"{what}: split over {mesh.size_of(axes)} devices")
            windows[len(atoms)] = _parse_windows(text, column + match.start(3), match.group(3))
        atoms.append(Atom(size, axes))
        if len(atoms) > _MOST_ATOMS:
            raise LayoutError(f"more than {_MOST_ATOMS} parts of a dim in {shorten_repr(text)}")
    return tuple(atoms), windows


def _parse_windows(text: str, column: int, inner: str) -> tuple[Ranges, ...]:
    """``0:5|3:9+0:1|`` -> the ranges of every device."""
    ranges: list[Ranges] = []
    for part in inner.split("|"):
        bounds = [tuple(map(whole_number, window.split(":"))) for window in part.split("+")] if part else []
        windows = tuple((pair[0], pair[1]) for pair in bounds if len(pair) == 2 and None not in pair)
        if len(windows) < len(bounds):
            raise NotationError(caret(text, column, "windows read {0:5|3:8}, device by device"))
        ranges.append(tuple((int(start or 0), int(stop or 0)) for start, stop in windows))
        column += len(part) + 1
    return tuple(ranges)
