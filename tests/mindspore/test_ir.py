"""The printed programs: what the documents show is in them, and what they show is what runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.ir_reader import KINDS, Read, backward, read
from runtime.small_gpt import TENSOR_PARALLEL, batch, make_gpt
from shardwise.graph.capture import capture
from shardwise.layouts.text import parse_layout
from shardwise.mindspore import engine
from shardwise.mindspore.communication.management import group_name, group_ranks_name
from shardwise.mindspore.ir import begin
from shardwise.mindspore.ir.execute import Execution, slicing
from shardwise.mindspore.ir.page import Origins
from shardwise.plans.bind import program_of
from shardwise.programs.moves import OverlapPart
from shardwise.programs.program import localize
from spec.cases import CASES

RunRanks = Callable[..., list[Any]]
RANKS = 8
AUTO = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}
SEMI = {"parallel_mode": "semi_auto_parallel"}


class Net(ms.nn.Cell):
    """Document 003's network."""

    def __init__(self, first: Any = None, second: Any = None) -> None:
        super().__init__()
        numbers = np.random.RandomState(0)
        self.weight = ms.Parameter(ms.Tensor(numbers.normal(0, 0.01, (32, 16)).astype(np.float32)), "w")
        self.weight2 = ms.Parameter(ms.Tensor(numbers.normal(0, 0.01, (16, 16)).astype(np.float32)), "w2")
        self.matmul, self.relu, self.matmul2 = ms.ops.MatMul(), ms.ops.ReLU(), ms.ops.MatMul()
        for primitive, strategy in ((self.matmul, first), (self.matmul2, second)):
            if strategy is not None:
                primitive.shard(strategy)

    def construct(self, x: Tensor) -> Tensor:
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        out = self.matmul2(out, self.weight2)
        return out


class Nested(Net):
    def construct(self, x: Tensor) -> Tensor:
        return self.matmul2(self.relu(self.matmul(x, self.weight)), self.weight2)


# Document 003; data parallelism; row D2 (from columns to rows by one all-to-all).
PROGRAMS: dict[str, tuple[type[Net], dict[str, Any], tuple[Any, Any]]] = {
    "quick start": (Net, AUTO, (((2, 4), (4, 1)), None)),
    "data": (Nested, SEMI, (None, None)),
    "dlrm": (Net, {**SEMI, "full_batch": True}, (((1, 1), (1, 8)), ((8, 1), (1, 1)))),
}
Messages = list[tuple[str, tuple[int, ...], int]]


def train_and_print(folder: str) -> dict[str, Messages]:
    """On a rank: train every case for two steps and note what the second one sent."""
    ms.communication.init("gloo")
    sent = {}
    for name, (network, options, strategies) in PROGRAMS.items():
        ms.reset_auto_parallel_context()
        ms.set_context(save_graphs=3, save_graphs_path=f"{folder}/{name}")
        ms.set_auto_parallel_context(device_num=RANKS, **options)
        net = network(*strategies)
        train = ms.nn.TrainOneStepCell(
            ms.nn.WithLossCell(net, ms.nn.MSELoss()), ms.nn.Momentum(net.trainable_params(), 0.4, 0.1)
        ).set_train()
        rows = 16 if options.get("full_batch") else 16 // RANKS
        x, y = torch.ones(rows, 32), torch.ones(rows, 16)
        train(x, y)
        par = engine._SPLITS[train.network].par
        par._ranks.record = []
        train(x, y)
        mesh = par.plan.mesh
        sent[name] = [
            (own.kind, tuple(sorted(mesh.group(own.axes, dist.get_rank()))), own.num_bytes) for own in par._ranks.record
        ]
    ms.set_context(save_graphs=0)
    train(torch.ones(32, 32), torch.ones(32, 16))  # another program, of which nothing is written
    return sent


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Messages]]]:
    from launch.gloo_ranks import run_on_ranks

    folder = tmp_path_factory.mktemp("graphs")
    scratch = tmp_path_factory.mktemp("ranks")
    return folder, run_on_ranks(train_and_print, RANKS, (str(folder),), scratch, 120.0)


Printed = tuple[Path, list[dict[str, Messages]]]


