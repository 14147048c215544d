"""Pipelines in the reference's words (rows A5, A39 to A43, B26, C10, D10): on ranks as in one process."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shardwise.mindspore.parallel.auto_parallel import AutoParallel
from shardwise.mindspore.parallel.nn import Pipeline
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import planned_by_context
from raising import raises
from search.small_models import counts
from shardwise.errors import PlanError, ShardwiseError
from shardwise.mindspore import nn, ops, staged
from shardwise.mindspore.holding import holding_of, is_elsewhere, save_group
from spec.cases import CASES

RunRanks = Callable[..., list[Any]]
STAGED = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "full_batch": True}


class Block(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm((width,)), nn.Dense(width, width, activation="gelu")

    def construct(self, x: Tensor) -> Tensor:
        return x + self.dense(self.norm(x))


class Net(nn.Cell):
    """Stages as document 004 has them: the head and the first layers in stage 0, the last and the classifier in 1."""

    def __init__(
        self, stages: tuple[int | None, ...] = (0, 0, 1, 1), kind: str = "mean", segments: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        ms.set_seed(4)
        self.head, self.fc = nn.Dense(6, 8), nn.Dense(8, 4)
        self.layer1, self.layer2 = Block(8), Block(8)
        for cell, stage in zip((self.head, self.layer1, self.layer2, self.fc), stages, strict=True):
            if stage is not None:
                cell.pipeline_stage = stage
        for cell, segment in zip((self.head, self.layer1, self.layer2, self.fc), segments, strict=False):
            cell.pipeline_segment = segment
        self.kind = kind
        self.loss = nn.CrossEntropyLoss(reduction="none")
        self.squeeze, self.mean = ops.Squeeze(axis=1), ops.ReduceMean(keep_dims=True)

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.head(x)))
        losses = self.loss(self.fc(x), labels)
        if self.kind == "weighted":  # a weighted mean: every micro-batch divides by its own weights
            weights = (labels + 1).to(losses.dtype)
            return (losses * weights).sum() / weights.sum()
        return losses if self.kind == "vector" else losses.sum() if self.kind == "sum" else losses.mean()


def batches(steps: int = 3, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    numbers = np.random.RandomState(0)
    return [
        (torch.tensor(numbers.normal(size=(rows, 6)), dtype=torch.float32), torch.tensor(numbers.randint(0, 4, rows)))
        for _ in range(steps)
    ]


def trained(kind: str = "mean", *stages: Any) -> dict[str, Any]:
    """Losses, weights and what was printed; of one process or of a rank."""
    net = Net(*(stages[:1] or [(0, 0, 1, 1)]), kind, *stages[1:])
    model = ms.Model(nn.PipelineCell(net, 4), optimizer=nn.Momentum(net.trainable_params(), 0.05, 0.9))
    seen: list[float] = []
    watch = ms.train.LambdaCallback(on_train_step_end=lambda run: seen.append(
        float(np.sum(run.original_args().net_outputs.asnumpy()))))  # fmt: skip
    printed = io.StringIO()
    with redirect_stdout(printed):
        model.train(1, batches(), callbacks=[ms.LossMonitor(), watch], dataset_sink_mode=False)
    weights = {p.name: p.detach().numpy().copy() for p in net.get_parameters() if not is_elsewhere(p)}
    return {"losses": seen, "weights": weights, "printed": printed.getvalue(), "net": net,
            "step": model.train_network}  # fmt: skip


def told(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("losses", "weights", "printed")}


def staged_by_methods(pipe: nn.Cell) -> nn.Cell:
    ms.reset_auto_parallel_context()
    parallel = AutoParallel(pipe, parallel_mode="semi_auto")
    parallel.dataset_strategy("full_batch")
    parallel.pipeline(stages=2, scheduler="1f1b")
    parallel.comm_fusion({"allreduce": {"mode": "size", "config": 16}})
    return parallel


def loop(wrapped: Callable[[nn.Cell], nn.Cell] = lambda pipe: pipe) -> tuple[list[float], dict[str, Any]]:
    """A loop of one's own over a pipeline, with the reducer of pipelines, and an evaluation behind it."""
    net = Net()
    pipe = wrapped(Pipeline(net, 2)).set_train()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    reducer = nn.PipelineGradReducer(optimizer.parameters)
    step = ms.value_and_grad(lambda x, y: pipe(x, y), None, optimizer.parameters)
    losses = []
    for x, y in batches():
        loss, grads = step(x, y)
        optimizer(reducer(grads))
        losses.append(float(loss))
    pipe.set_train(False)
    evaluated = [cell(*batches()[0]).asnumpy() for cell in (pipe, net)]  # in stages, and with all parameters here
    return losses, {"evaluated": evaluated, "weights": {p.name: p.detach().numpy() for p in net.get_parameters()}}


