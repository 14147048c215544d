"""Finite checks, loss scales and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardwise.mindspore.parallel._utils import _get_device_num, _get_gradients_mean

import shardwise.mindspore as ms
from raising import raises
from shardwise.errors import ShardwiseError
from shardwise.mindspore import communication as D
from shardwise.mindspore import nn, ops
from shardwise.mindspore.amp import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    StaticLossScaler,
    all_finite,
    init_register,
    init_status,
)
from shardwise.mindspore.context import reset_auto_parallel_context, set_auto_parallel_context
from shardwise.mindspore.nn.wrap import DistributedGradReducer
from shardwise.mindspore.ops.communication import counting
from shardwise.mindspore.ops.composite import clip_by_global_norm, clip_by_value

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_element_anywhere_is_found(bad: float, dtype: torch.dtype) -> None:
    good = [torch.ones(3, dtype=dtype), (torch.ones((), dtype=dtype), None), torch.arange(3)]
    assert all_finite(good).item() is True
    assert all_finite(good, init_status()).item() is True
    for place in range(3):
        wrong = torch.ones(3, dtype=dtype)
        wrong[place] = bad
        assert all_finite([*good, (wrong,)]).item() is False
        assert not all_finite(wrong)
    assert all_finite([])
    assert init_register().tolist() == [0.0] * 8
    with raises(TypeError, "is not a tensor"):
        all_finite([1.0])


def agreed() -> Any:
    D.init()
    grads = [torch.tensor([1.0, math.inf if dist.get_rank() == 1 else 2.0])]
    with counting() as record:
        own = all_finite(grads)
        together = all_finite(grads, group=D.HCCL_WORLD_COMM_GROUP)
        fine = all_finite([torch.ones(2)], group=D.HCCL_WORLD_COMM_GROUP)
    return own.item(), together.item(), fine.item(), [exchange.kind for exchange in record]


def test_ranks_agree_when_they_are_asked_to(run_ranks: RunRanks) -> None:
    assert run_ranks(agreed, 2) == [(own, False, True, ["all_reduce"] * 2) for own in (True, False)]


# ------------------------------------------------------------------------------------------------------------ scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_scaling_and_unscaling_keep_dtypes_and_nests(dtype: torch.dtype) -> None:
    scaler = StaticLossScaler(1024)
    given = (torch.tensor([1.0, -0.5], dtype=dtype), [torch.tensor(2.0, dtype=dtype)])
    scaled = scaler.scale(given)
    assert scaled[0].tolist() == [1024, -512]
    assert scaled[1][0].tolist() == 2048
    assert (scaled[0].dtype, type(scaled[1])) == (dtype, list)
    back = scaler.unscale(scaled)
    assert torch.equal(back[0], given[0])
    assert torch.equal(back[1][0], given[1][0])
    assert scaler.adjust(False) is False
    assert float(scaler.scale_value) == 1024
    with raises(TypeError, "is not a tensor"):
        scaler.scale(3.0)


def test_a_scaled_loss_has_scaled_gradients() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    scaler = DynamicLossScaler(4096, 2, 10)
    scaler.scale((x**2).sum()).backward()
    assert torch.equal(scaler.unscale((x.grad,))[0], 2 * x.detach())


def test_the_overflow_status_of_devices_is_that_of_losses_and_gradients() -> None:
    status = ms.ops.NPUAllocFloatStatus()()

    @ms.ops.composite.add_flags(has_effect=True)
    def overflows(x: float) -> float:
        ms.ops.NPUClearFloatStatus()(status)
        ms.grad(lambda x: (1 / x).sum())(ms.Tensor([x]))
        ms.ops.NPUGetFloatStatus()(status)
        return float(ms.ops.ReduceSum()(status, (0,)))

    assert [overflows(x) for x in (2.0, 0.0, 1e-30, 3.0)] == [0.0, 1.0, 1.0, 0.0]
    ms.ops.NPUClearFloatStatus()(status)
    scale = ms.Parameter(torch.ones(1), "scale")
    for net, found in ((nn.Dense(1, 1), 0.0), (lambda x: scale / x, 1.0), (nn.Dense(1, 1), 1.0)):  # of all networks
        weights = net.trainable_params() if isinstance(net, nn.Cell) else [scale]
        ms.value_and_grad(net, None, weights)(ms.Tensor([[0.0]]))
        assert ms.ops.NPUGetFloatStatusV2()(status).tolist() == [found, *[0.0] * 7]


def test_settings_beside_a_level_say_which_cells_are_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    def dtypes(level: str, **settings: Any) -> list[str]:
        net = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4))
        ms.build_train_network(net, nn.SGD(net.trainable_params()), level=level, **settings)
        seen: list[torch.dtype] = []
        for cell in net:
            construct = cell.construct
            vars(cell)["construct"] = lambda x, own=construct: (seen.append(x.dtype), own(x))[1]
        net(torch.rand(3, 4))
        return [str(own).removeprefix("torch.") for own in seen]

    half, single = "float16", "float32"
    for level, settings, want in (
        ("O2", {}, [half, single]), ("O3", {}, [half, half]), ("O0", {}, [single, single]),
        ("O2", {"keep_batchnorm_fp32": False}, [half, half]), ("O3", {"keep_batchnorm_fp32": True}, [half, single]),
        ("O3", {"cast_model_type": torch.bfloat16}, ["bfloat16"] * 2),
        ("O0", {"cast_model_type": ms.float16}, [half, half]),
        ("O2", {"cast_model_type": ms.float32}, [single, single]),
    ):  # fmt: skip
        assert dtypes(level, **settings) == want, (level, settings)
    assert not capsys.readouterr().err
    dtypes("O0", boost_level="O1")
    assert "boost_level='O1') has no effect here" in capsys.readouterr().err
    with raises(TypeError, "Model: got an unexpected keyword argument 'level'"):
        ms.Model(nn.Dense(4, 4), level="O2")
    with raises(ValueError, "O1 lists the cells"):
        ms.Model(nn.Dense(4, 4), amp_level="O1", keep_batchnorm_fp32=False)


SERIES = [*[True] * 4, False, True, True, *[False] * 9, True]


def reference_scales(scale: float, factor: float, window: int) -> list[float]:
    """In plain words: what the scale is after every step of the series."""
    good, found = 0, []
    for finite in SERIES:
        good = good + 1 if finite else 0
        if not finite:
            scale = max(1.0, scale / factor)
        elif good == window:
            scale, good = scale * factor, 0
        found.append(scale)
    return found


@pytest.mark.parametrize(("factor", "window"), [(2, 2), (2, 1), (4, 3)])
def test_a_dynamic_scale_grows_after_good_steps_and_shrinks_after_bad_ones(factor: float, window: int) -> None:
    scaler, manager = DynamicLossScaler(8, factor, window), DynamicLossScaleManager(8, factor, window)
    found, managed = [], []
    for finite in SERIES:
        assert scaler.adjust(torch.tensor(finite)) is True
        manager.update_loss_scale(not finite)
        found.append(float(scaler.scale_value))
        managed.append(manager.get_loss_scale())
    assert found == managed == reference_scales(8, factor, window)
    assert min(found) == 1.0


def test_a_scale_does_not_grow_out_of_float32() -> None:
    scaler = DynamicLossScaler(2.0**127, 2, 1)
    scaler.adjust(True)
    assert float(scaler.scale_value) == 2.0**127
    scaler.adjust(False)
    assert float(scaler.scale_value) == 2.0**126


def test_managers_tell_what_happens_on_overflow() -> None:
    fixed = FixedLossScaleManager(64, drop_overflow_update=False)
    fixed.update_loss_scale(True)
    assert (fixed.get_loss_scale(), fixed.get_drop_overflow_update(), fixed.get_update_cell()) == (64, False, None)
    assert (FixedLossScaleManager().get_loss_scale(), FixedLossScaleManager().get_drop_overflow_update()) == (128, True)
    dynamic = DynamicLossScaleManager()
    assert (dynamic.get_loss_scale(), dynamic.get_drop_overflow_update()) == (2**24, True)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: StaticLossScaler(0), ValueError),
        (lambda: StaticLossScaler("1"), TypeError),
        (lambda: DynamicLossScaler(8, 1, 2), ValueError),
        (lambda: DynamicLossScaler(8, 2, 0), ValueError),
        (lambda: DynamicLossScaler(8, 2, 1.5), TypeError),
        (lambda: FixedLossScaleManager(0.5), ValueError),
        (lambda: DynamicLossScaleManager(True), TypeError),
    ],
)
def test_wrong_scales_are_refused(make: Callable[[], Any], kind: type[Exception]) -> None:
    with raises(kind, "fix:"):
        make()


# ---------------------------------------------------------------------------------------------------------- clipping


def test_gradients_are_clipped_to_their_common_norm() -> None:
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, dtype=torch.float64, generator=random) for shape in [(3, 4), (5,), ()]]
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    clipped = clip_by_global_norm(tuple(grads), clip_norm=1.0)
    for one, grad, parameter in zip(clipped, grads, parameters, strict=True):
        torch.testing.assert_close(one, grad / norm, rtol=1e-14, atol=0)
        assert parameter.grad is not None
        torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=0)  # torch's adds 1e-6 to the norm
    assert all(map(torch.equal, clip_by_global_norm(grads, clip_norm=norm * 1.01), grads))
    torch.testing.assert_close(clip_by_global_norm(grads, 1.0, use_norm=2 * norm)[0], grads[0] / (2 * norm))


def test_the_norm_of_halves_does_not_overflow() -> None:
    (clipped,) = clip_by_global_norm([torch.full((4,), 60000.0, dtype=torch.float16)], 2.0)
    assert clipped.dtype == torch.float16
    assert clipped.tolist() == [1.0] * 4


def test_clipping_is_differentiable() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: clip_by_global_norm((x,), 1.0)[0], (x,))


def test_values_are_clipped_to_bounds() -> None:
    x = torch.arange(5)
    assert clip_by_value(x, 1, 3).tolist() == [1, 1, 2, 3, 3]
    assert clip_by_value((x, [x]), clip_value_max=2)[1][0].tolist() == [0, 1, 2, 2, 2]
    assert clip_by_value(x.double(), torch.full((5,), 2.5, dtype=torch.float64)).tolist() == [2.5, 2.5, 2.5, 3, 4]
    assert clip_by_value(x, 3, 1).tolist() == [1] * 5


def test_wrong_clips_are_refused() -> None:
    ones = [torch.ones(2)]
    for make, kind in [
        (lambda: clip_by_global_norm(ones, 0), ValueError),
        (lambda: clip_by_global_norm(ones, "1"), TypeError),
        (lambda: clip_by_global_norm(ones[0]), TypeError),
        (lambda: clip_by_global_norm([]), TypeError),
        (lambda: clip_by_value(ones[0]), ValueError),
        (lambda: clip_by_value(1.0, 0), TypeError),
    ]:
        with raises(kind, "fix:"):
            make()


class Halved(nn.Cell):
    """A product by columns and one by rows: both weights are split over two devices."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(4)
        self.up = ms.Parameter(torch.randn(6, 8, generator=values), "up")
        self.down = ms.Parameter(torch.randn(8, 4, generator=values), "down")
        self.bias = ms.Parameter(torch.randn(4, generator=values), "bias")
        self.by_columns = ops.MatMul().shard(((1, 1), (1, 2)))
        self.by_rows = ops.MatMul().shard(((1, 2), (2, 1)))
        self.tanh = ops.Tanh().shard(((1, 2),))

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return (self.by_rows(self.tanh(self.by_columns(x, self.up)), self.down) + self.bias).square().mean()


