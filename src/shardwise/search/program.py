"""The program of a choice."""

from __future__ import annotations

from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.programs.spmd import Spmd, build_spmd
from shardwise.rules.atoms import Factored
from shardwise.search.modes import Choice


def build_program(
    graph: Graph, factored: Factored, choice: Choice, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES
) -> Spmd:
    """What all ranks run under a choice. ``bucket_bytes``: the largest message that several parameters share."""
    return build_spmd(
        graph,
        factored.rules,
        choice.strategies,
        choice.sources,
        mesh,
        bucket_bytes=bucket_bytes,
        route=choice.router,
        shared=choice.shared,
    )