def files(printed: Printed, case: str, rank: int, pattern: str) -> Path:
    (path,) = (printed[0] / case / f"rank_{rank}").glob(pattern)
    return path


def named(lines: list[Read], instance: str) -> Read:
    (found,) = [line for line in lines if line.instance == instance]
    return found


def test_every_rank_has_both_files_and_the_plan_with_numbers_that_count_up(printed: Printed) -> None:
    for rank in range(RANKS):
        names = sorted(path.name for case in PROGRAMS for path in (printed[0] / case / f"rank_{rank}").iterdir())
        kinds = sorted(re.sub(r"\d{4}", "*", name) for name in names)
        assert kinds == sorted(["step_parallel_begin_*.ir", "18_execute_*.ir", "plan_*.json"] * len(PROGRAMS))
        numbers = [int(re.findall(r"\d{4}", name)[0]) for name in names]
        assert sorted(numbers) == list(range(3 * len(PROGRAMS)))
    plan = sw.Plan.load(files(printed, "quick start", 3, "plan_*.json"))
    assert plan.mesh.num_devices == RANKS


def test_the_whole_graph_has_the_strategies_that_were_given_and_found(printed: Printed) -> None:
    lines = read(files(printed, "quick start", 0, "step_parallel_begin_*.ir"))
    scope = "Default/network-WithLossCell/_backbone-Net"
    expected = {
        "matmul": ("MatMul", ((2, 4), (4, 1)), [[16, 32], [32, 16]]),
        "relu": ("ReLU", ((2, 4),), [[16, 16]]),
        "matmul2": ("MatMul", ((2, 4), (4, 1)), [[16, 16], [16, 16]]),
    }
    for instance, (operator, strategy, shapes) in expected.items():
        line = named(lines, instance)
        assert (line.operator, line.in_strategy, line.shapes, line.shape) == (operator, strategy, shapes, [16, 16])
        assert line.scope == scope
        assert {dtype for dtype, _ in (*line.given, *line.made)} == {"Float32"}
        assert line.attrs["output_names"] == "[output]"
        assert line.attrs["input_names"] == ("[x]" if operator == "ReLU" else "[x1, x2]")
    assert named(lines, "matmul").attrs["transpose_a"] == named(lines, "matmul").attrs["transpose_b"] == "false"
    assert named(lines, "matmul").attrs["in_strategy"] == "((2, 4), (4, 1))"
    assert "in_strategy" not in named(lines, "matmul2").attrs
    loads = [line for line in lines if line.operator == "Load"]
    assert [(line.operands.split("_")[-1], line.shape) for line in loads] == [("w, U", [32, 16]), ("w2, U", [16, 16])]
    assert {line.scope for line in loads} == {"Default/network-WithLossCell"}
    assert lines.index(loads[1]) == lines.index(named(lines, "matmul2")) - 1


def test_what_rank_0_executes_is_what_document_003_shows(printed: Printed) -> None:
    lines = read(files(printed, "quick start", 0, "18_execute_*.ir"))
    first = lines.index(named(lines, "matmul"))
    product, summed, cut, relu, load, second = lines[first : first + 6]
    assert (product.operator, product.shapes, product.shape) == ("MatMul", [[8, 8], [8, 16]], [8, 16])
    assert product.code == (
        f"# In file {__file__}({line_of('out = self.matmul(')})/ out = self.matmul(x, self.weight)/",
    )
    assert (summed.operator, summed.shape) == ("AllReduce", [8, 16])
    assert re.fullmatch(r"forward_op_\d+", summed.instance)
    wanted = {
        "op": "sum", "rank_list": "(0, 1, 2, 3)", "group_ranks": "0-1-2-3", "fusion": "0", "index": "0",
        "group": "4-6301172352641561019", "group_rank_ids": "(0, 1, 2, 3)",
    }  # fmt: skip
    assert summed.attrs.items() >= wanted.items()
    assert cut.operator == "StridedSlice"
    assert cut.operands.endswith(", (0, 0), (8, 4), (1, 1)")
    assert (cut.shapes, cut.shape) == ([[8, 16]], [8, 4])
    assert re.fullmatch(r"redistribution_op_\d+StridedSlice", cut.instance)
    assert (relu.operator, relu.instance, relu.shape, relu.in_strategy) == ("ReLU", "relu", [8, 4], ((2, 4),))
    assert (load.operator, load.shape) == ("Load", [4, 16])
    assert "w2" in load.operands
    assert (second.instance, second.shapes, second.shape) == ("matmul2", [[8, 4], [4, 16]], [8, 16])
    check_case(CASES["doc-003-ir"]["expected"], [product, summed, cut, relu, load, second])