class Staged(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(5)
        self.first, self.last = nn.Dense(6, 6), nn.Dense(6, 6)
        for number, dense in enumerate((self.first, self.last)):
            dense.weight.set_data(torch.randn(6, 6, generator=values))
            dense.pipeline_stage = number

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean()


class Clipping(nn.Cell):
    def construct(self, grads: Any) -> Any:
        return ops.clip_by_global_norm(grads, 0.02)


def clipped_step(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Clipped gradients of a loop of one's own, of the same twice, and what is said of gradients that are computed
    with."""
    ms.set_seed(1)  # alike on ranks and here, whatever ran before
    if kind == "stages":
        net: nn.Cell = Staged()
        parameters = [*net.first.get_parameters(), *net.last.get_parameters()]
        cell: nn.Cell = nn.PipelineCell(net, 2).set_train()
    else:
        cell = net = Halved().set_train()
        parameters = [*net.get_parameters()]
    x = torch.linspace(-1, 1, 24).reshape(4, 6) ** 3
    _, grads = ms.value_and_grad(cell, None, parameters)(x)
    scaled = ops.HyperMap()(lambda grad: grad * 3.0, StaticLossScaler(2.0).unscale(grads))
    once = clip_by_global_norm(scaled, 0.25)
    each = [
        *ops.HyperMap()(lambda grad: ops.clip_by_norm(grad, 0.01), grads),
        *ops.HyperMap()(lambda grad: nn.ClipByNorm()(grad, ms.Tensor(0.01)), grads),
        *Clipping()(grads),
    ]
    refused = ""
    try:
        clip_by_global_norm([grad * 2 for grad in grads])
    except ShardwiseError as error:
        with raises(ShardwiseError, "DistributedGradReducer", "already reduced"):
            DistributedGradReducer(parameters)(grads)
        refused = str(error)
    return [*once, *each], [*clip_by_global_norm(once, 0.125)], refused


CLIPPED = {
    "products": {"parallel_mode": "semi_auto_parallel", "full_batch": True},
    "stored": {"parallel_mode": "semi_auto_parallel", "full_batch": True, "enable_parallel_optimizer": True,
               "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}},
    "stages": {"parallel_mode": "semi_auto_parallel", "full_batch": True, "pipeline_stages": 2},
}  # fmt: skip


def clipped_on_rank() -> dict[str, Any]:
    found = {}
    for kind, options in CLIPPED.items():
        reset_auto_parallel_context()
        set_auto_parallel_context(**options)
        found[kind] = clipped_step(kind)
    reset_auto_parallel_context()
    return found


def check_parts(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Check what ranks have of a tensor: all of it, or parts that are it together."""
    joined = [torch.cat(parts, dim) for dim in range(whole.dim()) if len({part.dim() for part in parts}) == 1]
    own = [part for part in (*parts, *joined) if part.shape == whole.shape]
    assert own, [part.shape for part in parts]
    for part in own:
        torch.testing.assert_close(torch.Tensor(part), torch.Tensor(whole), rtol=2e-5, atol=1e-7)


def test_split_gradients_are_clipped_to_the_norm_of_the_whole_ones(run_ranks: RunRanks) -> None:
    want = {kind: clipped_step(kind) for kind in CLIPPED}
    for once, twice, said in want.values():
        assert not said
        assert math.sqrt(sum(float(grad.square().sum()) for grad in once[: len(twice)])) == pytest.approx(
            0.25, rel=1e-5
        ), "it clips"
        assert math.sqrt(sum(float(grad.square().sum()) for grad in twice)) == pytest.approx(0.125, rel=1e-5)
    ranks = run_ranks(clipped_on_rank, 2)
    for kind, (once, twice, _) in want.items():
        for place, wholes in enumerate((once, twice)):
            for whole, *parts in zip(wholes, *(found[kind][place] for found in ranks), strict=True):
                check_parts(whole, parts)
        assert all("not known as the gradient of a parameter" in found[kind][2] for found in ranks), kind


# ----------------------------------------------------------------------------------------------- a step of document 004


def half_of_a_step(in_order_of_the_document: bool) -> Any:
    """Gradients of a loss over this rank's half of the batch, through everything that document 004's step does."""
    D.init()
    set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    weights, rows = weights_and_rows()
    reducer = DistributedGradReducer(weights, _get_gradients_mean(), _get_device_num())
    scaler = DynamicLossScaler(1024, 2, 1)
    with counting() as record:
        status = init_register()
        grads = torch.autograd.grad(scaler.scale(loss_of(weights, rows.chunk(2)[D.get_rank()])), weights)
        if in_order_of_the_document:  # which clips this rank's own, scaled gradients
            grads = reducer(clip_by_global_norm(grads, clip_norm=1.0))
            status = all_finite(grads, status)
            grads = scaler.unscale(grads)
        else:
            grads = scaler.unscale(reducer(grads))
            status = all_finite(grads, status)
            grads = clip_by_global_norm(grads, clip_norm=1.0)
        scaler.adjust(status)
    reset_auto_parallel_context()
    return grads, bool(status), float(scaler.scale_value), [exchange.kind for exchange in record]


def weights_and_rows() -> tuple[list[torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    weights = [torch.randn(shape, dtype=torch.float64, generator=random) for shape in [(4, 5), (5, 3)]]
    return [w.requires_grad_() for w in weights], torch.randn(6, 4, dtype=torch.float64, generator=random)


def loss_of(weights: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    return ((rows @ weights[0]).tanh() @ weights[1]).square().mean()


def test_a_step_in_the_right_order_is_that_of_one_device_and_sends_its_gradients_only(run_ranks: RunRanks) -> None:
    weights, rows = weights_and_rows()
    whole = clip_by_global_norm(torch.autograd.grad(loss_of(weights, rows), weights), 1.0)
    for grads, finite, scale, kinds in run_ranks(half_of_a_step, 2, False):
        assert (finite, scale, kinds) == (True, 2048, ["all_reduce"])
        for own, expected in zip(grads, whole, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


def test_the_order_of_the_document_runs_and_clips_every_ranks_scaled_gradients(run_ranks: RunRanks) -> None:
    weights, rows = weights_and_rows()
    halves = [torch.autograd.grad(1024 * loss_of(weights, half), weights) for half in rows.chunk(2)]
    clipped = [clip_by_global_norm(grads, 1.0) for grads in halves]
    for grads, finite, scale, kinds in run_ranks(half_of_a_step, 2, True):
        assert (finite, scale, kinds) == (True, 2048, ["all_reduce"])
        for own, *parts in zip(grads, *clipped, strict=True):
            torch.testing.assert_close(own, torch.stack(parts).mean(0) / 1024, rtol=1e-12, atol=1e-15)
