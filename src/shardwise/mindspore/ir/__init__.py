"""The programs of a split cell as text, in the reference's format: ``set_context(save_graphs=1)``.

Two files per program and rank in ``<save_graphs_path>/rank_<rank>/``: ``step_parallel_begin_<number>.ir``, the whole
graph with the strategy of every operator, and ``18_execute_<number>.ir``, what this rank runs, with the shapes that it
holds and its collectives. With ``save_graphs=3`` the plan too, as JSON.
"""

from shardwise.mindspore.ir.files import save

__all__ = ["save"]
