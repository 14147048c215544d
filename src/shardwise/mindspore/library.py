"""What the dialect uses of the library besides its public names. Only this file imports private modules.

``Layout`` is public in ``sw.results``, which would load a hundred modules of reports.
"""

from shardwise.graph.capture import capture
from shardwise.graph.exported import load_exported, save_exported
from shardwise.graph.ir import Graph, Op, Ref, Source, map_refs
from shardwise.graph.to_float64 import in_reference_mode
from shardwise.graph.trees import leaf_name
from shardwise.launch import ranks
from shardwise.layouts.boxes import Box, boxes
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.strategy import apply_strategy
from shardwise.layouts.text import format_layout, parse_layout
from shardwise.plans.bind import bind
from shardwise.programs.buckets import BUCKET_BYTES, Bucket
from shardwise.programs.micro_batches import APART
from shardwise.programs.moves import OverlapPart, local_move
from shardwise.programs.program import LocalOp, LocalProgram, localize
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion
from shardwise.rules.binding import leading_names
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.communicator import backend_of, gather_tensor, group_of_members, scatter_tensor
from shardwise.runtime.cpu_embedding import device_of
from shardwise.runtime.guards.norms import total_norm
from shardwise.runtime.guards.registry import held_parameters
from shardwise.runtime.hooks import MARKS
from shardwise.runtime.local_shards import shard
from shardwise.search.user_strategies import axes_of_counts

__all__ = [
    "APART", "BUCKET_BYTES", "MARKS", "Atom", "Box", "Bucket", "Conversion", "Graph", "Layout", "LocalOp",
    "LocalProgram", "Move", "Op", "OverlapPart", "Ref", "Source", "SpmdProgram", "apply_strategy",
    "axes_of_counts", "backend_of", "bind", "boxes", "capture", "device_of", "format_layout",
    "from_rank_zero", "gather_tensor", "group_of_members", "held_parameters", "in_reference_mode", "leading_names",
    "leaf_name", "load_exported", "local_move", "localize", "map_refs", "parse_layout", "ranks",
    "save_exported", "scatter_tensor", "shard", "total_norm",
]  # fmt: skip
