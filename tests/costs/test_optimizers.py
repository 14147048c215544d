"""What optimizers hold, measured of torch's own."""

from __future__ import annotations

import pytest
import torch

from costs.live_bytes import LiveBytes
from raising import raises
from shardwise.costs.optimizers import HELD, VARIANTS, parse_optimizer, states_of, temporary_bytes
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
