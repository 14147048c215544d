"""Models that cannot be captured: the message names the user's line and the fix."""

from __future__ import annotations

import copy
import random as python_random
from contextlib import suppress
from threading import Event, Thread

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from graph.against_eager import check_against_eager
from proving import prove
from raising import raises
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        return self.function(self, x * self.weight)


class Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x if x.sum() > 0 else x

    @staticmethod
    def backward(ctx, gradient):
        return 7 * gradient


def branch(self, x):
    return x + 1 if x.sum() > 0 else x


def number(self, x):
    return x * x.sum().item()


def float_of(self, x):
    return x * float(x.sum())


def loop(self, x):
    for _ in range(int(x.sum())):
        x = x + 1
    return x


def boolean_index(self, x):
    return x[x > 0].sort()[0].sum()


def nonzero(self, x):
    return torch.nonzero(x).max()


def unique(self, x):
    return torch.unique(x)


def masked_select(self, x):
    return x.masked_select(x > 0)


def mismatch(self, x):
    return x @ torch.ones(3, 3)


def to_numpy(self, x):
    return torch.from_numpy(x.detach().numpy())


def flex(self, x):
    heads = x.reshape(1, 1, *x.shape[-2:])
    seen = create_block_mask(lambda b, h, q, k: q >= k, None, None, x.shape[-2], x.shape[-2], device="cpu")
    return flex_attention(heads, heads, heads, block_mask=seen).sum()


def custom_function(self, x):
    return Chosen.apply(x)


def packed(self, x):
    lengths = [4, 2, 2, 1]
    return pack_padded_sequence(x, lengths, batch_first=True).data.sum()


def packed_list(self, x):
    return pack_sequence([x[0], x[1, :2]]).data.sum()


def tensor_hook(self, x):
    x.register_hook(lambda gradient: gradient * 0.5)
    return x.sum()


def accumulation_hook(self, x):
    x = x.detach().requires_grad_()
    x.register_post_accumulate_grad_hook(lambda leaf: None)
    return x.sum()


def retained(self, x):
    y = x * 2
    y.retain_grad()
    return y.sum()


def node_hook(self, x):
    str(x)  # torch itself may ask for the node
    x.grad_fn.register_prehook(lambda gradients: gradients)
    return x.sum()


def edge_of(self, x):
    torch.autograd.graph.get_gradient_edge(x).node.register_hook(lambda *gradients: None)
    return x.sum()


def exchanges(self, x):
    return torch.ops._c10d_functional.all_reduce(x, "sum", "0")


def reentrant(self, x):
    return checkpoint(torch.sin, x, use_reentrant=True)


def write_parameter(self, x):
    self.weight.data.add_(1)
    return x


def inference(self, x):
    with torch.inference_mode():
        return x * 2


def statistics(self, x):
    return torch.nn.functional.instance_norm(x[None], self.table.clone(), self.table.clone(), use_input_stats=True)


def several_outputs(self, x):
    y, z = torch.empty(4), torch.empty(4, dtype=torch.long)
    return torch.max(self.table[None], 0, out=(y, z))


def write_under_no_grad(self, x):
    with torch.no_grad():
        x.mul_(2)
    return x


def reshape_in_place(self, x):
    y = x + 1
    y.t_()
    return y


def random(self, x):
    return x + torch.poisson(x.exp())


def masked_in_numpy(self, x):
    kept = np.random.rand(4) > 0.5
    return x * torch.tensor(kept)


def left_out_by_python(self, x):
    if python_random.choice([True, False]):
        x = x * 2
    return x


def write_unfolded(self, x):
    y = x * 1
    y.unfold(0, 2, 2).mul_(2)
    return y


def initial_values(self, x):
    return nn.Linear(4, 4)(x)


# function, line below its def, words of the message
def backward_inside(self, x):
    loss = x.sum()
    loss.backward(retain_graph=True)
    return loss


def narrow_product(self, x):
    return nn.functional.linear(x.bfloat16(), torch.ones(4, 4))


def narrow_sum(self, x):
    return torch.zeros(4, 4).index_add_(0, torch.arange(4), x.double())


