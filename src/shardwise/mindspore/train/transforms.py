"""Conversion of ranks' checkpoints to other layouts. The strategy files of both sides are plans, and checkpoints
contain their layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import listed, problem
from shardwise.mindspore.holding import Held, boxes_of, held_by
from shardwise.mindspore.library import Box, shard
from shardwise.mindspore.train.serialization import Slice, entry_of, joined_files, of_parts, write


def build_searched_strategy(strategy_filename: str) -> sw.Plan:
    """Return the plan of a strategy file that ``strategy_ckpt_save_file`` wrote."""
    return sw.Plan.load(strategy_filename)


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str) -> None:
    """Merge the strategy files of a pipeline's ranks into one. Each has all stages here, so they must be equal."""
    files = sorted(path for path in Path(src_strategy_dirs).glob("*") if path.is_file())
    plans = {path: sw.Plan.load(path) for path in files}
    if len({plan.digest for plan in plans.values()}) != 1:
        what = (
            f"{src_strategy_dirs} has {len({plan.digest for plan in plans.values()})} strategies in {len(files)} files"
        )
        raise ValueError(problem(what, fix="a folder with the files of one job"))
    Path(dst_strategy_file).parent.mkdir(parents=True, exist_ok=True)
    plans[files[0]].save(dst_strategy_file)


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """Return the ranks whose files together have what rank ``rank_id`` of the other side needs. Without a strategy file
    a side has whole tensors in one file."""
    if src_strategy_file is None:
        return [0]
    source, target = _holdings(src_strategy_file), _holdings(dst_strategy_file)
    needed: set[int] = set()
    for path, holding in source.items():
        target_boxes = boxes_of(_matching(path, target) if target else None, rank_id, holding)
        covered: set[tuple[Box, ...]] = set()
        for rank in holding.ranks:
            parts = boxes_of(holding, rank, holding)
            if parts not in covered and any(a.common(b.offsets, b.sizes) for a in parts for b in target_boxes):
                covered.add(parts)
                needed.add(rank)
    return sorted(needed)


def transform_checkpoint_by_rank(
    rank_id: int, checkpoint_files_map: Mapping[int, str], save_checkpoint_file_name: str,
    src_strategy_file: str | None = None, dst_strategy_file: str | None = None,
) -> None:  # fmt: skip
    """Write the file of one rank of the target side from the files of the source side, given by their ranks. Raises
    RuntimeError if a part is missing."""
    if not save_checkpoint_file_name.endswith(".ckpt"):
        raise ValueError(problem(f"the file is {save_checkpoint_file_name!r}", fix="a name that ends with .ckpt"))
    whole, info = joined_files([checkpoint_files_map[rank] for rank in sorted(checkpoint_files_map)])
    _write_part(whole, info, rank_id, Path(save_checkpoint_file_name), _holdings(dst_strategy_file))


def transform_checkpoints(
    src_checkpoints_dir: str, dst_checkpoints_dir: str, ckpt_prefix: str, src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None, process_num: int = 1, output_format: str = "ckpt",
) -> None:  # fmt: skip
    """Convert the newest files in ``rank_0``, ``rank_1``, ... for the ranks of ``dst_strategy_file``:
    ``<dst>/rank_<i>/<ckpt_prefix><i>.ckpt``; without it to one whole file in ``rank_0``. ``process_num`` has no effect.
    Raises RuntimeError if a part is missing."""
    if output_format != "ckpt":
        raise NotImplementedError(problem(f"output_format={output_format!r}", fix="ckpt; sw.save_pretrained writes "
                                          "safetensors"))  # fmt: skip
    folders = [path for path in Path(src_checkpoints_dir).glob("rank_*") if path.name[5:].isdigit()]
    newest = {int(folder.name[5:]): max(folder.glob("*.ckpt"), key=lambda file: (file.stat().st_mtime_ns, file.name))
              for folder in folders if any(folder.glob("*.ckpt"))}  # fmt: skip
    missing = sorted(set(range(_ranks(src_strategy_file))) - newest.keys())
    if not newest or missing:
        what = f"{src_checkpoints_dir} has files of the ranks {sorted(newest)}" + (
            f", not of {listed(list(map(str, missing)))}" if missing else ""
        )
        raise ValueError(problem(what, fix="a folder rank_<i> with a file for every rank"))
    whole, info = joined_files([str(newest[rank]) for rank in sorted(newest)])
    holdings = _holdings(dst_strategy_file)
    for number in range(_ranks(dst_strategy_file) or 1):
        path = Path(dst_checkpoints_dir) / f"rank_{number}" / f"{ckpt_prefix}{number}.ckpt"
        _write_part(whole, info, number, path, holdings)


def _write_part(
    whole: dict[str, Slice], info: dict[str, Any], number: int, path: Path, holdings: dict[str, Held]
) -> None:
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in whole.items():
        holding = _matching(tensor.path, holdings) if tensor.dim() and holdings else None
        if holding is not None and holding.shape != tuple(tensor.shape):
            holding = None  # a state whose shape differs from its parameter's
        if holding is not None and number not in holding.ranks:
            continue
        part = tensor.detach().as_subclass(torch.Tensor)
        if holding is not None:
            part = shard(part, holding.layout, holding.coordinates(number))
        entries[name] = entry_of(part, holding) | ({"state": True} if tensor.is_state else {}) | {"path": tensor.path}
    write(path, entries, info, number)


def _ranks(strategy: str | None) -> int:
    return 0 if strategy is None else sw.Plan.load(strategy).num_ranks


def restore_group_info_list(ckpt_file_name: str) -> list[int]:
    """Return the ranks in the file of ``group_ckpt_save_file`` (or of the environment's GROUP_INFO_FILE)."""
    return [int(rank) for rank in json.loads(Path(ckpt_file_name).read_text())]


def _holdings(strategy: str | None) -> dict[str, Held]:
    return {} if strategy is None else held_by(sw.Plan.load(strategy))


def _matching(path: str, holdings: dict[str, Held]) -> Held:
    """Return the distribution of a parameter in a plan. Raises ValueError if there is none."""
    if path not in holdings:
        near = listed(sorted(holdings)[:4])
        what = f"the strategy file has no parameter {path}, but {near} and so on"
        raise ValueError(problem(what, fix="the strategy file of the network that was saved"))
    return holdings[path]


def merge_sliced_parameter(sliced_parameters: Sequence[Slice], strategy: Any = None) -> torch.Tensor:
    """Join a parameter from its slices, which ``load_checkpoint`` read, in the order of their ranks. ``strategy`` is
    not needed, as each slice contains its layout."""
    ranks = holding.ranks if (holding := sliced_parameters[0].held) else range(len(sliced_parameters))
    name = sliced_parameters[0].name
    return of_parts(name, [({name: part}, {}, at) for part, at in zip(sliced_parameters, ranks, strict=False)])


__all__ = [
    "build_searched_strategy", "merge_pipeline_strategys", "merge_sliced_parameter", "rank_list_for_transform",
    "restore_group_info_list", "transform_checkpoint_by_rank", "transform_checkpoints",
]  # fmt: skip
