"""Settings of the reference's cost model. They have no effect, as prices are those of the cluster."""

from __future__ import annotations

from typing import Any

from shardwise.mindspore.notes import note


def set_cost_model_context(**settings: Any) -> None:
    """Print a note: prices are those of the cluster."""
    note(f"set_cost_model_context({', '.join(settings)}) has no effect here: prices are those of the cluster")


def reset_cost_model_context() -> None:
    """Do nothing; kept for programs that call it, as nothing was set."""


def _set_multi_subgraphs(multi_subgraph: bool = True) -> None:
    """Do nothing; kept for programs that call it. A network is one graph, of any number of parts."""