CONFIGS: dict[str, dict[str, Any]] = {"mean": {}, "weighted": {"pipeline_scheduler": "gpipe"}}


def on_rank(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, config in CONFIGS.items():
        ms.reset_auto_parallel_context()
        save = {"strategy_ckpt_save_file": f"{folder}/strategies/{kind}{dist.get_rank()}.json",
                "group_ckpt_save_file": f"{folder}/groups/{dist.get_rank()}.json"}  # fmt: skip
        ms.set_auto_parallel_context(**STAGED, pipeline_config=config, **save)
        run = trained(kind)
        found[kind] = told(run)
    net = run["net"]
    found["here"] = [p.name for p in net.get_parameters() if not is_elsewhere(p)]
    found["ranks"] = {p.name: own.ranks for p in net.get_parameters() if (own := holding_of(p))}
    ms.save_checkpoint(run["step"], f"{folder}/rank_{dist.get_rank()}/net.ckpt")
    ms.save_checkpoint(net, f"{folder}/whole{dist.get_rank()}.ckpt", integrated_save=True)
    found["loop"] = loop(staged_by_methods)
    return found


def on_rank_otherwise() -> dict[str, Any]:
    ms.set_auto_parallel_context(**STAGED, pipeline_result_broadcast=True)
    found = {kind: told(trained(kind)) for kind in ("sum", "vector")}
    ms.set_auto_parallel_context(pipeline_config={"pipeline_scheduler": "1f1b", "pipeline_interleave": True})
    found["interleaved"] = told(trained("mean", (0, 1, 0, 1), (0, 0, 1, 1)))
    ms.set_auto_parallel_context(pipeline_config={"pipeline_scheduler": "zero_bubble_v"})
    found["folded"] = told(trained("mean", (0, 1, 1, 0), (0, 0, 1, 1)))
    ms.set_auto_parallel_context(pipeline_config={"pipeline_scheduler": "1f1b"}, auto_pipeline=True)
    found["auto"] = told(trained("mean", (None,) * 4))
    return found


def on_four_ranks() -> dict[str, Any]:
    """Two ranks per stage, each fed its half of the batch; the parallel optimizer."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2, enable_parallel_optimizer=True,
                                 parallel_optimizer_config={"parallel_optimizer_threshold": 0})  # fmt: skip
    net, half = Net(), dist.get_rank() % 2
    step = nn.TrainOneStepCell(nn.PipelineCell(net, 2), nn.Momentum(net.trainable_params(), 0.05, 0.9)).set_train()
    losses = [float(step(*(x.chunk(2)[half] for x in batch))) for batch in batches()]
    net.set_train(False)
    evaluated = net(*batches()[0]).item()
    ms.reset_auto_parallel_context()
    return {"losses": losses, "evaluated": evaluated, "shapes": [tuple(p.shape) for p in net.get_parameters()]}


def check(found: dict[str, Any], want: dict[str, Any], kind: str) -> None:
    np.testing.assert_allclose(found["losses"], want["losses"], rtol=2e-5, err_msg=kind)
    for name, own in found["weights"].items():
        np.testing.assert_allclose(own, want["weights"][name], rtol=1e-4, atol=1e-6, err_msg=f"{kind} {name}")


@pytest.mark.quick
def test_two_ranks_train_a_pipeline_as_one_process_does(run_ranks: RunRanks, tmp_path: Path) -> None:
    one = {kind: trained(kind) for kind in CONFIGS}
    own_loop = loop()
    x, y = batches()[0]
    parts = [Net()(a, b).item() for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert one["mean"]["losses"][0] == pytest.approx(sum(parts), rel=1e-6)  # the sum over micro-batches
    two = run_ranks(on_rank, 2, str(tmp_path), time_limit_seconds=240)
    for rank, found in enumerate(two):
        for kind, want in one.items():
            check(found[kind], want, kind)
        assert bool(found["mean"]["printed"]) == (rank == 1)  # the loss is the last stage's (A43)
        assert found["ranks"]["head.weight"] == (0,)
        assert found["ranks"]["fc.weight"] == (1,)
        np.testing.assert_allclose(found["loop"][0], own_loop[0], rtol=2e-5)
        np.testing.assert_allclose(found["loop"][1]["evaluated"], own_loop[1]["evaluated"], rtol=2e-5)
    assert {*two[0]["here"], *two[1]["here"]} == one["mean"]["weights"].keys()
    assert not {*two[0]["here"]} & {*two[1]["here"]}
    groups = [ms.restore_group_info_list(str(tmp_path / f"groups/{rank}.json")) for rank in (0, 1)]
    assert groups == [[0], [1]]  # each has its stage alone
    for content in (
        ms.load_distributed_checkpoint(None, [str(tmp_path / f"rank_{rank}/net.ckpt") for rank in (0, 1)]),
        ms.load_checkpoint(str(tmp_path / "whole0.ckpt")),
    ):
        for name, weight in one["weighted"]["weights"].items():
            np.testing.assert_allclose(content[name].detach().numpy(), weight, rtol=1e-4, atol=1e-6)

    elsewhere(tmp_path, one["weighted"])


@pytest.mark.long
def test_four_ranks_feed_their_halves_and_divide_the_optimizer(run_ranks: RunRanks) -> None:
    net = Net()
    step = nn.TrainOneStepCell(nn.PipelineCell(net, 2), nn.Momentum(net.trainable_params(), 0.05, 0.9)).set_train()
    losses = [float(step(*batch)) for batch in batches()]
    net.set_train(False)
    for found in run_ranks(on_four_ranks, 4, time_limit_seconds=300):
        np.testing.assert_allclose(found["losses"], losses, rtol=2e-5)
        assert found["evaluated"] == pytest.approx(net(*batches()[0]).item(), rel=2e-5)
        assert (4, 6) in found["shapes"] or (2, 8) in found["shapes"]


def elsewhere(folder: Path, want: dict[str, Any]) -> None:
    """The files of the two ranks, as those of four ranks in other stages, as one file, and as parts again."""
    strategies = folder / "strategies"
    (strategies / "mean0.json").unlink()
    (strategies / "mean1.json").unlink()
    source, target = str(folder / "source.json"), str(folder / "target.json")
    ms.merge_pipeline_strategys(str(strategies), source)
    planned(Net((0, 1, 1, 1)), device_num=4, enable_parallel_optimizer=True,
            parallel_optimizer_config={"parallel_optimizer_threshold": 0}).save(target)  # fmt: skip
    assert [ms.rank_list_for_transform(rank, source, target) for rank in range(4)] == [[0], [0], [0, 1], [0, 1]]
    assert ms.rank_list_for_transform(0, None, target) == [0]
    ms.transform_checkpoints(str(folder), str(folder / "dst"), "net", source, target)
    files = [str(folder / f"dst/rank_{rank}/net{rank}.ckpt") for rank in range(4)]
    assert "head.weight" in ms.load_checkpoint(files[0])
    assert "head.weight" not in ms.load_checkpoint(files[2])
    assert ms.load_checkpoint(files[2])["fc.weight"].shape == (2, 8)  # half of it: the parallel optimizer
    by_rank = str(folder / "by_rank.ckpt")
    ms.transform_checkpoint_by_rank(2, {rank: str(folder / f"rank_{rank}/net.ckpt") for rank in (0, 1)}, by_rank,
                                    source, target)  # fmt: skip
    assert torch.equal(ms.load_checkpoint(by_rank)["fc.weight"], ms.load_checkpoint(files[2])["fc.weight"])
    merged = ms.merge_sliced_parameter([ms.load_checkpoint(file)["fc.weight"] for file in files[2:]])
    np.testing.assert_allclose(merged.detach().numpy(), want["weights"]["fc.weight"], rtol=1e-4, atol=1e-6)
    ms.transform_checkpoints(str(folder / "dst"), str(folder / "one"), "net", target)
    net = Net()
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    content = ms.load_checkpoint(str(folder / "one/rank_0/net0.ckpt"), net)
    assert ms.load_param_into_net(optimizer, content)[0] == []  # states came along
    for name, parameter in net.parameters_dict().items():
        np.testing.assert_allclose(parameter.asnumpy(), want["weights"][name], rtol=1e-4, atol=1e-6)
    with raises(ValueError, "files of the ranks [0, 1], not of 2, 3"):
        ms.transform_checkpoints(str(folder), str(folder / "dst"), "net", target, source)


@pytest.mark.long
def test_losses_schedules_and_cuts_of_other_kinds(run_ranks: RunRanks) -> None:
    one = {kind: trained(kind) for kind in ("sum", "vector", "mean")}
    for found in run_ranks(on_rank_otherwise, 2, time_limit_seconds=400):
        for kind, run in found.items():
            check(run, one.get(kind, one["mean"]), kind)
            assert run["printed"].count("loss is") == 3


def planned(net: nn.Cell, micro_size: int = 2, **options: Any) -> Any:
    ms.set_auto_parallel_context(**{**STAGED, "device_num": 2, "pipeline_config": {}, **options})
    return planned_by_context(nn.PipelineCell(net, micro_size).set_train(), batches()[0])


def test_stages_are_those_of_the_cells(tmp_path: Path) -> None:
    plan = planned(Net())
    assert [stage.placement.ranks for stage in plan.stages] == [(0,), (1,)]
    assert {entry.name.rpartition(".")[0] for entry in plan.stages[1].parameters} == {
        "network.layer2.norm", "network.layer2.dense", "network.fc"}  # fmt: skip
    assert plan.schedule == "1F1B"
    assert planned(Net(), pipeline_config={"pipeline_scheduler": "gpipe"}).schedule == "GPipe"
    folded = planned(
        Net((0, 1, 1, 0), "mean", (0, 0, 1, 1)), 4, pipeline_config={"pipeline_scheduler": "zero_bubble_v"}
    )
    assert [stage.placement.ranks for stage in folded.stages] == [(0,), (1,), (1,), (0,)]
    assert len(planned(Net((None,) * 4), auto_pipeline=True).stages) == 2
    inner = planned(Net(), device_num=4)
    assert [stage.placement.ranks for stage in inner.stages] == [(0, 1), (2, 3)]
    parted = planned(Net(), device_num=4, enable_parallel_optimizer=True,
                     parallel_optimizer_config={"parallel_optimizer_threshold": 0})  # fmt: skip
    for rank, (copied, alone) in enumerate([([0, 1], [0]), ([0, 1], [1]), ([2, 3], [2]), ([2, 3], [3])]):
        for plan, want in ((inner, copied), (parted, alone)):
            save_group(plan, rank, str(tmp_path / "group.json"))
            assert ms.restore_group_info_list(str(tmp_path / "group.json")) == want


class Tied(nn.Cell):
    """What crosses is a bare product, and both stages read one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(4, 6), nn.Dense(6, 6, has_bias=False)
        self.product, self.loss = ops.MatMul(transpose_b=True), nn.CrossEntropyLoss()
        self.norm = nn.LayerNorm((6,))
        self.table.pipeline_stage = self.dense.pipeline_stage = 0
        self.norm.pipeline_stage = 1

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.dense(x + self.table(labels)))
        return self.loss(self.product(x, self.table.embedding_table), labels)


