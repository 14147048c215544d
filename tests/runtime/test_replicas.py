"""The check that copies agree: what it finds, on real ranks, and that it changes nothing else."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from runtime.interpreted import interpret_section
from runtime.small_gpt import batch, make_gpt, make_plan
from runtime.training import Trained, call_and_differentiate, check_close, step_or_differentiate, train
from shardwise.graph.written_out import SEED
from shardwise.layouts.text import parse_layout
from shardwise.runtime import compiled
from shardwise.runtime.replicas import Fingerprint, _leaders
from shardwise.runtime.step import Half, Observer

# ------------------------------------------------------------------------------------------------------- fingerprints


FINGERPRINT = Fingerprint(torch.device("cpu"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def some_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (8 * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (3, 2**14 + 5), (1, 2**17)], ids=str)
def test_equal_bits_have_equal_fingerprints_however_they_lie_in_memory(dtype: torch.dtype, shape: Any) -> None:
    tensor = some_tensor(dtype, *shape)
    found = FINGERPRINT(tensor)
    assert (found.dtype, found.shape) == (torch.int64, ())
    spread = torch.zeros(*shape, 3, dtype=dtype)
    spread[..., 1] = tensor
    shifted = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(shape)
    for other in (tensor.clone(), spread[..., 1], shifted):
        assert torch.equal(FINGERPRINT(other), found)


@given(st.sampled_from(DTYPES), st.integers(1, 40_000), st.data())
def test_one_bit_that_differs_always_shows(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = some_tensor(dtype, size)
    changed = tensor.clone()
    memory = changed.view(torch.uint8)
    memory[data.draw(st.integers(0, memory.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not torch.equal(FINGERPRINT(changed), FINGERPRINT(tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [3, 6, 1024, 2**15, 2**18])
def test_other_signs_and_another_order_show(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(1, size + 1).to(dtype)
    zero = torch.zeros(size, dtype=dtype)
    others = (tensor, -tensor, tensor.flip(0), tensor.roll(1), zero, -zero, zero / 0)
    found = {FINGERPRINT(other).item() for other in others}
    assert len(found) == len(others)


def test_rows_and_columns_of_large_tensors_are_not_confused() -> None:
    tensor = torch.zeros(2**15 + 1, dtype=torch.int32)
    tensor[2**14 + 3] = 1  # row 1, column 3
    other = torch.zeros_like(tensor)
    other[1] = 1
    assert not torch.equal(FINGERPRINT(tensor), FINGERPRINT(other))


def test_no_gradient_flows_through_a_fingerprint() -> None:
    assert not FINGERPRINT(torch.ones(3, requires_grad=True)).requires_grad


def test_copies_are_sought_along_invariant_and_replicated_axes_only() -> None:
    mesh = sw.Mesh(dp=2, tp=2)
    texts = ["[8, 8]", "[8@dp, 8]", "[8@dp, 8] replicated(tp)", "[8, 8] partial(sum@tp)", "[8@dp, 8@tp]"]
    leaders = _leaders([None, *(parse_layout(text, mesh) for text in texts)], mesh)
    assert leaders.t().tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 2, 2],
        [0, 0, 2, 2],
        [0, 1, 0, 1],
        [0, 1, 2, 3],
    ]


# --------------------------------------------------------------------------------------------------------- real ranks


class Nudge(TorchDispatchMode):
    """The first result of one operator is off by the smallest amount on this rank."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return (nudged(result[0]), *result[1:]) if func is self.target else result


def nudged(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    flat = changed.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], torch.inf))
    return changed


def test_an_error_of_an_observed_operator_is_told_as_it_is() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(operator.truediv, (graph.placeholder("x"), 0)))
    nothing: Any = None
    half = Half(fx.GraphModule(nn.Module(), graph), nothing, nothing, "forward", False)
    with pytest.raises(ZeroDivisionError, match=r"^float division by zero$"):
        half.run(Observer(), 1.0)


def break_copies() -> dict[str, str]:
    """On a rank of Mesh(dp=2, tp=2): what is said about everything that goes wrong on rank 3."""
    plan, wrong = make_plan("tp", layers=1) if dist.get_rank() == 0 else None, dist.get_rank() == 3
    par = sw.parallelize(make_gpt(layers=1), plan, check_replicas=1)
    local = sw.parallelize(make_gpt(layers=1), plan, check_replicas=1, inputs="local")
    ids, labels = batch(8, 0)
    part = slice(0, 4) if dist.get_rank() < 2 else slice(4, 8)
    found = {"nothing": message(lambda: (par(ids, labels).backward(), par.step(ids, labels)))}
    found["nothing, local"] = message(lambda: local.step(ids[part], labels[part]))

    other = ids.clone()
    other[0, 0] += int(wrong)  # in a row of which rank 3 uses nothing
    found["batch"] = message(lambda: par.step(other, labels))
    found["input"] = message(lambda: local.step((ids + int(wrong))[part] % 50, labels[part]))
    with Nudge(torch.ops.aten.native_layer_norm.default if wrong else None):
        found["operator"] = message(lambda: par.step(ids, labels))

    par.zero_grad()
    bias = par.get_parameter("blocks.0.attention.out.bias")
    hook = bias.register_hook(lambda grad: nudged(grad) if wrong else None)
    found["gradient, step"] = message(lambda: par.step(ids, labels))
    par.zero_grad()
    found["gradient, backward"] = message(lambda: par(ids, labels).backward())
    hook.remove()

    with torch.no_grad():
        bias.copy_(nudged(bias) if wrong else bias)
    found["parameter"] = message(lambda: par.step(ids, labels))
    found["setting"] = message(lambda: sw.parallelize(make_gpt(layers=1), plan, check_replicas=5 if wrong else -1))
    par.eval()
    found["evaluation"] = message(lambda: par(ids, labels))
    return found


