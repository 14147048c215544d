"""The options of ``set_auto_parallel_context``, ``set_algo_parameters`` and ``set_cost_model_context``: defaults,
checks and meaning.

An option either works, or accepts only its default (``checks.option``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil
from typing import Any

from shardwise import Zero, rank, world_size
from shardwise.errors import problem
from shardwise.mindspore.checks import (
    Check,
    checks_of,
    entries,
    flag,
    fraction,
    known_name,
    note,
    number,
    one_of,
    option,
    positive,
    text,
    whole,
)  # fmt: skip
from shardwise.mindspore.library import BUCKET_BYTES
from shardwise.mindspore.named import TABLES

DATA_PARALLEL, FULL_BATCH = "data_parallel", "full_batch"  # values of dataset_strategy
DatasetStrategy = str | tuple[tuple[int, ...], ...]
MEGABYTE = 2**20
SEARCH_MODES = ("sharding_propagation", "dynamic_programming", "recursive_programming")
PIPELINE_CONFIG = {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}
OPTIMIZER_CONFIG = {
    "gradient_accumulation_shard": False, "parallel_optimizer_threshold": 64, "optimizer_weight_shard_size": -1,
    "optimizer_level": "level1",
}  # fmt: skip
CKPT_CONFIG = {"load_file": "", "save_file": "", "only_trainable_params": True}  # a plan contains both


class _Modes(type):
    def __getattr__(cls, name: str) -> str:
        modes = [mode for mode in vars(cls) if mode.isupper() and mode != "MODE_LIST"]
        near = get_close_matches(name.upper(), modes, n=1)
        fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(modes)}"
        raise AttributeError(problem(f"ParallelMode has no mode {name}", fix=fix))


class ParallelMode(metaclass=_Modes):
    """Parallel modes: no split, the batch only, by hand, by the program's strategies, or by the search."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


def _dataset_strategy(name: str, value: Any) -> DatasetStrategy:
    if isinstance(value, str):
        return str(one_of(DATA_PARALLEL, FULL_BATCH)(name, value))
    if not isinstance(value, Sequence) or not all(isinstance(counts, Sequence) for counts in value):
        fix = 'give "data_parallel", "full_batch" or a tuple for every input, ((8, 1), (8,))'
        raise TypeError(problem(f"{name} is {value!r}", fix=fix))
    count = whole(1, 4096)
    return tuple(
        tuple(count(f"{name}[{i}][{d}]", number) for d, number in enumerate(counts)) for i, counts in enumerate(value)
    )


