"""The exception tree: every error that a user can fix is a ``ShardwiseError``.

::

    ValueError
      ShardwiseError
        CaptureError      the model cannot be turned into a graph
        NotationError     a rule, strategy, layout or mesh text does not parse (points at the column)
        LayoutError       a layout or a strategy does not fit the tensor, the operator or the mesh
        PlanError         a plan file or a plan does not fit the model, mesh, inputs or version
          NothingFits     no plan fits in memory
        LaunchError       ranks cannot be started, or do not agree
        CollectiveError   ranks do not complete a collective (a RuntimeError too)
        OutOfDeviceMemoryError   no memory for a converted value (a MemoryError and a RuntimeError too, as torch's own)
        ReplicaError      ranks that must hold the same bits do not
        NotFiniteError    a loss or a gradient is NaN or infinite, where a check of it was asked for
        CheckpointError   a checkpoint is incomplete or damaged, or cannot be written

Every message says what is wrong, where, the arithmetic and the fix; errors take these parts as ``problem`` does, which
lays them out. The errors that users meet most end with the section of docs/errors.md that explains them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

# Sections of docs/errors.md, each with a program that raises the error and one that does not.
Section = Literal[
    "tensor-values",
    "python-state",
    "strategy-names",
    "mesh-size",
    "micro-batch-size",
    "nothing-fits",
    "initial-values",
    "different-calls",
    "original-parameters",
    "saving-shards",
]

_LONGEST_LINE = 2_000  # characters of a line of a message; it may quote any file
_NUM_RANKS = 8  # ranks that a message lists
_AROUND = 60  # characters shown before and after a caret in a long text


class ErrorText(str):
    """The text of an error, with its parts as attributes (see ``problem``)."""

    what: str = ""
    op: str = ""
    source: str = ""
    fix: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    section: Section | None = None


class ShardwiseError(ValueError):
    """The base of all errors that a user can fix. Very long lines of the message are shortened in the middle.

    Attributes:
        what: What is wrong, with the arithmetic.
        op: The operator or the path of the module, or "".
        source: The line of the user's code, ``model.py:41``, or "".
        fix: The suggested change, or "".
        facts: Additional (name, text) pairs, in the order of the message.
        section: The section of docs/errors.md that explains the error, or "".
    """

    def __init__(
        self,
        what: str = "",
        *,
        op: str = "",
        source: str = "",
        fix: str = "",
        facts: Iterable[tuple[str, str]] = (),
        section: Section | None = None,
    ) -> None:
        parts = what
        if not isinstance(parts, ErrorText):
            parts = problem(what, op=op, source=source, fix=fix, facts=facts, section=section)
        super().__init__("\n".join(map(_shortened, parts.split("\n"))))
        self.what, self.op, self.source = parts.what, parts.op, parts.source
        self.fix, self.facts, self.section = parts.fix, parts.facts, parts.section


class CaptureError(ShardwiseError):
    """The model cannot be captured as a graph."""


class CaptureWarning(UserWarning):
    """The model can be captured, but some effects of its Python code will not happen on ranks."""


class NotationError(ShardwiseError):
    """A text in one of shardwise's notations does not parse."""


class LayoutError(ShardwiseError):
    """A layout or a strategy does not fit."""


class PlanError(ShardwiseError):
    """A plan does not fit."""


class UnsplitWarning(UserWarning):
    """An operator has no rule: it runs unsplit on gathered operands, slower but right."""


class PlanWarning(UserWarning):
    """A plan fits, but ranks do not do all that it was made for."""


class NothingFits(PlanError):
    """Raised if no plan fits. ``what``, ``facts``, ``fix``: the parts of the message; ``computed``: fixes by
    arithmetic, which are named where none was planned; ``search_seconds``: CPU seconds of planning, where a
    cache keeps it."""

    search_seconds = 0.0

    def __init__(self, what: str, facts: Sequence[tuple[str, str]], fix: str, computed: Sequence[str] = ()) -> None:
        super().__init__(what, facts=facts, fix=fix, section="nothing-fits")
        self.what, self.facts, self.fix, self.computed = what, tuple(facts), fix, tuple(computed)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.facts, self.fix, self.computed), self.__dict__

    def naming(self, fixes: Sequence[str], why_none: str) -> NothingFits:
        """Return the error with planned fixes, the best first; without any, with the computed ones and ``why_none``."""
        named = [(f"fix {number}", fix) for number, fix in enumerate(fixes or self.computed, 1)]
        if not fixes:
            return NothingFits(self.what, [*self.facts, ("fixes", why_none), *named], self.fix)
        more = "one of these; sw.fits takes more time and tries other changes"
        return NothingFits(self.what, [*self.facts, *named], more)