CASES = [
    (branch, 1, "depends on the data", "torch.where"),
    (number, 1, "", "torch.where"),
    (float_of, 1, "", "tensor"),
    (loop, 1, "", "tensor"),
    (boolean_index, 1, "sort needs the rows selected by a mask", "mask"),
    (nonzero, 1, "max needs the rows selected by a mask", "mask"),
    (unique, 1, "depends", "mask"),
    (masked_select, 1, "the model returns rows selected by a mask", "the mask"),
    (mismatch, 1, (4, 3), "fake"),
    (to_numpy, 1, "numpy", "fake"),
    (flex, 3, "flex_attention in forward", ("scaled_dot_product_attention", "sdpa")),
    (custom_function, 1, ("autograd.Function", "test_capture_errors.Chosen"), "custom_op"),
    (packed, 2, "packed sequence", "padded batch"),
    (packed_list, 1, "packed sequence", "padded batch"),
    (tensor_hook, 1, "register_hook in forward", "autograd.Function"),
    (accumulation_hook, 2, "register_post_accumulate_grad_hook in forward", "parameters"),
    (retained, 2, "retain_grad in forward", "autograd.Function"),
    (node_hook, 2, "grad_fn in forward", "requires_grad"),
    (edge_of, 1, "grad_fn in forward", "autograd.Function"),
    (exchanges, 1, "all_reduce in forward", "the plan adds the communication"),
    (reentrant, 1, "re-entrant", "use_reentrant=False"),
    (write_parameter, 1, ".data", "optimizer"),
    (inference, 2, "inference_mode", "no_grad"),
    (statistics, 1, "running statistics", "track_running_stats=False"),
    (several_outputs, 2, "max writes into max, max_values", "returns its result"),
    (write_under_no_grad, 2, "no_grad", "new tensor"),
    (reshape_in_place, 2, "t_()", "x.t("),
    (random, 1, "poisson", "nn.Dropout"),
    (masked_in_numpy, 1, "numpy", "torch.rand"),
    (left_out_by_python, 1, "in Python or numpy", "torch.rand"),
    (write_unfolded, 2, "unfold", "torch.where"),
    (backward_inside, 2, "backward in forward", "return the loss"),
    (initial_values, 1, "torch.nn.init draws", "__init__"),
    (narrow_product, 1, "linear takes operands of one dtype: input is torch.bfloat16, weight is", ".to"),
    (narrow_sum, 1, "index_add takes operands of one dtype: self is torch.float32, source is torch.float64", ".to"),
]


