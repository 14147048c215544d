"""The factor notation: ``"b m k, b k n -> b m n"``.

Tensors are separated by commas, the dims of a tensor by blanks. A dim is

* a factor (``m``, ``head_dim``),
* a product of factors in parentheses, major first (``(h d)``),
* ``1``: a dim of size 1 that is broadcast, or
* ``...``: any number of leading dims; they become the factors ``b`` (one dim) or ``b0 b1 ...`` (several).

``()`` standing alone is a scalar. Nothing at all before the arrow means no operands (``"-> m n"`` is a constructor).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from shardwise.errors import NotationError, caret
from shardwise.rules.rule import Dims
from shardwise.untrusted_text import check_notation, shorten_repr

ELLIPSIS = "..."
_MOST_CHARACTERS = 2**12  # of a rule
_TOKEN = re.compile(r"\s*(->|\.\.\.|[a-z_][a-z_0-9]*|1|[(),]|$)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule text. The ellipsis is the dim ``("...",)``; a broadcast dim is ``()``."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]

    def __str__(self) -> str:
        sides = (", ".join(map(format_dims, self.operands)), ", ".join(map(format_dims, self.results)))
        return " ".join(part for part in (sides[0], "->", sides[1]) if part)


def format_dims(dims: Dims) -> str:
    """One tensor in the notation.

    >>> format_dims((("m",), ("h", "d"), ()))
    'm (h d) 1'
    """
    if not dims:
        return "()"
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1" for dim in dims)


def parse_rule(text: str) -> Pattern:
    """Parse ``"m k, k n -> m n"``. Raises NotationError with a caret under the offending column."""
    reader = _TokenCursor(check_notation(text, "a rule reads m k, k n -> m n", _MOST_CHARACTERS))
    operands = reader.tensors(stop="->")
    reader.expect("->")
    results = reader.tensors(stop="")
    for dims in (*operands, *results):
        for name, count in Counter(name for dim in dims for name in dim).items():
            if count > 1:
                what = f"{shorten_repr(name)} appears twice in the tensor {format_dims(dims)[:60]}"
                raise NotationError(caret(text, text.find(name), what))
    if not results:
        raise NotationError(caret(text, len(text), "a rule needs at least one result (a scalar is written ())"))
    return Pattern(operands, results)


class _TokenCursor:
    """A cursor over the tokens of one text."""

    __slots__ = ("_next", "column", "text", "token")

    def __init__(self, text: str) -> None:
        self.text = text
        self._next = 0
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self._next)
        if match is None:
            column = len(self.text) - len(self.text[self._next :].lstrip())
            raise NotationError(caret(self.text, column, f"unexpected {self.text[column]!r}"))
        self.token, self.column, self._next = match.group(1), match.start(1), match.end()

    def fail(self, message: str) -> NotationError:
        return NotationError(caret(self.text, self.column, message))

    def expect(self, token: str) -> None:
        if self.token != token:
            here = repr(self.token) if self.token else "the end"
            raise self.fail(f"expected {token!r}, found {here}")
        self.advance()

    def tensors(self, stop: str) -> tuple[Dims, ...]:
        if self.token == stop:
            return ()
        parsed = [self.tensor(stop)]
        while self.token == ",":
            self.advance()
            parsed.append(self.tensor(stop))
        if self.token != stop:
            raise self.fail(f"unexpected {self.token!r}" if self.token else "the arrow -> is missing")
        return tuple(parsed)

    def tensor(self, stop: str) -> Dims:
        dims: list[tuple[str, ...]] = []
        while self.token not in (",", stop, "->", ""):
            if self.token == "(":
                self.advance()
                if self.token == ")" and not dims:
                    self.advance()
                    if self.token not in (",", stop):
                        raise self.fail("() is a scalar: nothing may follow it")
                    return ()
                dims.append(self.group())
            elif self.token == ELLIPSIS and dims:
                raise self.fail("... stands for leading dims: it comes first")
            elif self.token == ")":
                raise self.fail("unbalanced )")
            else:
                dims.append(() if self.token == "1" else (self.token,))
                self.advance()
        if not dims:
            raise self.fail("an empty tensor (a scalar is written ())")
        return tuple(dims)

    def group(self) -> tuple[str, ...]:
        names: list[str] = []
        while self.token != ")":
            if not re.match(r"[a-z_]", self.token):
                here = repr(self.token) if self.token else "the end"
                raise self.fail(f"expected a factor inside the parentheses, found {here}")
            names.append(self.token)
            self.advance()
        if len(names) < 2:
            raise self.fail("a product has two factors or more")
        self.advance()
        return tuple(names)