class LaunchError(ShardwiseError):
    """Ranks cannot be started, or do not agree."""


class ModelAttributeError(ShardwiseError, AttributeError):
    """An attribute of the model is not one of the parallel module that stands for it."""


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective of a program failed or timed out. ``blames``: the ranks that did not arrive, if they are known."""

    def __init__(self, message: str, blames: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.blames = tuple(blames)


class OutOfDeviceMemoryError(ShardwiseError, MemoryError, RuntimeError):
    """There is no memory for a value in the layout in which it is needed."""


class ReplicaError(ShardwiseError):
    """Ranks that must hold the same bits of a value do not. ``blames``: those that differ from most."""

    def __init__(self, message: str, blames: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.blames = tuple(blames)


class NotFiniteError(ShardwiseError):
    """The loss, a gradient or a buffer is NaN or infinite."""


class StragglerWarning(UserWarning):
    """All ranks wait for one that is slower than the others."""


class CheckpointError(ShardwiseError):
    """A checkpoint is incomplete or damaged, or cannot be written."""


DOCUMENTATION = "https://shardwise.readthedocs.io/en/stable/"  # from the first release on


def page(name: str) -> str:
    """Return the address of a page of the documentation, and its file in the repository (nothing is published yet)."""
    return f"{DOCUMENTATION}{name}/ (docs/{name}.md in the repository)"


def problem(
    what: str,
    *,
    op: str = "",
    source: str = "",
    fix: str = "",
    facts: Iterable[tuple[str, str]] = (),
    section: Section | None = None,
) -> ErrorText:
    """Lay out the message of an error: what is wrong (with the arithmetic), where, further facts, the fix, and the
    section of docs/errors.md that explains it.

    >>> print(problem("cannot shard dim 1", op="mlp.up", source="model.py:41", fix="pad dim 1 to 32"))
    cannot shard dim 1
      op:     mlp.up (model.py:41)
      fix:    pad dim 1 to 32
    """
    lines, facts = [what], tuple(facts)
    if op or source:
        where = op if not source else f"{op} ({source})" if op else source
        lines.append(f"  op:     {where}")
    lines += [f"  {name + ':':<7} {text}" for name, text in facts]
    if fix:
        lines.append(f"  fix:    {fix}")
    if section:
        lines.append(f"  see:    docs/errors.md#{section}")
    text = ErrorText("\n".join(lines))
    text.what, text.op, text.source, text.fix, text.facts, text.section = what, op, source, fix, facts, section
    return text


_recorded: ContextVar[list[tuple[str, str]] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_warnings() -> Iterator[list[tuple[str, str]]]:
    """Record the warnings of ``warn_user`` in this context, as (class, message); they are raised as usual."""
    warned: list[tuple[str, str]] = []
    token = _recorded.set(warned)
    try:
        yield warned
    finally:
        _recorded.reset(token)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package, and of torch (``nn.Module.__call__``), that led here."""
    if (recorded := _recorded.get()) is not None:
        recorded.append((category.__name__, message))
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("shardwise", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} ... ({len(line):,} characters) ... {line[-_LONGEST_LINE // 4 :]}"


def listed(names: Sequence[object], separator: str = ", ", most: int = 4) -> str:
    """Format the first few of many names.

    >>> print(listed(["a", "b", "c", "d", "e", "f"]))
    a, b, c, d and 2 more
    """
    before = " " if separator == ", " else separator
    more = f"{before}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(map(str, names[:most])) + more


def one_per_line(what: str, faults: Sequence[str]) -> str:
    """Format a sentence and the first few of many faults of one thing."""
    return f"{what}:\n  " + listed(faults, "\n  ", 8)


def name_ranks(ranks: Sequence[int], limit: int | None = _NUM_RANKS) -> str:
    """Format ranks: ``rank 3`` or ``ranks 0, 1, 4``; at most ``limit`` of them (None: all)."""
    shown = ", ".join(map(str, ranks[:limit])) + ", ..." * (limit is not None and len(ranks) > limit)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def caret(text: str, column: int, message: str) -> str:
    """Return ``message`` with ``text`` below it and a caret under ``column`` (counted from 0). If the text is long or
    has several lines, only the surroundings of the column are shown, in ASCII."""
    if len(text) <= 2 * _AROUND and text.isascii() and text.isprintable():
        return f"{message}\n  {text}\n  {' ' * column}^"
    start = max(0, column - _AROUND)
    before, after = (ascii(part)[1:-1] for part in (text[start:column], text[column : column + _AROUND]))
    before = "..." * (start > 0) + before
    after += "..." * (column + _AROUND < len(text))
    where = f" (column {column:,})" if start else ""
    return f"{message}{where}\n  {before}{after}\n  {' ' * len(before)}^"