def _indices(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(problem(f"{name} is {value!r}", fix="give a list of indices, [20, 35]"))
    checked = tuple(whole(0, 2**31)(f"{name}[{i}]", index) for i, index in enumerate(value))
    if list(checked) != sorted(set(checked)):
        raise ValueError(problem(f"{name} is {value!r}, whose indices do not ascend", fix="give each once, in order"))
    return checked


def _fusion(name: str, value: Any) -> dict[str, Any]:
    """Check one entry of comm_fusion: {"mode": "auto" | "size" | "index", "config": None, MiB or indices}."""
    checks: dict[str, Check] = {"mode": one_of("auto", "size", "index"), "config": lambda _, config: config}
    setting = entries(checks)(name, value)
    mode, config = setting.get("mode", "auto"), setting.get("config")
    if mode == "auto":
        if config is not None:
            raise ValueError(problem(f'{name} has the mode "auto" and the config {config!r}', fix="leave config None"))
        return {"mode": mode}
    check: Check = whole(0, 2**20) if mode == "size" else _indices
    return {"mode": mode, "config": check(f"{name}['config']", config)}


def _scheduler(name: str, value: Any) -> str:
    """Check the name of a schedule. Schedules over parts of sequences are refused."""
    if value in ("seqpipe", "seqvpp", "seqsmartvpp"):
        what = f"{name}={value!r}: there are no schedules over parts of a sequence"
        raise NotImplementedError(problem(what, fix='"gpipe", "1f1b" or "zero_bubble_v"'))
    return str(one_of("gpipe", "1f1b", "zero_bubble_v")(name, value))


def _follow(name: str, value: Any) -> bool:
    """Keep the value, with a note: elementwise operators follow their neighbours unless that costs more."""
    if flag(name, value):
        note("elementwise_op_strategy_follow=True: elementwise operators without a strategy follow their neighbours "
             "here unless the search finds another split cheaper")  # fmt: skip
    return bool(value)


_IDLE, _MEANINGLESS = TABLES["options"]["idle"], TABLES["options"]["meaningless"]
_LATER_NORMS = "norms of every rank's own gradients follow"


@dataclass(frozen=True, slots=True)
class Options:
    """All options of ``set_auto_parallel_context``. ``names_set``: those that the program has set.

    ``strict`` is ours: True allows the specification's even splits in powers of two, False whatever the library can
    split. ``enable_alltoall`` is True here (the reference: False): an all-to-all moves less than gathering and slicing.
    """

    device_num: int = option(1, whole(1, 4096))
    global_rank: int = option(0, whole(0, 4095))
    gradients_mean: bool = option(False, flag)
    gradient_fp32_sync: bool = option(True, flag)
    loss_repeated_mean: bool = option(True, flag, meaningless=_MEANINGLESS["loss_repeated_mean"])
    parallel_mode: str = option(ParallelMode.STAND_ALONE, one_of(*ParallelMode.MODE_LIST))
    search_mode: str = option("recursive_programming", one_of(*SEARCH_MODES))
    parameter_broadcast: bool = option(False, flag)
    strategy_ckpt_load_file: str = option("", text)
    strategy_ckpt_save_file: str = option("", text)
    full_batch: bool = option(False, flag)
    dataset_strategy: DatasetStrategy = option(DATA_PARALLEL, _dataset_strategy)
    enable_parallel_optimizer: bool = option(False, flag)
    force_fp32_communication: bool = option(False, flag)
    enable_alltoall: bool = option(True, flag, idle=_IDLE["enable_alltoall"])
    all_reduce_fusion_config: tuple[int, ...] = option((), _indices)
    pipeline_stages: int = option(1, whole(1, 4096))
    pipeline_segments: int = option(1, whole(1, 4096), meaningless=_MEANINGLESS["pipeline_segments"])
    pipeline_result_broadcast: bool = option(False, flag)
    pipeline_config: dict[str, Any] = option(
        PIPELINE_CONFIG, entries({"pipeline_interleave": flag, "pipeline_scheduler": _scheduler}, PIPELINE_CONFIG)
    )
    parallel_optimizer_config: dict[str, Any] = option(OPTIMIZER_CONFIG, entries({
        "gradient_accumulation_shard": flag, "parallel_optimizer_threshold": whole(0, 2**31),
        "optimizer_weight_shard_size": whole(-1, 4096), "optimizer_level": one_of("level1", "level2", "level3"),
    }, OPTIMIZER_CONFIG))  # fmt: skip
    comm_fusion: dict[str, Any] = option(
        {}, entries({"openstate": flag, "allreduce": _fusion, "allgather": _fusion, "reducescatter": _fusion})
    )
    strategy_ckpt_config: dict[str, Any] = option(
        CKPT_CONFIG, entries({"load_file": text, "save_file": text, "only_trainable_params": flag}, CKPT_CONFIG)
    )
    group_ckpt_save_file: str = option("", text)
    auto_pipeline: bool = option(False, flag)
    dump_local_norm: bool = option(False, flag, later=_LATER_NORMS)
    dump_local_norm_path: str = option("", text, later=_LATER_NORMS)
    dump_device_local_norm: bool = option(False, flag, later=_LATER_NORMS)
    grad_accumulation_step: int = option(1, whole(1, 2**31), later="accumulated gradients follow")
    strict: bool = option(True, flag)
    names_set: frozenset[str] = frozenset()

    @property
    def distributed(self) -> bool:
        """Return whether operators are split: in semi-auto and auto mode."""
        return self.parallel_mode in (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)

    @property
    def devices(self) -> int:
        """Return ``device_num`` if it is set, else the number of ranks. Raises ValueError if several ranks run and
        their number differs (a single process may plan for any number)."""
        ranks = world_size()
        if "device_num" not in self.names_set:
            return ranks
        if ranks not in (1, self.device_num):
            fix = f"set device_num={ranks}, or leave it out, or start {self.device_num} ranks"
            raise ValueError(problem(f"device_num is {self.device_num}, but {ranks} ranks run", fix=fix))
        return self.device_num

    @property
    def stage_devices(self) -> int:
        """Return the number of devices of a pipeline stage; without a pipeline, all devices."""
        return self.devices // self.pipeline_stages if self.distributed else self.devices

    @property
    def rank(self) -> int:
        """Return the rank whose program is printed: ``global_rank`` if set in a single process, else this rank."""
        return self.global_rank if "global_rank" in self.names_set and world_size() == 1 else rank()

    @property
    def bucket_bytes(self) -> int:
        """Return the size limit of gradient buckets in bytes. 0: every gradient has its own message."""
        if not self.comm_fusion.get("openstate", True):
            return 0
        sized = [rule["config"] for rule in self.comm_fusion.values() if rule is not True and rule["mode"] == "size"]
        return min(sized) * MEGABYTE if sized else BUCKET_BYTES

    @property
    def weight_shards(self) -> int:
        """Return over how many copies the parallel optimizer shards a parameter; -1: over all."""
        return self.parallel_optimizer_config["optimizer_weight_shard_size"] if self.enable_parallel_optimizer else -1

    def zero(self, element_bytes: int) -> Zero:
        """Return the parallel optimizer as a ZeRO setting. ``element_bytes``: size of a parameter's element. Sharded
        accumulation keeps gradients sharded, as level2 does."""
        config = self.parallel_optimizer_config
        level = int(config["optimizer_level"].removeprefix("level"))
        stage = max(level, 2) if config["gradient_accumulation_shard"] else level
        return Zero(stage, config["parallel_optimizer_threshold"] * 1024 // element_bytes)

    @property
    def fusion_cuts(self) -> tuple[int, ...]:
        """Return the indices of gradients after which a message ends. Empty: messages are filled by size."""
        fusion = self.comm_fusion.get("allreduce", {})
        return tuple(fusion.get("config", ())) if fusion.get("mode") == "index" else self.all_reduce_fusion_config

    def with_options(self, **values: Any) -> Options:
        """Return these options with some replaced. Raises TypeError, ValueError or NotImplementedError."""
        stored: dict[str, Any] = {}
        for name, value in values.items():
            name = ALIASES.get(name, name)
            if name in OPTIMIZER_CONFIG:  # separate options in earlier versions
                name, value = "parallel_optimizer_config", {**stored.get("parallel_optimizer_config", {}), name: value}
            known_name(name, CHECKS, "set_auto_parallel_context")
            stored[name] = CHECKS[name](name, value)
        names_set = self.names_set | set(stored)
        stored |= _dataset_options(stored, stored.get("strict", self.strict))
        for key in ("load_file", "save_file"):
            if stored.get("strategy_ckpt_config", {}).get(key):
                stored[f"strategy_ckpt_{key}"] = stored["strategy_ckpt_config"][key]
        return replace(self, **stored, names_set=names_set)


def _dataset_options(stored: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Derive ``full_batch`` from ``dataset_strategy`` or the reverse, as both say the same."""
    if "dataset_strategy" in stored:
        strategy = stored["dataset_strategy"]
        if isinstance(strategy, tuple):
            _check_slices(strategy, strict)
        full = strategy == FULL_BATCH
        if stored.get("full_batch", full) != full:
            what = f"full_batch={stored['full_batch']} contradicts dataset_strategy={strategy!r}"
            raise ValueError(problem(what, fix="give only one of them"))
        return {"full_batch": full}
    if "full_batch" in stored:
        return {"dataset_strategy": FULL_BATCH if stored["full_batch"] else DATA_PARALLEL}
    return {}


def _check_slices(strategy: tuple[tuple[int, ...], ...], strict: bool) -> None:
    """Check the reference's rules (dataset_slice): one split dim per input, and no input is split finer than the input
    with the most dims."""
    slices = []
    for index, counts in enumerate(strategy):
        split = [count for count in counts if count > 1]
        if len(split) > 1:
            what = f"dataset_strategy splits input {index} in {len(split)} dims: {counts}"
            raise ValueError(problem(what, fix="split at most one dim of every input"))
        if strict and split and split[0] & (split[0] - 1):
            what = f"dataset_strategy splits input {index} in {split[0]} slices, which is not a power of 2"
            raise ValueError(problem(what, fix="choose 1, 2, 4, 8, ..., or set strict=False"))
        slices.append(split[0] if split else 1)
    if not strategy:
        return
    largest = max(range(len(strategy)), key=lambda number: len(strategy[number]))
    if slices[largest] < max(slices):
        what = (
            f"dataset_strategy has {slices[largest]} slices of input {largest}, which has most dims "
            f"({len(strategy[largest])}), but {max(slices)} of input {slices.index(max(slices))}"
        )
        raise ValueError(problem(what, fix=f"split input {largest} into {max(slices)} slices as well"))


CHECKS = checks_of(Options)
ALIASES = {"auto_parallel_search_mode": "search_mode"}


@dataclass(frozen=True, slots=True)
class AlgoParameters:
    """Parameters of ``set_algo_parameters`` for the searches. The reference's switches have one setting here. The two
    numbers are kept without effect, as in the reference while their switches are off."""

    fully_use_devices: bool = option(True, flag, idle=_IDLE["fully_use_devices"])
    elementwise_op_strategy_follow: bool = option(False, _follow)
    enable_algo_approxi: bool = option(False, flag, idle=_IDLE["enable_algo_approxi"])
    algo_approxi_epsilon: float = option(0.1, fraction)
    tensor_slice_align_enable: bool = option(False, flag, idle=_IDLE["tensor_slice_align_enable"])
    tensor_slice_align_size: int = option(16, whole(1, 1024))


def _priced(default: float, check: Check = positive) -> Any:
    return option(default, check, idle="prices are those of the cluster")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Parameters of ``set_cost_model_context``. Prices are those of the cluster, so that those of the search have no
    effect; the fusion of gradients' messages has (``message_bytes``)."""

    device_memory_capacity: float = option(16.0 * 1024**3, positive, idle=_IDLE["device_memory_capacity"])
    costmodel_alpha: float = _priced(1.0)
    costmodel_beta: float = _priced(400.0)
    costmodel_gamma: float = _priced(0.001, fraction)
    costmodel_communi_threshold: float = _priced(2048.0)
    costmodel_communi_const: float = _priced(3072.0)
    costmodel_communi_bias: float = _priced(1024.0)
    multi_subgraphs: bool = option(False, flag, idle=_IDLE["multi_subgraphs"])
    run_phase: int = option(0, whole(0, 1), idle=_IDLE["run_phase"])
    costmodel_allreduce_fusion_algorithm: int = option(0, whole(0, 2))
    costmodel_allreduce_fusion_times: int = option(0, whole(0, 2**31))
    costmodel_allreduce_fusion_tail_percent: float = option(0.1, number)
    costmodel_allreduce_fusion_tail_time: float = option(0.1, number)
    costmodel_allreduce_fusion_allreduce_inherent_time: float = option(0.1, number)
    costmodel_allreduce_fusion_allreduce_bandwidth: float = option(0.1, positive)
    costmodel_allreduce_fusion_computation_time_parameter: float = option(
        0.1, number, idle=_IDLE["costmodel_allreduce_fusion_computation_time_parameter"]
    )

    def message_bytes(self, gradient_bytes: int, otherwise: int) -> int:
        """Return the size limit of messages of gradients; 0: every gradient has its own.

        Algorithm 1 cuts backward in ``times`` parts, of which the last has ``tail_percent`` and the others share the
        rest: the limit is the largest part's share of the gradients. Algorithm 2 sends as much as ``tail_time`` allows:
        inherent time + bytes * bandwidth. As there, numbers for which no message is left fuse nothing.
        """
        if self.costmodel_allreduce_fusion_algorithm == 0:
            return otherwise
        if self.costmodel_allreduce_fusion_algorithm == 1:
            times, tail = self.costmodel_allreduce_fusion_times, self.costmodel_allreduce_fusion_tail_percent
            if times < 2 or not 0 <= tail < 1:
                return 0
            return ceil(gradient_bytes * max(tail, (1 - tail) / (times - 1)))
        seconds = self.costmodel_allreduce_fusion_tail_time - self.costmodel_allreduce_fusion_allreduce_inherent_time
        return max(0, int(seconds / self.costmodel_allreduce_fusion_allreduce_bandwidth))