@pytest.mark.parametrize(("function", "below", "what", "mend"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_error_names_the_line_and_the_mend(function, below, what, mend):
    line = function.__code__.co_firstlineno + below
    with raises(CaptureError, what, mend, source=f"test_capture_errors.py:{line}"):
        capture(Calls(function), (torch.ones(4, 4),))


CAUGHT = {  # how data is read, and what the error calls it
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "complex": lambda x: complex(x.sum()).real,
    "index": lambda x: [1.0, 2.0][x.sum().long()],
    "format": lambda x: len(f"{x.sum():.3f}"),
    "numpy": lambda x: float(x.detach().numpy().sum()),
    "array": lambda x: float(np.asarray(x.detach()).sum()),
    "bool": lambda x: 2.0 if (x > 0).all() else 1.0,
    "contains": lambda x: float(0.0 in x),
    "allclose": lambda x: float(torch.allclose(x, 2 * x)),
    "equal": lambda x: float(torch.equal(x, 2 * x)),
    "data_ptr": lambda x: x.data_ptr() % 7,
    "deepcopy": lambda x: copy.deepcopy(x.detach()).sum(),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).sum(),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_data_that_a_model_tries_to_read_is_refused_though_it_catches_the_error(name):
    def tries(self, x):
        try:
            factor = CAUGHT[name](x)
        except Exception:
            factor = 1.0
        return x * factor

    with raises(CaptureError, name, section="tensor-values"):
        capture(Calls(tries), (torch.ones(4),))


def test_what_capture_refuses_is_refused_though_the_model_catches_it():
    def tries(self, x):
        with suppress(Exception):
            x.register_hook(lambda gradient: gradient * 0)
        return x * 2

    with raises(CaptureError, "register_hook", source="test_capture_errors.py"):
        capture(Calls(tries), (torch.ones(4),))


def test_an_error_that_one_device_raises_as_well_is_the_models_own():
    def tries(self, x):
        try:
            y = x.t().view(-1)
        except (RuntimeError, ValueError):
            y = x.t().reshape(-1)
        with suppress(Exception):
            x @ x
        return y * 2

    check_against_eager(Calls(tries), torch.arange(8.0, dtype=torch.float64).reshape(2, 4))


def test_a_sparse_tensor_is_refused_by_name():
    with raises(CaptureError, "to_sparse", source="test_capture_errors.py"):
        capture(Calls(lambda self, x: x.to_sparse().sum()), (torch.eye(4),))
    module = Calls(lambda self, x: x * 2)
    module.register_buffer("adjacency", torch.eye(4).to_sparse())
    with raises(CaptureError, "adjacency", "sparse_coo", fix="adjacency.to_dense()"):
        capture(module, (torch.eye(4),))


@pytest.mark.parametrize("seed", [0, 1])  # one for each branch
def test_the_line_that_draws_is_found_whatever_is_drawn_and_the_generators_stand_as_after_one_call(seed):
    def draws(self, x):
        x = x + np.random.rand()
        return x * 2 if python_random.random() < 0.5 else x

    python_random.seed(seed)
    np.random.seed(seed)
    draws(None, torch.ones(4))
    expected = python_random.random(), np.random.rand()
    python_random.seed(seed)
    np.random.seed(seed)
    with raises(CaptureError, source=f"test_capture_errors.py:{draws.__code__.co_firstlineno + 1}"):
        capture(Calls(draws), (torch.ones(4),))
    assert (python_random.random(), np.random.rand()) == expected


def test_random_numbers_after_a_seed_that_every_call_sets_are_constants():
    def call(self, x):
        np.random.seed(3)
        return x * torch.tensor(np.random.rand(4))

    assert capture(Calls(call), (torch.ones(4),)).constants


def test_random_numbers_that_another_thread_draws_are_no_fault_of_the_model():
    ready, done = Event(), Event()

    def draw():
        ready.wait(60)
        np.random.rand()
        done.set()

    def call(self, x):
        ready.set()
        done.wait(60)
        return x * 2

    other = Thread(target=draw)
    other.start()
    assert capture(Calls(call), (torch.ones(4),)).graph.ops
    other.join()


def test_an_input_that_is_changed_in_place_is_named():
    class Adds(nn.Module):
        def forward(self, x):
            return x.add_(1)

    with raises(CaptureError, "args[0]", source="test_capture_errors.py"):
        capture(Adds(), (torch.ones(2),))


def test_a_tensor_attribute_that_is_changed_in_place_is_named_and_constants_of_the_call_may_be():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = torch.zeros(3)

        def forward(self, x, counts):
            factors = torch.tensor([1.0, 2.0])
            factors[0] = 5.0
            if counts:
                self.seen[0] += 1
            return (x * factors.mul_(2)).sum() * (1 + self.seen.sum())

    with raises(CaptureError, "register_buffer", source="test_capture_errors.py"):
        capture(Counts(), (torch.ones(2), True))
    capture(Counts(), (torch.ones(2), False))


def test_hooks_for_saved_tensors_in_forward_are_refused_and_those_of_torch_are_not():
    class Saves(nn.Module):
        def __init__(self, hooks):
            super().__init__()
            self.hooks = hooks

        def forward(self, x):
            with self.hooks:
                return x.sin().sum()

    saving = torch.autograd.graph
    with raises(CaptureError, "saved_tensors_hooks", source="test_capture_errors.py"):
        capture(Saves(saving.saved_tensors_hooks(lambda tensor: tensor * 0, lambda tensor: tensor)), (torch.ones(2),))
    capture(Saves(saving.save_on_cpu()), (torch.ones(2),))


def test_a_weight_outside_the_module_is_named():
    outside = nn.Linear(4, 4)

    class Uses(nn.Module):
        def forward(self, x):
            return torch.nn.functional.linear(x, outside.weight)

    with raises(CaptureError, "[4, 4]", "parameter", source="test_capture_errors.py"):
        capture(Uses(), (torch.ones(2, 4),))


def test_a_meta_attribute_that_is_no_buffer_is_named():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(4, device="meta")

        def forward(self, x):
            return x + self.table

    with raises(CaptureError, "register_buffer", op="Holds"):
        capture(Holds(), (torch.ones(4),))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: nn.functional.conv2d(x[None, None], y[None, None]),
        lambda x, y: nn.functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda x, y: nn.functional.grid_sample(x[None, None], y.reshape(1, 2, 4, 2), align_corners=False),
        lambda x, y: x.index_copy(0, torch.arange(4), y),
        lambda x, y: x.index_put((torch.arange(4),), y),
        lambda x, y: torch.addmm(y, x, x),
        lambda x, y: torch.cdist(x, y),
    ],
    ids=["convolution", "loss", "samples", "copy", "put", "sum", "distances"],
)
def test_operands_of_two_dtypes_are_refused_where_kernels_take_one(call):
    """Fake tensors let them through."""

    class Narrow(nn.Module):
        def forward(self, x):
            return call(x, x.double())

    with pytest.raises(RuntimeError, match=r"(?i)type|Double"):
        Narrow()(torch.rand(4, 4))
    with raises(CaptureError, "torch.float64", source="test_capture_errors.py"):
        capture(Narrow(), (torch.rand(4, 4),))


