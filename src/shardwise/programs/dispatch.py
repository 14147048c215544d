"""Rows that are sorted by expert and put back: the part of a mixture of experts that sees all samples at once, and
computes every row by itself all the same.

From the sort of the experts' numbers on, values are followed by what they are: rows in the sorted order, the order
itself (which row stands where), indices of the tokens in that order, its inverse, or counts of all rows. An operator
that treats every sorted row alike keeps them sorted rows; one that takes rows by the inverse gives them back. Where all
operators of such a part are of these kinds, a pass over some samples is the whole part for these samples: their rows
are sorted among themselves, and each is computed as before.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.operators import STREAMS
from shardwise.graph.schema import arguments, is_random
from shardwise.layouts.choice import Place, Where
from shardwise.rules.atoms import Factored

aten = torch.ops.aten

LOCAL = "local"  # where a value is that a pass makes for its own samples

_Role = Literal["sorted", "keys", "order", "tokens", "inverse", "counts", "blank"]
_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_BLANKS = (aten.empty_like.default, aten.zeros_like.default)
_COUNTS = (aten.histc.default, aten.bincount.default)
_CASTS = (aten.to.dtype, aten._to_copy.default)
_QUOTIENTS = (aten.floor_divide.default, aten.div.Scalar_mode, aten.div.Tensor_mode)


@dataclass(frozen=True, slots=True)
class _Sort:
    """The sort that a part begins with. ``keys``: what is sorted; ``rows``: where the rows are, in the order of the
    samples."""

    op: str
    keys: str
    rows: Place
    descends: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """What a value is, in the order of a sort. ``keys`` are what was sorted, ascending; of ``tokens``: how many rows of
    one stand together."""

    role: _Role
    sort: _Sort
    each: int = 1


@dataclass
class Dispatch:
    """Follows values through such parts of a graph. ``where``: of every value so far, which gets those of results;
    ``operators``: those of the parts."""

    graph: Graph
    factored: Factored
    where: MutableMapping[str, Where]
    operators: set[str] = field(default_factory=set)
    known: dict[str, _Known] = field(default_factory=dict)

    def begins(self, op: Op) -> bool:
        """Whether an operator sorts the rows of all samples; then it is the first of a part."""
        if op.target not in _SORTS or not op.operands:
            return False
        name = op.operands[0]
        place, shape = self.where[name], self.graph.by_name[name].shape
        if not isinstance(place, Place) or len(shape) != 1 or place.stride * place.size != shape[0]:
            return False
        sort = _Sort(op.name, name, place, bool(arguments(op).get("descending")))
        values: _Role = "sorted" if sort.descends else "keys"
        roles: tuple[_Role, ...] = ("order",) if "argsort" in str(op.target) else (values, "order")
        self._set(op, [_Known(role, sort) for role in roles])
        return True

    def follows(self, op: Op) -> bool:
        """Whether an operator belongs to a part; then it is followed. False, too, where it reads from one and may mix
        its rows: ``reads``."""
        owners = [self.known[name] for name in op.operands if name in self.known]
        if not owners or len({own.sort for own in owners}) > 1 or is_random(op.target) or op.target in STREAMS:
            return False  # numbers are drawn by where an element is among all samples
        found = self._made(op, owners[0].sort)
        if found is None:
            return False
        if isinstance(found, Place):
            self.operators.add(op.name)
            self.where.update(dict.fromkeys(op.results, found))
        else:
            self._set(op, [found] * len(op.results))
        return True

    def reads(self, op: Op) -> bool:
        """Whether an operator reads a value of such a part."""
        return any(name in self.known for name in op.operands)

    def _set(self, op: Op, known: list[_Known]) -> None:
        self.operators.add(op.name)
        self.known.update(zip(op.results, known, strict=True))
        self.where.update(dict.fromkeys(op.results, LOCAL))

    def _made(self, op: Op, sort: _Sort) -> _Known | Place | None:
        """What the results of an operator are: something in the part, or rows in the order of the samples; None: not
        known."""
        call = arguments(op)
        roles = [self._role(name) for name in op.operands]
        count = sort.rows.stride * sort.rows.size
        first = roles[0] if roles else None
        if op.target in _SORTS and first == "order":
            inverts = "argsort" in str(op.target) and not call.get("descending")
            return _Known("inverse", sort) if inverts else None
        if op.target in _QUOTIENTS and first == "order" and isinstance(op.args[1], int):
            return _Known("tokens", sort, op.args[1]) if call.get("rounding_mode", "floor") == "floor" else None
        if op.target in _BLANKS and first == "order":
            return _Known("blank", sort)
        if op.target in _COUNTS and first == "keys":
            return _Known("counts", sort)
        if op.target in _CASTS and first == "keys":
            return _Known("keys", sort)
        if op.target in (aten.index.Tensor, aten.index_select.default):
            return self._taken(op, sort)
        if op.target is aten.index_put.default:
            base, at, values = op.operands[0], op.args[1], op.operands[-1]
            by_order = isinstance(at, tuple) and len(at) == 1 and self._is(op.operands[1], "order")
            puts = by_order and self._is(base, "blank") and self._counts_to(values, count)
            return _Known("inverse", sort) if puts else None
        if op.target is aten.index_add.default:
            return self._added(op, sort)
        if op.target is grouped_mm._opoverload:
            return _Known("sorted", sort) if roles == ["sorted", None, "counts"] and self._is_same(op, 1) else None
        return self._alike(op, roles, sort)

    def _taken(self, op: Op, sort: _Sort) -> _Known | Place | None:
        """Rows by an index on dim 0."""
        rows = sort.rows
        index = op.args[1] if op.target is aten.index.Tensor else op.args[2]
        if isinstance(index, tuple):
            index = index[0] if len(index) == 1 else None
        if not isinstance(index, Ref) or (op.target is aten.index_select.default and op.args[1] != 0):
            return None
        name, by = op.operands[0], self.known.get(index.name)
        if by is None:
            return None
        if by.role == "inverse" and self._is(name, "sorted"):
            return rows
        if by.role == "order" and name == sort.keys and not sort.descends:
            return _Known("keys", sort)
        place = self.where[name]
        of_tokens = by.role in ("order", "tokens") and isinstance(place, Place)
        if of_tokens and place == Place(0, rows.stride // by.each, rows.size) and rows.stride % by.each == 0:
            return _Known("sorted", sort)
        return None

    def _added(self, op: Op, sort: _Sort) -> Place | None:
        """Sorted rows that are added to those of their tokens."""
        rows = sort.rows
        base, at, added = op.operands[:3]
        by = self.known.get(at)
        if op.args[1] != 0 or by is None or by.role not in ("order", "tokens") or not self._is(added, "sorted"):
            return None
        of_tokens = Place(0, rows.stride // by.each, rows.size)
        return of_tokens if rows.stride % by.each == 0 and self.where[base] == of_tokens else None

    def _alike(self, op: Op, roles: list[_Role | None], sort: _Sort) -> _Known | None:
        """Operators that do with every row the same, or make counts of counts."""
        others = [i for i, role in enumerate(roles) if role is None]
        if not all(self._is_same(op, i) for i in others):
            return None
        given = {role for role in roles if role is not None}
        if given == {"counts"}:
            return _Known("counts", sort)
        if not given <= {"sorted", "keys"} or op.name not in self.factored.rules:
            return None
        rule = self.factored.rules[op.name]
        kinds = {factor.name: factor.kind for factor in rule.factors}
        of_rows = {rule.operands[i][0] for i, role in enumerate(roles) if role is not None and rule.operands[i]}
        if len(of_rows) != 1 or any(not dims for dims in rule.results):
            return None
        (factors,) = of_rows
        elsewhere = {f for dims in (*rule.operands, *rule.results) for dim in dims[1:] for f in dim}
        elsewhere |= {f for i in others for dim in rule.operands[i] for f in dim}
        alike = all(kinds[f] == "parallel" and f not in elsewhere for f in factors)
        return _Known("sorted", sort) if alike and all(dims[0] == factors for dims in rule.results) else None

    def _role(self, name: str) -> _Role | None:
        return self.known[name].role if name in self.known else None

    def _is(self, name: str, role: _Role) -> bool:
        return self._role(name) == role

    def _is_same(self, op: Op, position: int) -> bool:
        """Whether an operand is the same in every pass."""
        return self.where[op.operands[position]] == "I"

    def _counts_to(self, name: str, count: int) -> bool:
        """Whether a value is 0, 1, 2, ... up to a count. What makes it becomes part of the part: a pass has fewer."""
        op = self.graph.producer.get(name)
        if op is None or op.target is not aten.arange.default or op.args != (count,):
            return False
        if len(self.graph.consumers[name]) > 1:
            return False
        self.operators.add(op.name)
        self.where[name] = LOCAL
        return True