def test_what_differs_first_is_named_on_every_rank(run_ranks: RunRanks) -> None:
    found, *others = run_ranks(break_copies, 4)
    assert all(other == found for other in others)
    for untouched in ("nothing", "nothing, local", "evaluation"):
        assert found[untouched] == ""
    assert "copies of the batch: input args[0] are not equal: rank 3 differs from ranks 0, 1, 2" in found["batch"]
    assert 'or only its part: inputs="local"' in found["batch"]
    assert "copies of input args[0] are not equal: rank 3 differs from rank 2" in found["input"]
    assert "i64[8@dp, 8], copied along tp" in found["input"]
    first, op, value, *_ = found["operator"].split("\n")
    assert first == (
        "copies of the result of blocks.0.attention_norm/layer_norm are not equal: rank 3 differs from rank 2"
    )
    assert re.fullmatch(r"  op:     blocks\.0\.attention_norm/layer_norm \(gpt\.py:\d+\)", op)
    assert value == "  value:  layer_norm: f64[8@dp, 8, 24], copied along tp"
    bias = "blocks.0.attention.out.bias are not equal: rank 3 differs from ranks 0, 1, 2"
    assert f"copies of parameter {bias}" in found["parameter"]
    for how in ("step", "backward"):
        assert f"copies of gradient of {bias}" in found[f"gradient, {how}"]
        assert "  where:  backward, call " in found[f"gradient, {how}"]
    assert "check_replicas is the number of training calls between checks, not -1" in found["setting"]


def train_with_and_without() -> dict[str, tuple[list[Trained], list[str]]]:
    """On a rank of Mesh(dp=2, tp=2): the same steps, never checked, and in two of four, and the comparisons."""
    plan = make_plan("tp", layers=1) if dist.get_rank() == 0 else None
    found = {}
    for every in (None, 3):
        par = sw.parallelize(make_gpt(layers=1), plan, check_replicas=every)
        comparisons: list[str] = []
        if par._replicas is not None:
            counted = par._replicas.compare
            par._replicas.compare = lambda *args, c=counted, to=comparisons: (to.append(args[-1]), c(*args))
        optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2)
        ways = (step_or_differentiate, call_and_differentiate) * 2
        steps = [train(par, [batch(8, step)], optimizer, differentiate=way) for step, way in enumerate(ways)]
        found[str(every)] = steps, comparisons
    return found


def test_a_checked_step_has_the_bits_of_an_unchecked_one(run_ranks: RunRanks) -> None:
    for found in run_ranks(train_with_and_without, 4):
        steps, comparisons = found["None"]
        assert comparisons == []
        assert found["3"][1] == ["forward", "backward"] * 2
        for own, expected in zip(found["3"][0], steps, strict=True):
            assert own.losses == expected.losses
            check_close(own.gradients, expected.gradients, rtol=0.0, atol=0.0, what="checked")


class Noisy(torch.nn.Module):
    """Dropout, whose masks need a seed, and running statistics, which every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.head = torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.dropout(self.norm(x))), labels)


def train_noisily() -> dict[str, Any]:
    """On a rank: the same calls unchecked, checked, and compiled (no code is generated, which takes long)
    with every second call checked."""
    compiled.compile_with_inductor = interpret_section
    torch.manual_seed(0)
    model, x, labels = Noisy(), torch.randn(8, 6), torch.arange(8) % 4
    plan = (
        sw.plan(model, (x, labels), sw.Cluster.local(2), search="sharding_propagation")
        if dist.get_rank() == 0
        else None
    )
    found: dict[str, Any] = {}
    for name, compile, every in (("plain", False, None), ("checked", False, 1), ("compiled", True, 2)):
        par = sw.parallelize(model, plan, seed=7, compile=compile, check_replicas=every)
        found[name] = [par.step(x, labels).item() for _ in range(3)]
        found[f"{name} mean"] = par.get_buffer("norm.running_mean").clone()
    found["seeds"] = message(lambda: sw.parallelize(model, plan, seed=dist.get_rank()) and None)
    par = sw.parallelize(model, plan, seed=7, check_replicas=1)
    par.step(x, labels)
    state = par.state_dict()  # a checkpoint of another job, on one rank
    par.load_state_dict({**state, SEED: state[SEED] + dist.get_rank()})
    found["seed"] = message(lambda: par.step(x, labels))
    return found


def test_random_masks_and_running_statistics_agree_unless_the_seeds_do_not(run_ranks: RunRanks) -> None:
    for found in run_ranks(train_noisily, 2):
        assert len(set(found["plain"])) == 3  # every call has its own masks
        assert found["checked"] == found["plain"]
        assert torch.equal(found["checked mean"], found["plain mean"])
        assert found["compiled"] == pytest.approx(found["plain"], rel=1e-5)
        torch.testing.assert_close(found["compiled mean"], found["plain mean"])
        assert "ranks draw from different seeds: seed=0 on rank 0 and seed=1 on rank 1" in found["seeds"]
        assert "copies of the seed of dropout are not equal: rank 1 differs from rank 0" in found["seed"]
