"""The exception tree: everything a user can mend is a ``ShardwiseError``.

::

    ValueError
      ShardwiseError
        CaptureError      the model cannot be turned into a graph
        NotationError     a rule, strategy, layout or mesh text does not parse (points at the column)
        LayoutError       a layout or a strategy does not fit the tensor, the operator or the mesh
        PlanError         a plan file or a plan does not fit the model, mesh, inputs or version
        LaunchError       ranks cannot be started, or do not agree

Every message says what is wrong, where, the arithmetic and the fix; ``problem`` builds that shape.
"""

from __future__ import annotations


class ShardwiseError(ValueError):
    """Something the user can mend."""


class CaptureError(ShardwiseError):
    """The model cannot be captured as a graph."""


class NotationError(ShardwiseError):
    """A text in one of shardwise's notations does not parse."""


class LayoutError(ShardwiseError):
    """A layout or a strategy does not fit."""


class PlanError(ShardwiseError):
    """A plan does not fit."""


class LaunchError(ShardwiseError):
    """Ranks cannot be started, or do not agree."""


def problem(what: str, *, op: str = "", source: str = "", fix: str = "") -> str:
    """The message layout of every error: what (with the arithmetic), where, and the fix.

    >>> print(problem("cannot shard dim 1", op="mlp.up", source="model.py:41", fix="pad dim 1 to 32"))
    cannot shard dim 1
      op:     mlp.up (model.py:41)
      fix:    pad dim 1 to 32
    """
    lines = [what]
    if op or source:
        where = op if not source else f"{op} ({source})" if op else source
        lines.append(f"  op:     {where}")
    if fix:
        lines.append(f"  fix:    {fix}")
    return "\n".join(lines)


def caret(text: str, column: int, message: str) -> str:
    """``message`` with ``text`` beneath it and a caret under ``column`` (counted from 0)."""
    return f"{message}\n  {text}\n  {' ' * column}^"
