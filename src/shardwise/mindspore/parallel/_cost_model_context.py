"""What programs tell the reference's search about its cost model: nothing is kept, as prices are the cluster's."""

from __future__ import annotations

from typing import Any

from shardwise.mindspore.notes import note


def set_cost_model_context(**settings: Any) -> None:
    """Taken, with a note: prices are those of the cluster."""
    note(f"set_cost_model_context({', '.join(settings)}) has no effect here: prices are those of the cluster")


def reset_cost_model_context() -> None:
    """Kept for programs that call it: nothing was set."""


def _set_multi_subgraphs(multi_subgraph: bool = True) -> None:
    """Kept for programs that call it: a network is one graph, of any number of parts."""