def line_of(text: str) -> int:
    (number, *_) = [
        n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip().startswith(text)
    ]
    return number


def check_case(expected: list[Any], lines: list[Read]) -> None:
    """The specification's own form: operator, shapes or attributes of its operands, shape."""
    assert len(expected) == len(lines)
    for (operator, *what, shape), line in zip(expected, lines, strict=True):
        assert operator.split()[0] == line.operator
        assert shape == line.shape
        for own in what:
            if isinstance(own, list):
                assert own == line.shapes
                continue
            shown = {**line.attrs, "operands": line.operands}
            for name, value in own.items():
                text = f"({', '.join(map(str, value))})" if isinstance(value, list) else value
                if name == "group_prefix":
                    assert line.attrs["group"].startswith(text)
                elif name in ("begin", "end", "strides"):
                    assert text in shown["operands"]
                else:
                    assert line.attrs[name] == text


def test_other_ranks_print_their_own_groups_and_slices(printed: Printed) -> None:
    for rank in range(RANKS):
        lines = read(files(printed, "quick start", rank, "18_execute_*.ir"))
        (cut,) = [line for line in lines if line.operator == "StridedSlice"]
        column = 4 * (rank % 4)
        assert cut.operands.endswith(f"(0, {column}), (8, {column + 4}), (1, 1)")
        summed = next(line for line in lines if line.operator == "AllReduce")
        members = tuple(range(4)) if rank < 4 else tuple(range(4, 8))
        assert summed.attrs["rank_list"] == str(members)
        assert summed.attrs["group"] == group_name(members)
        assert summed.attrs["group_ranks"] == group_ranks_name(members)


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_is_printed_is_what_the_ranks_sent(printed: Printed, case: str) -> None:
    for rank, sent in enumerate(printed[1]):
        path = files(printed, case, rank, "18_execute_*.ir")
        shown = [line.message for line in read(path) if line.operator in KINDS]
        assert shown + backward(path) == sent[case]
        assert sent[case], "something was sent"


def test_data_parallelism_sends_nothing_but_the_loss_and_the_gradients(printed: Printed) -> None:
    path = files(printed, "data", 0, "18_execute_*.ir")
    lines = read(path)
    assert [line.message[0] for line in lines if line.operator in KINDS] == ["all_reduce"]
    assert {kind for kind, _, _ in backward(path)} == {"all_reduce"}
    assert named(lines, "matmul").in_strategy == ((8, 1), (1, 1))
    assert named(lines, "matmul").shapes == [[2, 32], [32, 16]]
    assert [line.instance for line in lines if line.operator in ("MatMul", "ReLU")] == ["matmul", "relu", "matmul2"]


def test_columns_become_rows_by_one_all_to_all(printed: Printed) -> None:
    lines = read(files(printed, "dlrm", 5, "18_execute_*.ir"))
    between = lines[lines.index(named(lines, "matmul")) + 1 : lines.index(named(lines, "matmul2"))]
    (exchange,) = [line for line in between if line.operator in KINDS]
    assert exchange.operator == "AlltoAll"
    assert (exchange.shapes, exchange.shape) == ([[16, 2]], [2, 16])
    assert (exchange.attrs["concat_dim"], exchange.attrs["split_dim"]) == ("1", "0")
    assert named(lines, "matmul").shapes == [[16, 32], [32, 2]]
    assert named(lines, "matmul2").shapes == [[2, 16], [16, 16]]


