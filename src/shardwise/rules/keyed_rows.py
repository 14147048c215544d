"""Rows that are on the devices which own their keys, such as tokens at the experts that they were routed to."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from shardwise.untrusted_text import is_number, shorten_repr

# Rows on the busiest of the devices that own keys, over the mean, where a plan says nothing else (``imbalance=``). A
# keyed layout's text without a number means this one. The fullest expert has about half more tokens than the mean where
# a loss balances them, and .04 more where a bias does (Wang et al., "Auxiliary-loss-free load balancing strategy for
# mixture-of-experts", 2024, arXiv:2408.15664, table 2, "MaxVio"); a device has several experts, whose loads partly
# cancel.
IMBALANCE = 1.2


def keyed(copies: int, imbalance: float = IMBALANCE) -> str:
    """Return the state of a tensor of which every device along an axis holds the rows whose key it owns: which rows
    that are depends on data.

    Args:
        copies: The keys of a row, neighbours in the vector of keys; a device holds a row as often as it owns one of
            them.
        imbalance: The rows that are planned for on the busiest device, over the mean.
    """
    text = f"{imbalance:g}"
    return f"K{copies}" if float(text) == IMBALANCE else f"K{copies}*{text}"


def copies_of(state: object) -> int:
    """Return the keys of a row in a keyed state; 0 for any other state."""
    return int(state[1:].partition("*")[0]) if isinstance(state, str) and state[0] == "K" else 0


def imbalance_of(state: str) -> float:
    """Return the rows that a keyed state plans for on the busiest device, over the mean."""
    return float(state.partition("*")[2] or IMBALANCE)


def imbalance_fault(imbalance: Any) -> str:
    """Return what is wrong with rows on the busiest owner over the mean; empty if nothing is."""
    if not is_number(imbalance):
        return f"imbalance is {shorten_repr(imbalance)}, not a number"
    if imbalance < 1:
        return f"imbalance is {imbalance:g}: the busiest of n owners has at least 1/n of the rows, 1 times the mean"
    return "" if isfinite(imbalance) else f"imbalance is {imbalance}: the busiest of n owners has at most all rows"


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Describes how an operator treats rows that are on the devices that own their keys (``keyed``).

    Attributes:
        operands: Per operand ``"K1"`` or ``"K2"``, ... (its rows follow the keys), ``"R"`` (whole on every device), or
            the factor that the owners of the keys have in parts, such as the experts of a weight.
        results: Per result, likewise.
        keys: The vector of keys, one per row.
        num_keys: How many different keys there are. The devices along an axis own equally many, in order.
        skips: Whether rows of other keys are allowed; the last owner has them.
        copies: The keys of a token, neighbours among ``keys``. They are on the same device before their rows travel.
        imbalance: The rows that are planned for on the busiest owner, over the mean.
        is_first: Whether its operands are what travels: rows reach it before all others that follow these keys.
        behind: Of a product by expert, the operator that mixes rows between it and the one before, for which rows
            return.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    keys: str = field(default="", compare=False)  # layers differ in nothing else
    num_keys: int = 1
    skips: bool = False
    copies: int = 1
    imbalance: float = IMBALANCE
    is_first: bool = False
    behind: str = field(default="", compare=False)

    @property
    def owned(self) -> str | None:
        """Return the factor whose parts own the keys, if the operator has it."""
        return next((where for where in self.operands if where != "R" and where[0] != "K"), None)
