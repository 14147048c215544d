"""Disjoint sets, which are joined as it turns out what belongs together."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class DisjointSets(Generic[Member]):
    """Union-find (Galler and Fischer 1964): two members that were joined have the same ``root``. Whoever is asked
    for first is a set of its own."""

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def root(self, member: Member) -> Member:
        """The member that stands for the set."""
        parent = self._parent
        while parent.setdefault(member, member) != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    def join(self, first: Member, second: Member) -> None:
        """Make one set of two; the second one's root stands for it."""
        self._parent[self.root(first)] = self.root(second)

    def roots(self) -> dict[Member, Member]:
        """Every member that was asked for -> its root."""
        return {member: self.root(member) for member in list(self._parent)}