class Several(ms.nn.Cell):
    """Primitives of one kind in one line, one with another name in PyTorch, and one that makes several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = ms.ops.MatMul(), ms.ops.MatMul(transpose_b=True), ms.ops.ReLU()
        self.batched = ms.ops.BatchMatMul()

    def construct(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.second(self.cut(self.first(x, w)), w)
        return self.batched(y, y)


def test_primitives_without_strategy_are_found_by_their_line(tmp_path: Path) -> None:
    net = Several()
    graph = capture(net, (torch.zeros(2, 4, 4), torch.zeros(4, 4)), loss=lambda output: output.sum()).graph
    file = tmp_path / "page.ir"
    file.write_text("\n".join(begin(graph, {}, Origins(net, graph)).text(())))
    lines = [line for line in read(file) if line.instance]
    assert [(line.operator, line.instance, line.variable) for line in lines] == [
        ("MatMul", "first", "y"), ("ReLU", "cut", "y"), ("MatMul", "second", "y"),
        ("BatchMatMul", "batched", "matmul_2"),
    ]  # fmt: skip
    assert lines[2].attrs["transpose_b"] == "true"


def small_gpt() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, str]]:
    return make_gpt(), batch(8, 0), TENSOR_PARALLEL


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, str]]:
    """Split rows of images: neighbours exchange the rows at their edges."""
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 4)
    return nn.Sequential(*layers), (torch.zeros(4, 3, 8, 8),), {"0": "y0@tp", "2": "y0@tp"}


@pytest.mark.parametrize("build", [small_gpt, convolutions])
def test_any_program_of_the_library_can_be_printed(build: Callable[[], Any], tmp_path: Path) -> None:
    """Every rank's text has the collectives of its program; planned are the bytes of the rank that sends most."""
    model, inputs, strategies = build()
    loss = None if build is small_gpt else lambda output: output.square().mean()
    plan = sw.plan(model, inputs, 4, mesh=sw.Mesh(dp=2, tp=2), strategies=strategies, loss=loss)
    captured = capture(model, inputs, loss=loss)
    spmd = program_of(plan, captured.graph, training=True)
    most: dict[int, int] = {}
    planned = spmd.forward_collectives()
    for rank in range(4):
        path = tmp_path / f"{rank}.ir"
        text = Execution(localize(spmd, rank), {}, Origins(model, captured.graph)).text()
        path.write_text("\n".join(text) + "\n")
        shown = [line.message for line in read(path) if line.operator in KINDS]
        assert [(kind, ranks) for kind, ranks, _ in shown] == [
            (own.kind, tuple(sorted(spmd.mesh.group(own.axes, rank)))) for own in planned
        ]
        most = {number: max(own[2], most.get(number, 0)) for number, own in enumerate(shown)}
        assert len(backward(path)) == len(spmd.backward_collectives()) > 0
    assert list(most.values()) == [own.num_bytes for own in planned]
    kinds = {own.kind for own in planned}
    assert kinds >= ({"all_reduce", "all_gather"} if build is small_gpt else {"halo_exchange"}), kinds


@pytest.mark.parametrize(
    ("source", "target", "operators"),
    [
        ("[8, 12]", "[8@dp, 12@tp]", ["StridedSlice"]),
        ("[8@dp, 12]", "[8@dp, 12@tp]", ["StridedSlice"]),
        ("[8, (3 4)]", "[8, (3 4@tp)]", ["Reshape", "StridedSlice", "Reshape"]),
        ("[8@dp, (3 4)]", "[8@dp, (3 4@tp)]", ["Reshape", "StridedSlice", "Reshape"]),
        ("[7, 12]", "[7@(dp,tp), 12]", ["StridedSlice"]),
    ],
)
def test_printed_slices_are_the_slices_that_are_taken(source: str, target: str, operators: list[str]) -> None:
    mesh = sw.Mesh(dp=2, tp=2)
    before, after = parse_layout(source, mesh), parse_layout(target, mesh)
    for rank in range(4):
        part = OverlapPart(before, mesh.coordinates(rank), after, mesh.coordinates(rank))
        x = torch.arange(float(np.prod(before.local_shape(mesh.coordinates(rank))))).view(
            before.local_shape(mesh.coordinates(rank))
        )
        expected = part.read(x)
        steps = list(slicing(part))
        assert [operator for operator, _, _ in steps] == operators
        for operator, args, shape in steps:
            if operator == "Reshape":
                x = x.reshape(args[0])
            else:
                begins, ends, strides = args
                x = x[tuple(map(slice, begins, ends, strides))]
            assert x.shape == shape
        assert torch.equal(x, expected)
