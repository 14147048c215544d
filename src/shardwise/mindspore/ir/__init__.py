"""Programs of a split cell as text in the reference's format: ``set_context(save_graphs=1)``.

Two files per program and rank are written to ``<save_graphs_path>/rank_<rank>/``. ``step_parallel_begin_<number>.ir``
is the whole graph with the strategy of every operator. ``18_execute_<number>.ir`` is the program of this rank, with its
local shapes and its collectives. ``save_graphs=3`` also writes the plan as JSON.
"""

from shardwise.mindspore.ir.files import save

__all__ = ["save"]
