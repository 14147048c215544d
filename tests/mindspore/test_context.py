"""Every option of the context: its default, its range, and what a wrong one is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from raising import raises
from shardwise.mindspore import context, options
from shardwise.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    get_algo_parameters,
    get_auto_parallel_context,
    get_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    reset_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
)
from shardwise.mindspore.options import CHECKS, AlgoParameters, Options
from spec.cases import CASES

# ---------------------------------------------------------------------------------------- the specification's cases


def set_option(name: str, value: Any) -> None:
    if name.startswith("set_algo_parameters."):
        set_algo_parameters(**{name.split(".")[1]: value})
    else:
        set_auto_parallel_context(**{name: value})


REFUSED = [
    ("ctx-err-2", "device_num", [4097]),
    ("ctx-err-3", "global_rank", [-1]),
    ("ctx-err-6", "set_algo_parameters.tensor_slice_align_size", [0, 1025]),
    ("ds-strategy-3", "dataset_strategy", [((1, 1, 1, 1), (8,))]),
]


@pytest.mark.parametrize(("case", "name", "values"), REFUSED, ids=[case for case, _, _ in REFUSED])
def test_what_the_reference_refuses_is_refused(case: str, name: str, values: list[Any]) -> None:
    for value in values:
        with raises(ValueError, "fix:"):
            set_option(name, value)
    assert context.options() == Options()
    assert context.algo_parameters() == AlgoParameters()


def test_these_are_all_cases_of_options_that_the_specification_refuses() -> None:
    stated = {i: case["option"] for i, case in CASES.items() if "option" in case and case["kind"] == "error"}
    assert stated.keys() == {case for case, _, _ in REFUSED}
    for case, name, values in REFUSED:
        assert listed(stated[case]) == listed({name: values if len(values) > 1 else values[0]})


def listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: listed(each) for key, each in value.items()}
    return [listed(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("form", [list, tuple])
def test_the_dataset_strategy_of_case_ds_strategy_1_is_taken(form: Callable[[Any], Any]) -> None:
    strategy = CASES["ds-strategy-1"]["option"]["dataset_strategy"]
    assert listed(strategy) == [[1, 1, 1, 8], [8]]
    set_auto_parallel_context(dataset_strategy=form(form(counts) for counts in strategy))
    assert get_auto_parallel_context("dataset_strategy") == ((1, 1, 1, 8), (8,))
    assert get_auto_parallel_context("full_batch") is False


DEFAULTS = {
    "device_num": 1,
    "global_rank": 0,
    "gradients_mean": False,
    "gradient_fp32_sync": True,
    "parallel_mode": "stand_alone",
    "parameter_broadcast": False,
}


def test_defaults_are_those_of_the_reference_and_come_back() -> None:
    assert CASES["ctx-defaults"]["expected"] == DEFAULTS
    changed = {"device_num": 4, "global_rank": 3, "gradients_mean": True, "gradient_fp32_sync": False}
    changed |= {"parallel_mode": "auto_parallel", "parameter_broadcast": True}
    set_auto_parallel_context(**changed)
    assert {name: get_auto_parallel_context(name) for name in DEFAULTS} == changed
    reset_auto_parallel_context()
    assert {name: get_auto_parallel_context(name) for name in DEFAULTS} == DEFAULTS


def test_algo_parameters_have_the_defaults_of_case_cost_defaults() -> None:
    stated = CASES["cost-defaults"]["expected"]
    for name in (field.name for field in fields(AlgoParameters)):
        assert get_algo_parameters(name) == stated.get(name, get_algo_parameters(name))
    set_algo_parameters(algo_approxi_epsilon=1, tensor_slice_align_size=1024)
    assert get_algo_parameters("tensor_slice_align_size") == 1024
    reset_algo_parameters()
    assert context.algo_parameters() == AlgoParameters(True, False, False, 0.1, False, 16)


# ----------------------------------------------------------------------------------------------------- every option

VALUES: dict[str, Any] = {  # one that is not the default, of every option that works
    "device_num": 8,
    "global_rank": 5,
    "gradients_mean": True,
    "gradient_fp32_sync": False,
    "parallel_mode": ParallelMode.HYBRID_PARALLEL,
    "search_mode": "dynamic_programming",
    "parameter_broadcast": True,
    "strategy_ckpt_load_file": "in.json",
    "strategy_ckpt_save_file": "out.json",
    "full_batch": True,
    "dataset_strategy": "full_batch",
    "force_fp32_communication": True,
    "all_reduce_fusion_config": (20, 35),
    "comm_fusion": {"openstate": True, "allreduce": {"mode": "size", "config": 32}},
    "strategy_ckpt_config": {"load_file": "a", "save_file": "b", "only_trainable_params": False},
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {
        "gradient_accumulation_shard": False,
        "parallel_optimizer_threshold": 24,
        "optimizer_weight_shard_size": 2,
        "optimizer_level": "level2",
    },
    "strict": False,
    "pipeline_stages": 2,
    "pipeline_result_broadcast": True,
    "pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"},
    "auto_pipeline": True,
    "enable_alltoall": False,
    "group_ckpt_save_file": "group",
}
LATER: dict[str, Any] = {
    "dump_local_norm": True,
    "dump_local_norm_path": "norms",
    "dump_device_local_norm": True,
    "grad_accumulation_step": 4,
}
MEANINGLESS: dict[str, Any] = {"loss_repeated_mean": False, "pipeline_segments": 2}
ALGO_IDLE: dict[str, Any] = {"fully_use_devices": False, "enable_algo_approxi": True, "tensor_slice_align_enable": True}


def test_every_option_is_in_one_of_these_lists() -> None:
    assert set(VALUES) | set(LATER) | set(MEANINGLESS) == set(CHECKS)
    assert {field.name for field in fields(Options)} == {*CHECKS, "names_set"}


@pytest.mark.parametrize("name", VALUES)
def test_an_option_that_works_is_stored_and_reset(name: str) -> None:
    default = getattr(Options(), name)
    assert default != VALUES[name]
    set_auto_parallel_context(**{name: VALUES[name]})
    assert get_auto_parallel_context(name) == getattr(context.options(), name) == VALUES[name]
    assert name in context.options().names_set
    reset_auto_parallel_context()
    assert get_auto_parallel_context(name) == default


@pytest.mark.parametrize("name", LATER)
def test_what_follows_later_says_so_and_takes_its_default(name: str) -> None:
    with raises(NotImplementedError, name, "in a later version"):
        set_auto_parallel_context(**{name: LATER[name]})
    set_auto_parallel_context(**{name: get_auto_parallel_context(name)})
    with raises((TypeError, ValueError), name):
        set_auto_parallel_context(**{name: object()})


def test_a_wrong_entry_is_found_before_what_follows_later() -> None:
    with raises(ValueError, 'did you mean "pipeline_scheduler"'):
        set_auto_parallel_context(pipeline_config={"pipeline_schedule": "1f1b"})
    with raises(ValueError, 'did you mean "zero_bubble_v"'):
        set_auto_parallel_context(pipeline_config={"pipeline_scheduler": "zero_buble_v"})


def test_what_means_nothing_here_says_why() -> None:
    for name, value in MEANINGLESS.items():
        with raises(ValueError, f"{name}={value} means nothing here"):
            set_auto_parallel_context(**{name: value})
        set_auto_parallel_context(**{name: getattr(Options(), name)})


def test_what_changes_no_result_is_kept_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in ALGO_IDLE.items():
        set_algo_parameters(**{name: value})
        assert get_algo_parameters(name) == value
        assert f"{name}={value} has no effect here" in capsys.readouterr().err
        set_algo_parameters(**{name: not value})
    assert context.algo_parameters() == AlgoParameters()
    for _ in range(2):
        set_context(enable_graph_kernel=True)
    assert capsys.readouterr().err.count("set_context(enable_graph_kernel=...) has no effect here") == 1
    assert (get_context("enable_graph_kernel"), get_context("exec_order")) == (True, None)
    context.reset_context()
    assert get_context("enable_graph_kernel") is None


def test_elementwise_operators_may_be_asked_to_follow(capsys: pytest.CaptureFixture[str]) -> None:
    set_algo_parameters(elementwise_op_strategy_follow=True)
    assert context.algo_parameters().elementwise_op_strategy_follow
    assert "follow their neighbours here unless the search finds another split cheaper" in capsys.readouterr().err
    set_algo_parameters(elementwise_op_strategy_follow=False)
    assert not capsys.readouterr().err
    with raises(TypeError, "not True or False"):
        set_algo_parameters(elementwise_op_strategy_follow=1)


WRONG: list[tuple[dict[str, Any], type[Exception], object]] = [
    ({"device_num": 0}, ValueError, "device_num is 0, smaller than 1"),
    ({"device_num": 4097}, ValueError, "device_num is 4097, larger than 4096"),
    ({"device_num": "4"}, TypeError, ("'4'", "of type str")),
    ({"device_num": True}, TypeError, ("device_num", "of type bool")),
    ({"global_rank": 4096}, ValueError, "larger than 4095"),
    ({"gradients_mean": 1}, TypeError, ("gradients_mean", "not True or False")),
    ({"parallel_mode": "semi_autoparallel"}, ValueError, 'did you mean "semi_auto_parallel"'),
    ({"parallel_mode": "AUTO_PARALELL"}, ValueError, 'did you mean "auto_parallel"'),
    ({"parallel_mode": "wrong"}, ValueError, "choose from auto_parallel, data_parallel"),
    ({"search_mode": "sharding_propogation"}, ValueError, 'did you mean "sharding_propagation"'),
    ({"paralel_mode": "auto_parallel"}, ValueError, 'did you mean "parallel_mode"'),
    ({"nonsense": 1}, ValueError, "choose from all_reduce_fusion_config"),
    ({"strategy_ckpt_save_file": 3}, TypeError, ("strategy_ckpt_save_file", 3, "of type int")),
    ({"dataset_strategy": "fullbatch"}, ValueError, 'did you mean "full_batch"'),
    ({"dataset_strategy": 8}, TypeError, ("dataset_strategy", "a tuple for every input")),
    ({"dataset_strategy": (8, 1)}, TypeError, ("dataset_strategy", "a tuple for every input")),
    ({"dataset_strategy": ((0, 1),)}, ValueError, ("dataset_strategy[0][0]", "smaller than 1")),
    ({"dataset_strategy": ((2, 2),)}, ValueError, "at most one dim"),
    ({"dataset_strategy": ((6, 1),)}, ValueError, "6 slices, which is not a power of 2"),
    ({"dataset_strategy": "data_parallel", "full_batch": True}, ValueError, ("full_batch", "contradicts")),
    ({"comm_fusion": {"allreduce": {"mode": "auto", "config": 3}}}, ValueError, "leave config None"),
    ({"comm_fusion": {"allreduce": {"mode": "size", "config": None}}}, TypeError, ("config", "comm_fusion")),
    ({"comm_fusion": {"allreduce": {"mode": "index", "config": [3, 2]}}}, ValueError, ("[3, 2]", "do not ascend")),
    ({"all_reduce_fusion_config": 20}, TypeError, (20, "list of indices")),
]


WRONG_PARAMETERS: list[tuple[dict[str, Any], type[Exception], object]] = [
    ({"tensor_slice_align_size": 0}, ValueError, ("tensor_slice_align_size is 0", "smaller than 1")),
    ({"tensor_slice_align_size": 1025}, ValueError, (1025, "larger than 1024")),
    ({"algo_approxi_epsilon": 0}, ValueError, ("algo_approxi_epsilon is 0", "above 0")),
    ({"algo_approxi_epsilon": "a"}, TypeError, ("'a'", "give a number")),
    ({"fully_use_devices": 1}, TypeError, ("fully_use_devices", "not True or False")),
    ({"fully_use_device": True}, ValueError, 'did you mean "fully_use_devices"'),
]
WRONG_SETTINGS: list[tuple[dict[str, Any], type[Exception], object]] = [
    ({"mode": 2}, ValueError, "GRAPH_MODE"),
    ({"device_target": "TPU"}, ValueError, "choose from Ascend, CPU, GPU"),
    ({"device_id": -1}, ValueError, ("device_id", "smaller than 0")),
    ({"save_graphs": 4}, ValueError, "larger than 3"),
    ({"save_graphs_path": 1}, TypeError, ("save_graphs_path", "give a string")),
    ({"max_device_memory": "30"}, ValueError, '"30GB"'),
    ({"save_graph": True}, ValueError, 'did you mean "save_graphs"'),
]
ALL_WRONG: list[tuple[Callable[..., None], dict[str, Any], type[Exception], object]] = [
    *((set_auto_parallel_context, {"gradients_mean": True, **row[0]}, *row[1:]) for row in WRONG),
    *((set_algo_parameters, *row) for row in WRONG_PARAMETERS),
    *((set_context, {"device_id": 1, **row[0]}, *row[1:]) for row in WRONG_SETTINGS),
]


@pytest.mark.parametrize(("function", "values", "kind", "message"), ALL_WRONG, ids=[str(row[1]) for row in ALL_WRONG])
def test_what_is_wrong_is_named_and_sets_nothing(
    function: Callable[..., None], values: dict[str, Any], kind: type[Exception], message: object
) -> None:
    with raises(kind, message):
        function(**values)
    assert (context.options(), context.algo_parameters()) == (Options(), AlgoParameters())
    assert context.settings() == context.Settings()


def test_a_misspelled_mode_of_the_class_is_told_what_was_meant() -> None:
    with raises(AttributeError, "did you mean AUTO_PARALLEL?"):
        _ = ParallelMode.AUTO_PARALELL
    listed = "stand_alone data_parallel hybrid_parallel semi_auto_parallel auto_parallel"
    assert tuple(listed.split()) == ParallelMode.MODE_LIST


# ------------------------------------------------------------------------------------------------------ their meaning


@pytest.mark.parametrize("mode", ParallelMode.MODE_LIST)
def test_operators_are_split_in_semi_auto_and_auto_mode(mode: str) -> None:
    set_auto_parallel_context(parallel_mode=mode)
    assert context.options().distributed == (mode in ("semi_auto_parallel", "auto_parallel"))


def test_the_old_name_of_the_search_is_the_same_option() -> None:
    set_auto_parallel_context(auto_parallel_search_mode="sharding_propagation")
    assert context.options().search_mode == "sharding_propagation"
    assert get_auto_parallel_context("auto_parallel_search_mode") == "sharding_propagation"


def test_full_batch_and_dataset_strategy_say_the_same() -> None:
    set_auto_parallel_context(full_batch=True)
    assert context.options().dataset_strategy == "full_batch"
    set_auto_parallel_context(dataset_strategy="data_parallel")
    assert context.options().full_batch is False
    set_auto_parallel_context(dataset_strategy="full_batch")
    assert context.options().full_batch is True


def test_uneven_slices_are_refused_by_the_strict_rules_only() -> None:
    set_auto_parallel_context(strict=False, dataset_strategy=((6, 1), (6,)))
    assert context.options().dataset_strategy == ((6, 1), (6,))


def test_devices_are_device_num_or_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context.options().devices == 1
    set_auto_parallel_context(device_num=8, global_rank=5)
    assert (context.options().devices, context.options().rank) == (8, 5)
    monkeypatch.setattr(options, "world_size", lambda: 4)
    monkeypatch.setattr(options, "rank", lambda: 2)
    assert context.options().rank == 2
    with raises(ValueError, "device_num is 8, but 4 ranks run"):
        _ = context.options().devices
    reset_auto_parallel_context()
    assert context.options().devices == 4


def test_fusion_options_say_how_gradients_share_messages() -> None:
    megabyte = 2**20
    assert (context.options().bucket_bytes, context.options().fusion_cuts) == (25 * megabyte, ())
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    assert context.options().bucket_bytes == 32 * megabyte
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "index", "config": [2, 5]}})
    assert context.options().fusion_cuts == (2, 5)
    set_auto_parallel_context(comm_fusion={"openstate": False})
    assert context.options().bucket_bytes == 0


def test_strategy_files_may_be_given_in_one_dictionary() -> None:
    set_auto_parallel_context(strategy_ckpt_config={"save_file": "s.json"})
    assert (context.options().strategy_ckpt_save_file, context.options().strategy_ckpt_load_file) == ("s.json", "")


def test_what_is_got_cannot_change_the_context() -> None:
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    get_auto_parallel_context("comm_fusion")["allreduce"]["config"] = 1
    assert context.options().bucket_bytes == 32 * 2**20


# -------------------------------------------------------------------------------------------------------- set_context


def test_the_settings_of_the_documents_are_taken() -> None:
    set_context(mode=GRAPH_MODE, device_target="GPU", save_graphs=2, save_graphs_path="../saved_graph")
    found = [get_context(name) for name in ("mode", "device_target", "save_graphs", "save_graphs_path")]
    assert found == [0, "GPU", 2, "../saved_graph"]
    set_context(save_graphs=True, mode=PYNATIVE_MODE, device_target="Ascend")
    assert (context.settings().save_graphs, context.settings().mode) == (1, 1)
    reset_context()
    assert context.settings() == context.Settings()
    assert get_context("device_target") in ("GPU", "CPU")


def test_the_memory_of_a_device_is_told_in_gigabytes() -> None:
    assert context.settings().device_bytes is None
    set_context(max_device_memory="1.5GB")
    assert context.settings().device_bytes == 3 * 2**29


@pytest.mark.parametrize(
    ("has_gpu", "target", "device", "said"),
    [
        (False, "Ascend", "cpu", "the CPU"),
        (False, "GPU", "cpu", "the CPU"),
        (True, "Ascend", "cuda", "the GPU"),
        (True, "GPU", "cuda", ""),
        (True, "CPU", "cpu", ""),
        (False, "CPU", "cpu", ""),
    ],
)
def test_a_target_is_what_the_machine_has_and_one_note_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_gpu: bool, target: str, device: str,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    for _ in range(2):
        set_context(device_target=target, mode=GRAPH_MODE)
    assert context.settings().device_type == device
    told = f'shardwise.mindspore: device_target="{target}": the program runs on what this machine has, {said}\n'
    assert capsys.readouterr().err == (told if said else "")
