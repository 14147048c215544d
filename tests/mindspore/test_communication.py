"""Every communication operator and its gradient on four gloo ranks, against the arithmetic of one process."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launch.gloo_ranks import run_on_ranks
from raising import raises
from shardwise.mindspore import communication as D
from shardwise.mindspore.communication import comm_func, management
from shardwise.mindspore.mint import distributed
from shardwise.mindspore.ops.communication import (
    AllGather,
    AllReduce,
    AlltoAll,
    Broadcast,
    ReduceOp,
    ReduceScatter,
    counting,
)
from spec.cases import CASES

RunRanks = Callable[..., list[Any]]
Tensor = torch.Tensor
GROUPS = {"world": (0, 1, 2, 3), "outer": (0, 3), "inner": (1, 2), "three": (0, 1, 2), "alone": (2,)}


def inputs(shape: tuple[int, ...], num_ranks: int = 4) -> list[Tensor]:
    """Every rank's tensor: random, with some equal elements and some zeros, and its row of cotangents' seed."""
    random = torch.Generator().manual_seed(7)
    found = [torch.randn(shape, dtype=torch.float64, generator=random) for _ in range(num_ranks)]
    for tensor in found:
        tensor.view(-1)[0] = 1.5  # equal on all ranks
    found[0].view(-1)[1] = found[-1].view(-1)[2] = 0.0
    for tensor in found[1:3]:
        tensor.view(-1)[3] = 0.0  # of a product two factors
    return found


def cotangents(shape: tuple[int, ...], rank: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank))


def _size(group: str | None) -> int:
    return D.get_group_size(group or D.GlobalComm.WORLD_COMM_GROUP)


OPERATORS: dict[str, Callable[[str | None], Any]] = {
    "all_reduce_sum": lambda group: AllReduce(ReduceOp.SUM, group),
    "all_reduce_max": lambda group: AllReduce(ReduceOp.MAX, group),
    "all_reduce_min": lambda group: AllReduce(ReduceOp.MIN, group),
    "all_reduce_prod": lambda group: AllReduce(ReduceOp.PROD, group),
    "all_gather": AllGather,
    "reduce_scatter": lambda group: ReduceScatter(group=group),
    "all_to_all": lambda group: AlltoAll(_size(group), 1, -1, group),
    "all_to_all_back": lambda group: AlltoAll(_size(group), -1, 0, group),
}


def exchanged(pieces: list[Tensor], split: int, concat: int) -> list[Tensor]:
    parts = [piece.chunk(len(pieces), split) for piece in pieces]
    return [torch.cat([row[i] for row in parts], concat) for i in range(len(pieces))]


# In one process: what the members of a group get from what they have.
WHOLE: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "all_reduce_sum": lambda xs: [torch.stack(xs).sum(0)] * len(xs),
    "all_reduce_prod": lambda xs: [torch.stack(xs).prod(0)] * len(xs),
    "all_gather": lambda xs: [torch.cat(xs)] * len(xs),
    "reduce_scatter": lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs))),
    "all_to_all": lambda xs: exchanged(xs, 1, -1),
    "all_to_all_back": lambda xs: exchanged(xs, -1, 0),
}
EXTREMA: dict[str, Callable[..., Tensor]] = {"all_reduce_max": torch.amax, "all_reduce_min": torch.amin}
SHAPE = (12, 12, 24)


def run_operators() -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """(result, gradient) on this rank, by operator and group, of the groups that it is in."""
    D.init()
    found = {}
    for name, members in GROUPS.items():
        group = None if name == "world" else name
        if group is not None:
            D.create_group(group, list(members))
        if D.get_rank() in members:
            for operator, make in OPERATORS.items():
                x = inputs(SHAPE)[D.get_rank()].requires_grad_()
                result = make(group)(x)
                result.backward(cotangents(tuple(result.shape), D.get_rank()))
                assert x.grad is not None
                found[operator, name] = result.detach(), x.grad
    return found


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], tuple[Tensor, Tensor]]]:
    """What every rank gets from every operator; the ranks are started once for all of them."""
    return run_on_ranks(run_operators, 4, (), tmp_path_factory.mktemp("ranks"), 60.0)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("operator", WHOLE)
def test_an_operator_is_the_derivative_of_the_sum_of_all_losses(
    on_ranks: list[dict[Any, Any]], operator: str, group: str
) -> None:
    members, key = GROUPS[group], (operator, group)
    xs = [inputs(SHAPE)[rank].requires_grad_() for rank in members]
    results = WHOLE[operator](xs)
    losses = [(y * cotangents(tuple(y.shape), rank)).sum() for y, rank in zip(results, members, strict=True)]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), xs)
    assert [key in found for found in on_ranks] == [rank in members for rank in range(4)]
    for rank, result, gradient in zip(members, results, gradients, strict=True):
        torch.testing.assert_close(on_ranks[rank][key][0], result.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(on_ranks[rank][key][1], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("operator", EXTREMA)
def test_an_extremum_sends_its_gradient_to_every_element_that_is_it(
    on_ranks: list[dict[Any, Any]], operator: str, group: str
) -> None:
    members, key = GROUPS[group], (operator, group)
    xs = torch.stack([inputs(SHAPE)[rank] for rank in members])
    result = EXTREMA[operator](xs, 0)
    total = torch.stack([cotangents(SHAPE, rank) for rank in members]).sum(0)
    for rank, x in zip(members, xs, strict=True):
        assert torch.equal(on_ranks[rank][key][0], result)
        torch.testing.assert_close(on_ranks[rank][key][1], total * (x == result), rtol=1e-12, atol=1e-12)


def broadcast_from_each() -> Any:
    D.init()
    found = []
    for root in range(4):
        x = inputs((3, 4))[D.get_rank()].requires_grad_()
        one, two = Broadcast(root)((x, 2 * x))
        seed = cotangents((3, 4), D.get_rank())
        one.backward(seed)
        found.append((one.detach(), two.detach(), Broadcast(root)(x).detach(), x.grad, seed))  # type: ignore[union-attr]
    return found


def test_a_broadcast_gives_everyone_the_roots_tensors_and_keeps_each_cotangent(run_ranks: RunRanks) -> None:
    for found in run_ranks(broadcast_from_each, 4):
        for root, (one, two, single, gradient, seed) in enumerate(found):
            assert torch.equal(one, inputs((3, 4))[root])
            assert torch.equal(two, 2 * one)
            assert torch.equal(single, one)
            assert torch.equal(gradient, seed)


def extremes_scattered() -> Any:
    D.init()
    x = inputs((8, 3))[D.get_rank()].requires_grad_()
    result = {op: ReduceScatter(op)(x) for op in ("max", "min", "prod")}
    with raises(RuntimeError, 'the reduction "max" has no gradient'):
        result["max"].sum().backward()
    return {op: tensor.detach() for op, tensor in result.items()}


def test_extrema_and_products_can_be_scattered_but_not_differentiated(run_ranks: RunRanks) -> None:
    stacked = torch.stack(inputs((8, 3)))
    whole = {"max": stacked.amax(0), "min": stacked.amin(0), "prod": stacked.prod(0)}
    for rank, found in enumerate(run_ranks(extremes_scattered, 4)):
        for op, result in found.items():
            torch.testing.assert_close(result, whole[op].chunk(4)[rank], rtol=1e-14, atol=0)


def second_derivative() -> Any:
    D.init()
    x = inputs((5,))[D.get_rank()].requires_grad_()
    (first,) = torch.autograd.grad((AllReduce()(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.detach(), second


def test_gradients_can_be_differentiated_again(run_ranks: RunRanks) -> None:
    total = torch.stack(inputs((5,))).sum(0)
    for first, second in run_ranks(second_derivative, 4):  # four losses, and four sums of their gradients
        torch.testing.assert_close(first, 4 * 3 * total**2)
        torch.testing.assert_close(second, 16 * 6 * total)


# ------------------------------------------------------------------------------------------------------- who is who


def who_is_who() -> Any:
    D.init("nccl")
    rank = D.get_rank()
    assert (rank, D.get_group_size()) == (dist.get_rank(), 4)
    assert (D.get_local_rank(), D.get_local_rank_size()) == (rank, 4)
    D.create_group("odd", [3, 1])
    own = D.get_rank("odd") if rank in (1, 3) else None
    assert D.get_group_size("odd") == 2
    assert D.get_process_group_ranks("odd") == [1, 3]
    assert D.get_world_rank_from_group_rank("odd", 1) == 3
    assert D.get_group_rank_from_world_rank(3, "odd") == 1
    with raises(RuntimeError, "rank 0 is not in the group", '"odd"', "1-3"):
        D.get_group_rank_from_world_rank(0, "odd")
    with raises(ValueError, "has 2 ranks", "group_rank_id", '"odd"'):
        D.get_world_rank_from_group_rank("odd", 2)
    with raises(ValueError, "get_local_rank", '"odd"', "not the group of all ranks"):
        D.get_local_rank("odd")
    if rank in (0, 2):
        with raises(ValueError, "is not in the group", "1-3"):
            AllReduce(group="odd")(torch.ones(1))
    dist.barrier()  # whoever is quick would else let go of a group to which its peer still connects
    D.destroy_group("odd")
    with raises(ValueError, 'no group "odd"'):
        D.get_rank("odd")
    D.create_group("odd", (0, 2))
    assert [D.get_rank(name) for name in management.WORLD_GROUPS.values()] == [rank] * 4
    assert D.GlobalComm.WORLD_COMM_GROUP == D.NCCL_WORLD_COMM_GROUP
    dist.barrier()
    D.release()
    assert not dist.is_initialized()
    return own


def test_ranks_and_groups_know_their_members(run_ranks: RunRanks) -> None:
    assert run_ranks(who_is_who, 4) == [None, 0, None, 1]


def sums_in_groups() -> list[float]:
    """On a rank: the sums of its groups, of which the ranks have 3, 1 and 2."""
    D.init()
    found = []
    for name, members in (("a", [0, 1]), ("b", [0, 2]), ("again", [0, 2])):
        D.create_group(name, members)
        if D.get_rank() in members:
            found.append(float(AllReduce(group=name)(torch.tensor(10.0 ** D.get_rank()))))
    D.destroy_group("b")
    D.create_group("b", [0, 2])
    if D.get_rank() != 1:
        found.append(float(AllReduce(group="b")(torch.tensor(1.0))))
    return found


def test_members_may_have_different_numbers_of_groups(run_ranks: RunRanks) -> None:
    assert run_ranks(sums_in_groups, 3) == [[11.0, 101.0, 101.0, 2.0], [11.0], [101.0, 101.0, 2.0]]


def in_torchs_words() -> dict[str, Any]:
    """On one of two ranks: what mint.distributed writes, and comm_func returns."""
    distributed.init_process_group("hccl")
    rank = distributed.get_rank()
    found = {name: torch.zeros(size) for name, size in (("gathered", 4), ("scattered", 2), ("summed", 1), ("own", 1))}
    mine = torch.tensor([1.0, 2.0]) + 10 * rank
    handle = distributed.all_gather_into_tensor(found["gathered"], mine, async_op=True)
    assert handle is not None
    assert handle.wait()
    assert distributed.reduce_scatter_tensor(found["scattered"], torch.cat([mine, mine])) is None
    distributed.all_reduce(found["summed"].add_(rank + 1), group=distributed.new_group([0, 1]))
    distributed.scatter(found["own"], [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
    parts = [torch.zeros(1), torch.zeros(1)]
    distributed.all_to_all(parts, [mine[:1], mine[1:]])
    distributed.broadcast(mine, src=1)
    objects: list[Any] = [None, None]
    distributed.all_gather_object(objects, {"rank": rank})
    distributed.barrier()
    x = torch.ones(1, requires_grad=True)
    total, none = comm_func.all_reduce(x * (rank + 1))
    total.backward()
    sizes = [1, 2] if rank == 0 else [2, 1]
    uneven, _ = comm_func.all_to_all_single_with_output_shape((3,), torch.arange(3.0) + 10 * rank, sizes, sizes)
    return found | {"parts": torch.cat(parts), "broadcast": mine, "objects": objects, "total": total.detach(),
                    "gradient": x.grad, "uneven": uneven, "none": none}  # fmt: skip


def test_collectives_in_torchs_words_write_into_tensors(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(in_torchs_words, 2)):
        want = {
            "gathered": [1, 2, 11, 12], "scattered": [12, 14], "summed": [3], "own": [5 + rank],
            "parts": [[1, 11], [2, 12]][rank], "broadcast": [11, 12], "total": [3], "gradient": [2 * (rank + 1)],
            "uneven": [[0, 10, 11], [1, 2, 12]][rank],
        }  # fmt: skip
        for name, numbers in want.items():
            assert found[name].tolist() == numbers, name
        assert (found["objects"], found["none"]) == ([{"rank": 0}, {"rank": 1}], None)


def test_bad_groups_are_refused() -> None:
    for arguments, kind, message in [
        (("g", [0, 1]), ValueError, ('"g"', "[0, 1]", "there are the ranks 0 to 0")),
        (("g", [0, 0]), ValueError, ("[0, 0]", "name every rank once")),
        (("g", []), ValueError, ("create_group('g', [])", "at least one rank")),
        (("", [0]), ValueError, ("create_group('', [0])", "give a name")),
        (("hccl_world_group", [0]), ValueError, "already"),
        (("g", 0), TypeError, ("create_group('g', 0)", "a list of ranks")),
        (("g", ["0"]), TypeError, ("rank_ids", "of type str")),
    ]:
        with raises(kind, message):
            D.create_group(*arguments)  # type: ignore[arg-type]
    with raises(ValueError, '"hccl_world_group"', "group of all ranks"):
        D.destroy_group("hccl_world_group")
    with raises(TypeError, 0, "name of a group"):
        D.get_rank(0)  # type: ignore[arg-type]


def test_a_group_has_the_name_that_the_reference_prints() -> None:
    assert management.group_name((0, 1, 2, 3)) == "4-6301172352641561019"  # document 003
    ranks, expected = [0, 5, 3, 7, 1], {"rank_list_name": "0-1-3-5-7", "group_name_pattern": r"^5-\d+$"}
    case = CASES["group-name"]
    assert (case["ranks"], case["expected"]) == (ranks, expected)
    assert management.group_ranks_name(ranks) == "0-1-3-5-7"
    assert management.group_name(ranks) == management.group_name(sorted(ranks))
    count, digits = management.group_name(ranks).split("-")
    assert count == "5"
    assert digits.isdecimal()


def test_a_single_process_is_a_group_of_one_and_exchanges_nothing() -> None:
    assert (D.get_rank(), D.get_group_size(), D.get_local_rank(), D.get_local_rank_size()) == (0, 1, 0, 1)
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    with counting() as record:
        for op in (AllReduce(), AllReduce("prod"), AllGather(), ReduceScatter(), Broadcast(0), AlltoAll(1, 0, 1)):
            x.grad = None
            result = op(x)
            result.backward(torch.ones_like(result))
            assert torch.equal(result.detach(), x.detach())
            assert x.grad is not None
            assert torch.equal(x.grad, torch.ones_like(x))
    assert record == []
    assert not dist.is_initialized()


def test_ranks_of_a_launcher_are_asked_to_call_init_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    for function in (D.get_rank, D.get_group_size, D.get_local_rank):
        with raises(RuntimeError, 1, 2, "init() first"):
            function()
    with raises(RuntimeError, "before release"):
        D.release()


def connected(backends: list[str | None]) -> tuple[str, str]:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        for name in backends:
            D.init(name)
    return dist.get_backend(), told.getvalue()


def test_init_takes_what_the_machine_has_and_rank_0_says_so_once(run_ranks: RunRanks) -> None:
    first, second = run_ranks(connected, 2, [None, "gloo", "hccl", "nccl", "hccl"])
    expected = 'the ranks communicate through gloo, which fits the CPU here, not through "hccl"'
    assert first == ("gloo", f"shardwise.mindspore: {expected}\n")
    assert second == ("gloo", "")


def test_init_refuses_other_backends() -> None:
    with raises(ValueError, 'did you mean "nccl"'):
        D.init("ncll")
    with raises(TypeError, "backend_name", 1, "of type int"):
        D.init(1)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_named() -> None:
    for make, message in [
        (lambda: AllReduce("summ"), 'did you mean "sum"'),
        (lambda: AlltoAll(2, 0, 1)(torch.ones(2, 2)), "split_count is 2, but"),
        (lambda: AlltoAll(1, 2, 1)(torch.ones(2, 2)), "there is no dim 2 in [2, 2]"),
        (lambda: Broadcast(1)(torch.ones(2)), ("rank 1 is not in the group", "[0]")),
        (lambda: AllReduce(group="nowhere")(torch.ones(2)), 'no group "nowhere"'),
    ]:
        with raises(ValueError, message):
            make()
    for make, message in [
        (lambda: AllReduce(group=3), (3, "of type int")),
        (lambda: AllReduce(op=1), ("op", 1, "of type int")),
        (lambda: Broadcast("0"), ("'0'", "of type str")),
        (lambda: AllReduce()(np.ones(2)), "called with ndarray"),
    ]:
        with raises(TypeError, message):
            make()


def indivisible() -> None:
    D.init()
    for op in (ReduceScatter(), AlltoAll(4, 0, 0)):
        with raises(ValueError, "dim 0 of [6] is 6", "divisible by 4", fix="pad it to 8"):
            op(torch.ones(6))


def test_a_part_that_is_no_whole_number_is_refused_before_anything_is_sent(run_ranks: RunRanks) -> None:
    run_ranks(indivisible, 4)
