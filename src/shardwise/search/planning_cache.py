"""What planning has computed, by everything that decides it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from shardwise.programs.vjp import VjpCache

Result = TypeVar("Result")


class PlanningCache:
    """Results of planning, in tables by name. Stages, cuts, memory policies and meshes of one configuration share them.

    A key has everything that decides a result, and no names where parts of a model share it.

    Attributes:
        call: The cache of the call, which its configurations share: its keys have the mesh and the prices too. By
            default this one.
        vjp_cache: The calls that were traced, shared likewise.
    """

    def __init__(self, call: PlanningCache | None = None) -> None:
        self.call: PlanningCache = self if call is None else call.call
        self.vjp_cache: VjpCache = VjpCache() if call is None else call.vjp_cache
        self._tables: dict[Hashable, dict[Any, Any]] = {}

    def table(self, *name: Hashable) -> dict[Any, Any]:
        """Return a table, to which the caller adds."""
        return self._tables.setdefault(name, {})

    def get(self, name: Hashable, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result of a key in a table; ``compute`` makes it the first time."""
        table: dict[Hashable, Result] = self.table(name)
        if key not in table:
            table[key] = compute()
        return table[key]
