"""Attention masks as one interval of keys per query: two numbers per query, where booleans take one per key.

Nearly every mask that models build is of this kind, whatever the operators that build it. Query q sees lo[q] <= k <
hi[q]:

    causal           [0, q + 1)                 sliding window   [q - w + 1, q + 1)
    full             [0, K)                     prefix           [0, max(q + 1, p))
    chunks           [c floor(q / c), q + 1)    packed documents [start of q's document, q + 1)

The intersection of two is always one. Their union or difference is one only if no query is left with two pieces;
otherwise the result is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """The keys lo[q] <= k < hi[q] that each query sees, int64 of shape [queries]; 0 and 0 if it sees none."""

    lo: Tensor
    hi: Tensor
    num_keys: int

    @staticmethod
    def of(lo: Tensor, hi: Tensor, num_keys: int) -> Intervals:
        lo, hi = lo.clamp(0, num_keys), hi.clamp(0, num_keys)
        some = lo < hi
        return Intervals(torch.where(some, lo, 0), torch.where(some, hi, 0), num_keys)

    def equals(self, other: Intervals) -> bool:
        lo, hi = torch.equal(self.lo, other.lo), torch.equal(self.hi, other.hi)
        return self.num_keys == other.num_keys and lo and hi

    @property
    def is_full(self) -> bool:
        return bool(((self.lo == 0) & (self.hi == self.num_keys)).all())

    @property
    def sees_none(self) -> Tensor:
        """Return per query whether it sees no key."""
        return self.lo == self.hi

    @property
    def is_causal(self) -> bool:
        """Return whether query q sees the keys up to q, with as many queries as keys."""
        num_queries = len(self.lo)
        causal = torch.arange(1, num_queries + 1)
        return num_queries == self.num_keys and not self.lo.any() and torch.equal(self.hi, causal)

    def intersection(self, other: Intervals) -> Intervals:
        return Intervals.of(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi), self.num_keys)

    def union(self, other: Intervals) -> Intervals | None:
        """Return the union, or None unless it is one interval per query."""
        lo, hi = torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi)
        disjoint = torch.maximum(self.lo, other.lo) > torch.minimum(self.hi, other.hi)
        first, second = self.sees_none, other.sees_none
        if bool((disjoint & ~first & ~second).any()):
            return None
        lo = torch.where(first, other.lo, torch.where(second, self.lo, lo))
        hi = torch.where(first, other.hi, torch.where(second, self.hi, hi))
        return Intervals.of(lo, hi, self.num_keys)

    def without(self, other: Intervals) -> Intervals | None:
        """Return the difference to ``other``, or None unless it is one interval per query."""
        taken = self.intersection(other)
        from_start, to_end = taken.lo == self.lo, taken.hi == self.hi
        if bool((~from_start & ~to_end & ~taken.sees_none).any()):
            return None
        lo = torch.where(taken.sees_none | ~from_start, self.lo, taken.hi)
        hi = torch.where(taken.sees_none | from_start, self.hi, taken.lo)
        return Intervals.of(lo, hi, self.num_keys)

    def complement(self) -> Intervals | None:
        return self.every().without(self)

    def every(self) -> Intervals:
        """Return intervals of all keys for the same number of queries."""
        zero = torch.zeros_like(self.lo)
        return Intervals(zero, zero + self.num_keys, self.num_keys)

    def part(self, queries: slice, keys: slice) -> Intervals:
        """Restrict to some of the queries and to contiguous keys."""
        assert keys.step == 1, "the keys of an interval that are apart"
        first, last = int(keys.start), int(keys.stop)
        lo, hi = self.lo[queries].clamp(first, last) - first, self.hi[queries].clamp(first, last) - first
        return Intervals.of(lo, hi, last - first)
