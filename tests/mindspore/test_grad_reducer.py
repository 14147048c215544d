"""The gradient reducer on four gloo ranks: what becomes of gradients, and in how many messages they travel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from raising import raises
from shardwise.mindspore import communication as D
from shardwise.mindspore.context import reset_auto_parallel_context, set_auto_parallel_context
from shardwise.mindspore.nn.wrap import DistributedGradReducer
from shardwise.mindspore.ops.communication import AllGather, AllReduce, counting
from shardwise.mindspore.parallel import _utils

RunRanks = Callable[..., list[Any]]
Tensor = torch.Tensor


class Shaped:
    """A parameter, as far as the reducer looks at it."""

    def __init__(self, layerwise_parallel: bool = False) -> None:
        self.layerwise_parallel = layerwise_parallel


KINDS = [torch.float64, torch.float32, torch.float64, torch.float64, torch.bfloat16]
SHAPES = [(3, 4), (5,), (), (2, 2), (8,)]


def gradients(rank: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(rank)
    return [
        torch.randn(shape, dtype=torch.float64, generator=random).to(kind)
        for shape, kind in zip(SHAPES, KINDS, strict=True)
    ]


REDUCERS: list[tuple[dict[str, Any], bool | None, int | None]] = [  # options, mean, degree
    ({}, None, None),
    ({"gradients_mean": True}, None, None),
    ({"gradient_fp32_sync": False}, True, 8),
    ({"comm_fusion": {"openstate": False}}, False, 8),
    ({"all_reduce_fusion_config": [0, 2]}, False, None),
]
BY_SIZE = [13 * 8, 5 * 4, 8 * 4]
MESSAGES = [BY_SIZE, BY_SIZE, [13 * 8, 5 * 4, 8 * 2], [12 * 8, 5 * 4, 1 * 8, 8 * 4], [12 * 8, 5 * 4, 1 * 8, 8 * 4]]
DIVISORS = [1, 4, 8, 1, 1]
WORLD = (0, 1, 2, 3)


def reduced() -> Any:
    D.init()
    found = []
    for options, mean, degree in REDUCERS:
        reset_auto_parallel_context()
        set_auto_parallel_context(parallel_mode="data_parallel", **options)
        reducer = DistributedGradReducer([Shaped(i == 3) for i in range(5)], mean, degree)
        given = gradients(D.get_rank())
        kept = [grad.clone() for grad in given]
        with counting() as record:
            results = reducer(given)
        assert all(map(torch.equal, given, kept))
        assert (_utils._get_device_num(), _utils._get_global_rank()) == (4, D.get_rank())
        found.append((results, [tuple(exchange) for exchange in record]))
    return found


def test_gradients_are_summed_in_few_messages(run_ranks: RunRanks) -> None:
    everyones = [gradients(rank) for rank in range(4)]
    for rank, found in enumerate(run_ranks(reduced, 4)):
        for (results, record), messages, divisor in zip(found, MESSAGES, DIVISORS, strict=True):
            assert record == [("all_reduce", WORLD, num_bytes) for num_bytes in messages]
            for i, result in enumerate(results):
                assert (result.shape, result.dtype) == (SHAPES[i], KINDS[i])
                total = torch.stack([one[i].double() for one in everyones]).sum(0) / divisor
                expected = everyones[rank][i].double() if i == 3 else total
                tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[KINDS[i]]
                torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
        exact = torch.stack([one[4].double() for one in everyones]).sum(0)  # its halves are summed in float32
        assert torch.equal(found[0][0][4], exact.float().bfloat16())


def counted_step() -> Any:
    D.init()
    D.create_group("pair", [0, 1] if D.get_rank() < 2 else [2, 3])
    x = torch.ones(4, 3, requires_grad=True)
    with counting() as record:
        AllGather("pair")(x).sum().backward()
        AllReduce()(x)
    AllReduce()(x)
    return [tuple(exchange) for exchange in record]


def test_what_is_exchanged_is_counted_with_its_gradient_until_the_block_ends(run_ranks: RunRanks) -> None:
    for rank, record in enumerate(run_ranks(counted_step, 4)):
        pair = (0, 1) if rank < 2 else (2, 3)
        num_bytes = 2 * math.prod((4, 3)) * 4
        assert record == [
            ("all_gather", pair, num_bytes),
            ("reduce_scatter", pair, num_bytes),
            ("all_reduce", WORLD, 48),
        ]


def test_a_reducer_in_one_process_changes_nothing_but_the_mean() -> None:
    given = gradients(0)[:3]
    assert all(map(torch.equal, DistributedGradReducer([Shaped()] * 3)(given), given))
    halved = DistributedGradReducer([Shaped()] * 3, mean=True, degree=2)(given)
    assert all(torch.equal(2 * half, grad) for half, grad in zip(halved, given, strict=True))


def test_a_reducer_names_what_does_not_fit() -> None:
    reducer = DistributedGradReducer([Shaped()] * 2)
    with raises(ValueError, "has 2 parameters and is given 1 gradients"):
        reducer(gradients(0)[:1])
    with raises(TypeError, "gradient 1 is None"):
        reducer([torch.ones(1), None])  # type: ignore[list-item]
    with raises(ValueError, "degree is 0"):
        DistributedGradReducer([], degree=0)


def broadcast_parameters() -> Any:
    D.init()
    parameters = [torch.nn.Parameter(torch.full((2,), float(D.get_rank()))) for _ in range(2)]
    parameters[1].layerwise_parallel = True  # type: ignore[attr-defined]
    _utils._broadcast_parameters(parameters)
    return [parameter.tolist() for parameter in parameters]


def test_parameters_become_those_of_rank_0(run_ranks: RunRanks) -> None:
    assert run_ranks(broadcast_parameters, 2) == [[[0.0, 0.0], [float(rank)] * 2] for rank in range(2)]


def test_hand_written_steps_read_the_options() -> None:
    assert (_utils._get_device_num(), _utils._get_gradients_mean(), _utils._get_parallel_mode()) == (
        1,
        False,
        "stand_alone",
    )
    set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=8, full_batch=True)
    assert (_utils._get_device_num(), _utils._get_gradients_mean(), _utils._get_full_batch()) == (8, True, True)
    assert _utils._is_in_data_parallel_mode()
    assert not _utils._is_in_auto_parallel_mode()
    assert _utils._get_pipeline_stages() == 1
    assert not _utils._get_parameter_broadcast()
