"""The last message in torch's flight recorder for this process, including messages that the user's script sends.

Torch records the last messages of every process group, with gloo and with NCCL, unless ``TORCH_FR_BUFFER_SIZE=0``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from shardwise.graph.origins import NOT_USER_CODE


def last_message() -> str:
    """Describe the first message under way, else the last one, which may have failed; "" if nothing is recorded.
    Example: ``gloo:all_reduce of Float [3], number 17 of process group 0, called in train.py:40, under way``."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    entries: list[dict[str, Any]] = pickle.loads(dump()).get("entries", []) if dump is not None else []
    if not entries:
        return ""
    entry = next((recorded for recorded in entries if _is_under_way(recorded)), entries[-1])
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    sizes = ", ".join(f"{dtype} {size}" for dtype, size in pairs) or "nothing"
    frames = (frame for frame in entry.get("frames", ()) if not frame["filename"].startswith(NOT_USER_CODE))
    where = next((f", called in {Path(frame['filename']).name}:{frame['line']}" for frame in frames), "")
    number, group = entry["collective_seq_id"] or entry["p2p_seq_id"], entry["process_group"][0]
    under_way = ", under way" if _is_under_way(entry) else ""
    return f"{entry['profiling_name']} of {sizes}, number {number} of process group {group}{where}{under_way}"


def _is_under_way(entry: dict[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


__all__ = ["last_message"]