def test_a_bare_product_crosses_and_a_table_is_in_both_stages() -> None:
    first, second = planned(Tied()).stages
    assert "network.dense.weight" in {entry.name for entry in first.parameters}
    for stage in (first, second):
        assert "network.table.embedding_table" in {entry.name for entry in stage.parameters}


class Skipping(nn.Cell):
    """A value with a strategy of its own is read in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.apart = nn.Dense(8, 8), nn.Dense(8, 8), ops.SquaredDifference()
        self.apart.shard(((2, 1), (2, 1)))
        self.first.pipeline_stage, self.second.pipeline_stage = 0, 1

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = self.apart(x, 1.0 - x)
        return (self.second(self.first(x) + mask) + mask).square().mean()


def test_a_split_value_crosses_as_it_is_split() -> None:
    ms.set_auto_parallel_context(**STAGED, device_num=4)
    cell, x = nn.wrap.cell_wrapper._VirtualDatasetCell(nn.PipelineCell(Skipping(), 2)), torch.rand(8, 8)
    plan = planned_by_context(cell, (x, torch.zeros(8)))
    assert sw.verify(staged.MicroBatch(cell.network), (torch.tensor(1.0), x, torch.zeros(8)), plan, steps=1).ok


class TwoProducts(nn.Cell):
    """The network of case pipe-1: a product with a strategy in each stage, and one weight in both."""

    def __init__(self, strategy: dict[str, Any]) -> None:
        super().__init__()
        self.cell1, self.cell2 = Product(strategy["matmul"]), Product(strategy["matmul1"])
        self.cell2.weight = self.cell1.weight
        self.cell1.pipeline_stage, self.cell2.pipeline_stage = 0, 1

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.cell2(self.cell1(x)) - labels).square().mean()


class Product(nn.Cell):
    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.weight = ms.Parameter(ms.common.initializer.initializer("normal", [64, 64]), "weight")
        self.matmul = ops.MatMul().shard(strategy)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight)


def test_strategies_are_those_of_a_stage() -> None:
    case = CASES["pipe-1"]
    stages, devices = case["pipeline_stages"], case["device_num"]
    ms.set_auto_parallel_context(**{**STAGED, "pipeline_stages": stages, "device_num": devices})
    cell, rows = nn.PipelineCell(TwoProducts(case["strategy"]), case["micro_size"]), 16 * case["micro_size"]
    plan = planned_by_context(cell, (torch.zeros(rows, 64), torch.zeros(rows, 64)))
    assert [stage.placement.ranks for stage in plan.stages] == [tuple(range(16)), tuple(range(16, 32))]
    for number, want in enumerate(("matmul", "matmul1")):
        stage = plan.alone(number)
        (product,) = (own.name for own in stage.operators if own.name.endswith("/matmul"))
        assert [list(own) for own in counts(stage, product)] == case["strategy"][want]
        assert len(stage.parameters) == 1  # the one that both have


def test_the_plan_of_a_pipeline_is_verified_as_its_micro_batches() -> None:
    cell, inputs = nn.PipelineCell(Net(), 4), batches()[0]
    ms.set_auto_parallel_context(**STAGED, device_num=2)
    plan = planned_by_context(cell, inputs)
    report = sw.verify(staged.MicroBatch(cell.network), (torch.tensor(1.0), *inputs), plan, steps=1)
    assert report.ok, str(report)
    assert plan.micro_batches == 4
    assert {own.kind for own in report.differences} == {"loss", "gradient", "parameter"}
    with raises(ShardwiseError, fix="sw.verify(staged.MicroBatch(cell.network)"):
        sw.verify(cell, inputs, plan)


def test_1f1b_keeps_fewer_micro_batches_than_gpipe() -> None:
    """Row A41, by the library's own simulation of a step."""
    peaks = [planned(Net(), 4, parallel_mode="auto_parallel", search_mode="dynamic_programming",
                     pipeline_config={"pipeline_scheduler": own}).pipeline.stages[0].peak_bytes
             for own in ("1f1b", "gpipe")]  # fmt: skip
    assert peaks[0] < peaks[1]


