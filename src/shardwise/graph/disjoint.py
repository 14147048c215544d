"""Disjoint sets, joined incrementally."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class DisjointSets(Generic[Member]):
    """Union-find (Galler and Fischer 1964): joined members have the same ``root``. A new member is a set of its own."""

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def root(self, member: Member) -> Member:
        """Return the representative of the member's set."""
        parent = self._parent
        while parent.setdefault(member, member) != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    def join(self, first: Member, second: Member) -> None:
        """Join two sets; the second one's root becomes the root of both."""
        self._parent[self.root(first)] = self.root(second)

    def roots(self) -> dict[Member, Member]:
        """Return a map from every member seen so far to its root."""
        return {member: self.root(member) for member in list(self._parent)}
