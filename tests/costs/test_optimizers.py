"""What optimizers hold, measured of torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from costs.live_bytes import LiveBytes
from raising import raises
from shardwise.costs.optimizers import (
    HELD,
    VARIANTS,
    decomposition_bytes,
    may_wait_on_host,
    owners_of,
    parse_optimizer,
    state_bytes,
    states_of,
    temporary_bytes,
    text_of_optimizer,
    update_of,
    whole_matrix_bytes,
)
from shardwise.errors import ShardwiseError

SIZES = (1000, 300, 700, 700)
OF_TORCH = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
}
FUSED = ("adamw", "adam", "adagrad", "momentum", "sgd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OF_TORCH)
def test_states_and_temporaries_are_those_of_torch(name: str, variant: str, dtype: torch.dtype) -> None:
    """Beside them an update makes numbers, such as steps: less than a hundred bytes a parameter."""
    if variant == "fused" and name not in FUSED:
        pytest.skip("torch has no such kernel")
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
    kind, options = OF_TORCH[name]
    how = {} if variant == "single" else {variant: True}
    optimizer = kind(parameters, lr=1e-3, **options, **({"foreach": False} | how))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sizes = [size * dtype.itemsize for size in SIZES]
    state = [t for own in optimizer.state.values() for t in own.values() if isinstance(t, torch.Tensor) and t.dim()]
    assert sum(t.nbytes for t in state) == states_of(name) * sum(sizes)
    with LiveBytes() as live:
        optimizer.step()
    expected = temporary_bytes(f"{name} {variant}", sizes, foreach=False)
    assert expected <= live.peak < expected + 100 * len(SIZES)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_holds_next_to_nothing(foreach: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in SIZES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with LiveBytes() as live:
        torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)
    assert live.peak < 100 * len(SIZES)


def test_the_default_is_that_of_the_device() -> None:
    assert temporary_bytes("adamw", [100, 10], foreach=True) == 110
    assert temporary_bytes("adamw", [100, 10], foreach=False) == 200
    assert temporary_bytes("adamw", [10, 100], foreach=False) == 210
    assert temporary_bytes("adamw fused", [100, 10], foreach=True) == 0
    assert temporary_bytes("adamw", [], foreach=False) == temporary_bytes("sgd", [8], foreach=True) == 0


def test_other_names_are_refused() -> None:
    with raises(ShardwiseError, "'adamww'", "not known", fix=", ".join(HELD)):
        parse_optimizer("adamww")
    with raises(ShardwiseError, "'slow'", "'adamw slow'", "update variant"):
        parse_optimizer("adamw slow")
    with raises(ShardwiseError, "'adamw '", "update variant"):
        parse_optimizer("adamw ")
    assert parse_optimizer("adamw fused") == ("adamw", "fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kind"), [("muon", torch.optim.Muon), ("adafactor", torch.optim.Adafactor)])
def test_optimizers_of_whole_matrices_hold_no_more_than_counted(name: str, kind: Any, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((256, 256), (256, 256), (512, 64))]
    optimizer = kind(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    sizes = [parameter.nbytes for parameter in parameters]
    state = [t for own in optimizer.state.values() for t in own.values() if t.dim()]
    assert states_of(name) * sum(sizes) <= sum(t.nbytes for t in state) <= (states_of(name) + 0.02) * sum(sizes)
    with LiveBytes() as live:
        optimizer.step()
    assert live.peak <= 1.01 * temporary_bytes(name, sizes, foreach=True) <= 1.7 * live.peak


def test_matrices_are_divided_among_devices_in_order() -> None:
    assert owners_of([(5, None), (3, None), (3, None), (1, None)], 2) == [0, 1, 1, 0]
    assert owners_of([(3, 1), (9, None), (3, 1), (1, 0)], 2) == [1, 0, 1, 0], "those with states stay"
    # Four whole matrices of 100 bytes over four devices: each owns one, and holds a quarter of each.
    matrices = [(100, (5, 5))] * 4
    assert whole_matrix_bytes("muon", 100, matrices, 4) == (100, 2 * 100 + 5 * 100)
    assert whole_matrix_bytes("adafactor", 100, matrices, 4) == (0, 3 * 100 + 2 * 100)
    assert update_of("muon", foreach=True).flops_of((4, 8)) == update_of("muon", foreach=True).flops_of((8, 4))
    assert update_of("muon", foreach=False).flops_of((4, 8)) == 5 * (2 * 2 * 4 * 4 * 8 + 2 * 4 * 4 * 4)
    assert not update_of("muon", foreach=True).flops_of((8,))
    assert not may_wait_on_host("muon")
    for wrong in ("muon on host", "adafactor fused"):
        with raises(ShardwiseError, wrong, "whole matrices", fix=wrong.partition(" ")[0]):
            parse_optimizer(wrong)


def test_states_of_square_matrices_and_of_blocks_are_counted_by_shape() -> None:
    """By hand, for a matrix of 8 x 4 in float32: 128 bytes, squares of 64 + 16 elements."""
    matrix = 128, (8, 4)
    assert state_bytes("shampoo", *matrix) == 2 * (64 + 16) * 4, "statistics and roots"
    assert state_bytes("soap", *matrix) == 2 * (64 + 16) * 4 + 2 * 128, "and the moments of Adam"
    assert state_bytes("shampoo", 16, (4,)) == 2 * 16 * 4
    assert state_bytes("soap", 16, (4,)) == 2 * 16, "Adam on vectors"
    assert state_bytes("soap", 64, (8, 4)) == 2 * (64 + 16) * 4 + 2 * 64, "in bf16, its squares in float32"
    assert state_bytes("shampoo", 4 * 20_000 * 8, (20_000, 8)) == 2 * 64 * 4, "no square of a vocabulary"
    assert state_bytes("shampoo", 0, (0, 8)) == 0
    # One byte an element and state, four bytes for each of ceil(5,000 / 2,048) = 3 blocks.
    for name in ("adam8bit", "adamw8bit"):
        assert state_bytes(name, 4 * 5000, (50, 100)) == 2 * (5000 + 4 * 3)
    assert state_bytes("lbfgs", *matrix) == (2 * 100 + 2) * 128
    assert state_bytes("lbfgs 10", *matrix) == (2 * 10 + 2) * 128
    assert state_bytes("adamw", *matrix) == states_of("adamw") * 128


def test_work_of_square_matrices_and_histories_is_that_of_their_steps() -> None:
    def flops(name: str, shape: tuple[int, ...]) -> float:
        return update_of(name, foreach=True).flops_of(shape)

    # 8 x 4: a product of [8, 8] with the matrix takes 2 * 8 * 8 * 4 = 512 FLOPs, of [4, 4] 256.
    assert flops("shampoo", (8, 4)) == 2 * (512 + 256) + 11 * (512 + 64)
    assert flops("soap", (8, 4)) == pytest.approx(4 * (512 + 256) + 14 / 30 * (512 + 64))
    assert flops("soap", (4,)) == flops("adam8bit", (8, 4)) == flops("lbfgs", (8, 4)) == 0
    assert update_of("lbfgs 10", foreach=False).passes == 12 + 10 * 10
    # Four squares of the largest dim while one is decomposed.
    assert decomposition_bytes("shampoo", [(128, (8, 4)), (64, (4, 4))]) == 4 * 64 * 4
    assert decomposition_bytes("muon", [(128, (8, 4))]) == decomposition_bytes("soap", []) == 0


def test_each_device_has_its_own_squares_or_all_of_a_history() -> None:
    # Two matrices of 8 x 4 on two devices, which hold half of each: one whole matrix and its squares for each device.
    matrices = [(128, (8, 4))] * 2
    decomposed = 2 * 128 + 2 * 128 + 4 * 64 * 4  # whole tensors, temporaries, squares
    assert whole_matrix_bytes("shampoo", 128, matrices, 2) == (640, decomposed)
    assert whole_matrix_bytes("adam8bit", 128, matrices, 2) == (2 * (32 + 4), 3 * 128 + 2 * 128)
    # LBFGS has 12 tensors of both, parameters and gradients. An update takes four more, while two of gradients arrive
    # and two devices are sent the shards of 128 bytes, in parts and as one message.
    assert whole_matrix_bytes("lbfgs 5", 128, matrices, 2) == ((12 + 2) * 256, (4 + 2) * 256 + 2 * 2 * 128)
    for wrong in ("soap fused", "adam8bit on host", "lbfgs fused", "lbfgs 10 on host"):
        with raises(ShardwiseError, wrong, "whole matrices"):
            parse_optimizer(wrong)
    with raises(ShardwiseError, "'10'", "'muon 10'", "update variant"):
        parse_optimizer("muon 10")


def test_states_of_lbfgs_are_those_of_torch() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((16, 16), (32, 4))]
    optimizer = torch.optim.LBFGS(parameters, lr=0.1, history_size=3, max_iter=8)
    weights = [torch.arange(1.0, 1 + p.numel()).reshape(p.shape) / p.numel() for p in parameters]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((p - 1).square() * weight).sum() for p, weight in zip(parameters, weights, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    optimizer.step(closure)
    [state] = optimizer.state.values()
    vectors = [state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]]
    counted = sum(state_bytes(text_of_optimizer(optimizer), p.nbytes, p.shape) for p in parameters)
    assert sum(vector.nbytes for vector in vectors) == counted


def test_a_plan_prices_the_exchange_and_the_products_of_whole_matrices() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False, device="meta") for _ in range(8)))
    how = {"mesh": sw.Mesh(dp=8), "zero": 3, "loss": lambda y: y.square().mean(), "search": "sharding_propagation"}
    x = torch.empty(64, 512, device="meta")
    names = ("momentum", "muon", "shampoo", "soap", "lbfgs", "adam8bit")
    of = {name: sw.plan(model, x, "h100-1x8", optimizer=name, **how) for name in names}
    seconds = {name: found.prediction.step_seconds for name, found in of.items()}
    num_bytes = {name: found.prediction.num_bytes for name, found in of.items()}
    assert seconds["muon"] > seconds["momentum"]
    assert seconds["shampoo"] > seconds["soap"] > seconds["adam8bit"], (
        "decompositions in each step, in each tenth, in none"
    )
    assert "loss of one rank of 8, with the states of muon" in str(of["muon"].plan.survives())
    # A device owns one of eight matrices of 1 MiB, or has the history of all.
    mib = 512 * 512 * 4
    assert num_bytes["soap"] - num_bytes["adam8bit"] == (2 * 2 + 2) * mib - 2 * (512 * 512 + 4 * 128)
    assert num_bytes["lbfgs"] > (2 * 100 + 2) * 8 * mib
    assert "loss of one rank of 8, with the states of lbfgs" in str(of["lbfgs"].plan.survives())
    with raises(sw.errors.PlanError, "'lbfgs'", fix="without stages="):
        sw.plan(model, x, "h100-1x8", optimizer="lbfgs", stages=2)
    held = of["muon"].plan.survives().held
    assert sum(sizes.get("3.weight", 0) for where, sizes in held.items() if len(where) == 1) > 512 * 512 * 4


def test_an_optimizer_is_counted_under_the_text_of_its_class_and_settings() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, 4))]
    assert text_of_optimizer(torch.optim.AdamW(parameters, fused=True)) == "adamw fused"
    assert text_of_optimizer(torch.optim.SGD(parameters, lr=0.1)) == "sgd"
    assert text_of_optimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) == "momentum"
    assert text_of_optimizer(torch.optim.Muon(parameters)) == "muon", "its momentum is no SGD's"
    assert text_of_optimizer(torch.optim.Adafactor(parameters, foreach=True)) == "adafactor"
    assert text_of_optimizer(torch.optim.LBFGS) == text_of_optimizer(torch.optim.LBFGS(parameters)) == "lbfgs"
    assert text_of_optimizer(torch.optim.LBFGS(parameters, history_size=10)) == "lbfgs 10"
    assert text_of_optimizer(torch.optim.ASGD) == ""