def test_what_stages_need_is_told() -> None:
    with raises(
        ValueError,
        "layer2.norm (LayerNorm)",
        "network.layer2.dense",
        op="pipeline_stage",
        fix="net.layer1.pipeline_stage = 0",
    ):
        planned(Net((0, 0, None, 1)))
    with raises(
        PlanError, "layer2", "stage 0", "layer1", op="network.layer2.norm/layer_norm", source="test_pipelines.py"
    ):
        planned(Net((0, 1, 0, 1)))
    with raises(ValueError, "pipeline_stages is 2", "network.fc in stage 2"):
        planned(Net((0, 0, 1, 2)))
    with raises(ValueError, "micro_size is 1", "pipeline_stages 2"):
        planned(Net(), 1)
    ms.reset_auto_parallel_context()
    with raises(ValueError, "input 0 of a PipelineCell", "[8, 6]", "3 micro-batches"):
        nn.PipelineCell(Net(), 3)(*batches()[0])
    with raises(NotImplementedError, "pipeline_config['pipeline_scheduler']='seqpipe'", "parts of a sequence"):
        ms.set_auto_parallel_context(pipeline_config={"pipeline_scheduler": "seqpipe"})
    with raises(ValueError, "pipeline_stage is -1"):
        Net().head.pipeline_stage = -1
    ms.set_auto_parallel_context(**STAGED, device_num=2)
    net = Net()
    step = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 0.1, 0.9)).set_train()
    with raises(RuntimeError, "nn.PipelineCell(net_with_loss, micro_size)"):
        step(*batches()[0])