def test_a_forward_that_was_compiled_on_its_own_is_captured_as_before() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.rand(3, 4).double()
    before = capture(module, (x,)).graph
    for owner in (module[0], module):
        owner.forward = torch.compile(owner.forward, backend="eager")
    assert capture(module, (x,)).graph.ops == before.ops
    plan = sw.plan(module, (x,), 2, loss=lambda out: out.square().sum(), mode="data_parallel")
    prove(module, (x,), plan, loss=lambda out: out.square().sum())
    around = module[2].forward
    module[2].forward = lambda rows: around(rows)
    with raises(CaptureError, [2, 4], source="test_capture_errors.py", fix="m.forward"):
        capture(module, (x,))


REFUSED = {  # inputs of two layers and their loss: what the message has
    "whole numbers": (
        (torch.ones(8, 4, dtype=torch.int64), torch.rand(8, 2)),
        None,
        ("torch.int64", "torch.float32"),
        "0",
    ),
    "other features": ((torch.rand(8, 5), torch.rand(8, 2)), None, (), "0"),
    "no samples": ((torch.rand(0, 4), torch.rand(0, 2)), None, (0,), None),
    "no number": ((torch.rand(8, 4), torch.rand(8, 2)), lambda out, y: (out - y).sum().item(), (), None),
    "a whole number": ((torch.rand(8, 4), torch.rand(8, 2)), lambda out, y: (out > y).sum(), ("torch.int64",), None),
    "a number per sample": ((torch.rand(8, 4), torch.rand(8, 2)), lambda out, y: (out - y).sum(1), ([8],), None),
}


@pytest.mark.parametrize(("inputs", "loss", "values", "op"), REFUSED.values(), ids=REFUSED)
def test_inputs_and_losses_that_no_step_can_have_are_named(inputs, loss, values, op) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with raises(CaptureError, *values, op=op):
        sw.plan(module, inputs, 2, loss=loss or nn.functional.mse_loss)


class Experts(nn.Module):
    """Every expert on the rows that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = x.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out.index_add_(0, rows, expert(x[rows]))
        return out.sum()


def test_a_loop_over_experts_is_captured_in_masked_form() -> None:
    torch.manual_seed(0)
    module, x = Experts().double(), torch.randn(6, 4, dtype=torch.float64)
    plan = sw.plan(module, (x,), 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    prove(module, (x,), plan)
