"""Layouts as types: ``bf16[32@dp, 512, 4096@(tp,sp)]``, ``f64[64, (3 12@tp 64)] partial(sum@tp) replicated(dp)``.

Axes that are not mentioned are invariant. Windows are listed device by device: ``[2, 16@sp{0:5|3:9|7:13|11:16}]``,
several ranges of one device with a plus: ``{14:16+0:6|...}``.
"""

from __future__ import annotations

import re

import torch

from shardwise.errors import LayoutError, NotationError, caret
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import PARTIAL_KINDS, Atom, Layout, Ranges, Windows
from shardwise.layouts.mesh import Mesh

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def format_dtype(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(name: str) -> torch.dtype:
    """The inverse of ``format_dtype``. Raises NotationError."""
    for dtype, dtype_name in DTYPE_NAMES.items():
        if name in (dtype_name, str(dtype).removeprefix("torch.")):
            return dtype
    raise NotationError(f"{name!r} is no dtype: one of {', '.join(DTYPE_NAMES.values())}")


def format_layout(layout: Layout, dtype: torch.dtype | None = None, *, merged: bool = True) -> str:
    """The layout as a type. Atoms are merged where that changes nothing (``merged=False``: they stay as they are, so
    that the same layout is parsed back)."""
    mesh = layout.mesh
    if merged:
        layout = layout.canonical()

    windows = {(window.dim, window.atom): window.ranges for window in layout.windows}

    def atom_text(d: int, i: int, atom: Atom) -> str:
        if not atom.axes:
            return str(atom.size)
        text = f"{atom.size}@{mesh.format_axes(atom.axes)}"
        if (d, i) not in windows:
            return text
        texts = ("+".join(f"{start}:{stop}" for start, stop in ranges) for ranges in windows[d, i])
        return text + "{" + "|".join(texts) + "}"

    atoms = [[atom_text(d, i, atom) for i, atom in enumerate(dim)] for d, dim in enumerate(layout.dims)]
    dims = [dim[0] if len(dim) == 1 else "(" + " ".join(dim) + ")" for dim in atoms]
    text = (format_dtype(dtype) if dtype else "") + "[" + ", ".join(dims) + "]"
    for state in ("R", *PARTIAL_KINDS):
        axes = tuple(axis for axis, on_axis in layout.states if on_axis == state)
        if axes:
            names = mesh.format_axes(axes).strip("()")
            text += f" replicated({names})" if state == "R" else f" partial({PARTIAL_KINDS[state]}@{names})"
    return text


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """The inverse of ``format_layout``; a leading dtype is ignored. Raises NotationError (with a caret) or
    LayoutError."""
    match = re.match(r"\s*\w*\s*\[", text)
    if match is None:
        raise NotationError(caret(text, 0, "a layout reads [32@dp, 512, 4096@tp]"))
    close = text.find("]", match.end())
    if close < 0:
        raise NotationError(caret(text, len(text), "']' is missing"))
    dims: list[tuple[Atom, ...]] = []
    windows: list[Windows] = []
    column = match.end()
    for item in _split_dims(text[match.end() : close]):
        atoms, windows_of_dim = _parse_dim(text, column, item, mesh)
        windows.extend(Windows(len(dims), i, ranges) for i, ranges in windows_of_dim.items())
        dims.append(atoms)
        column += len(item) + 1
    states: dict[str, str] = {}
    kinds = {kind: state for state, kind in PARTIAL_KINDS.items()}
    column = close + 1
    for word in re.finditer(r"\s*(replicated|partial)\(([^)]*)\)|\S+", text[close + 1 :]):
        inner, start = word.group(2), column + word.end() - len(word.group().lstrip())
        if word.group(1) is None:
            raise NotationError(caret(text, start, "expected replicated(axes) or partial(sum@axes)"))
        state = "R"
        if word.group(1) == "partial":
            kind, _, inner = inner.partition("@")
            if kind.strip() not in kinds or not inner:
                raise NotationError(caret(text, start, "a partial sum reads partial(sum@tp)"))
            state = kinds[kind.strip()]
        for axis in mesh.parse_axes(inner):
            if axis in states:
                raise LayoutError(f"mesh axis {axis} has two states in {text!r}")
            states[axis] = state
    ordered = tuple(sorted(states.items(), key=lambda item: mesh.order[item[0]]))
    layout = Layout(mesh, tuple(dims), ordered, tuple(windows))
    for window in windows:
        atom = dims[window.dim][window.atom]
        if len(window.ranges) != mesh.size_of(atom.axes):
            raise LayoutError(
                f"{len(window.ranges)} windows for {atom.size}@{mesh.format_axes(atom.axes)} in {text!r}: split over "
                f"{mesh.size_of(atom.axes)} devices"
            )
    used = [axis for dim in dims for atom in dim for axis in atom.axes] + list(states)
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise LayoutError(f"mesh axis {', '.join(twice)} is used more than once in {text!r}")
    return layout


def format_move(move: Move) -> str:
    """``tp: [16@tp, 8] -> [16, 8]``: one step of a conversion, with its atoms as they are."""
    ends = (format_layout(layout, merged=False) for layout in (move.source, move.target))
    return f"{move.source.mesh.format_axes(move.axes)}: {' -> '.join(ends)}"


def parse_move(text: str, mesh: Mesh) -> Move:
    """The inverse of ``format_move``. Raises NotationError or LayoutError."""
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
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    return [*items, text[start:]] if text.strip() else []


def _parse_dim(text: str, column: int, item: str, mesh: Mesh) -> tuple[tuple[Atom, ...], dict[int, tuple[Ranges, ...]]]:
    """The atoms, and the windows of those that have any."""
    column += len(item) - len(item.lstrip())
    inner = item.strip()
    if inner.startswith("(") and inner.endswith(")") and not re.fullmatch(r"\(.*\)@.*", inner):
        inner, column = inner[1:-1], column + 1
    atoms: list[Atom] = []
    windows: dict[int, tuple[Ranges, ...]] = {}
    position = 0
    for match in re.finditer(r"\s*(\d+)(?:@(\([^)]*\)|[\w.]+)(?:\{([^}]*)\})?)?\s*", inner):
        if match.start() != position:
            break
        position = match.end()
        if match.group(3) is not None:
            windows[len(atoms)] = _parse_windows(text, column + match.start(3), match.group(3))
        atoms.append(Atom(int(match.group(1)), mesh.parse_axes(match.group(2)) if match.group(2) else ()))
    if position != len(inner) or not atoms:
        raise NotationError(caret(text, column + position, "a dim reads 4096, 4096@tp, 4096@(dp,tp) or (3 12@tp 64)"))
    return tuple(atoms), windows


def _parse_windows(text: str, column: int, inner: str) -> tuple[Ranges, ...]:
    """``0:5|3:9+0:1|`` -> the ranges of every device."""
    ranges: list[Ranges] = []
    for part in inner.split("|"):
        if not re.fullmatch(r"(\d+:\d+(\+\d+:\d+)*)?", part):
            raise NotationError(caret(text, column, "windows read {0:5|3:8}, device by device"))
        ranges.append(tuple((int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", part)))
        column += len(part) + 1
    return tuple(ranges)
