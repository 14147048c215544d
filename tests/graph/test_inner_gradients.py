"""Gradients that a model takes inside forward: the graph computes what eager PyTorch does, and so does its gradient."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from graph.against_eager import check_against_eager
from models.gradient_models import BATCH, model_and_inputs
from models.zoo import random_plan
from proving import prove
from raising import raises
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture
from shardwise.graph.interpret import interpret
from shardwise.rules import rule_of
from shardwise.rules.atoms import factor_graph
from shardwise.search.user_choices import rules_of

gradient = torch.autograd.grad


class Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(6)
        self.weight, self.table = nn.Parameter(torch.randn(4, 4)), nn.Embedding(7, 4)
        self.conv, self.wide = nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), nn.ConvTranspose1d(2, 3, 3, stride=2)
        self.groups, self.batch = nn.GroupNorm(2, 6), nn.BatchNorm1d(6)

    def net(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0].cos()


def slope_of(value: Tensor, by: Tensor, **options) -> Tensor:
    return gradient(value, by, create_graph=True, **options)[0]


def variable(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(True)


def through(function):
    """The gradient of a function's sum by an input."""

    def call(self, x):
        y = variable(x)
        return slope_of(function(self, y).square().sum(), y).square().mean()

    return call


def reductions(y):
    return torch.stack([y.norm(dim=1), y.logsumexp(1), y.amax(1), y.std(1), y.softmax(0).mean(1)])


def by_setter(self, x):
    x.requires_grad = True
    return slope_of(self.net(x).sum(), x).exp().mean()


def twice(self, x):
    x.requires_grad_()
    first = slope_of(self.net(x), x, grad_outputs=torch.ones_like(x))
    return slope_of(first[:, 0].sum(), x).square().mean() + first.mean()


def by_weights(self, x):
    loss = self.conv(x.unflatten(1, (2, 2))).tanh().sum()
    of_weight, of_bias = gradient(loss, [self.conv.weight, self.conv.bias], create_graph=True, retain_graph=True)
    return of_weight.square().sum() + of_bias.sum() + loss


def of_transposed(self, x):
    loss = self.wide(x.unflatten(1, (2, 2))).tanh().sum()
    return sum(g.square().sum() for g in gradient(loss, list(self.wide.parameters()), create_graph=True))


def of_a_table(self, x):
    rows = F.embedding(torch.tensor([[1, 2], [1, 5]]), self.table.weight, 5)
    rows = torch.cat([rows, self.table(torch.tensor([[3, 1], [4, 4]]))])
    return slope_of(self.up(rows).tanh().sum(), self.table.weight).square().sum()


def unused(self, x):
    y, z = variable(x), variable(x)
    of_y, of_z = gradient(self.net(y).sum(), [y, z], create_graph=True, allow_unused=True)
    assert of_z is None
    zeros = gradient(self.net(y).sum(), [z], create_graph=True, materialize_grads=True)[0]
    return of_y.square().mean() + zeros.sum()


def batched(self, x):
    y = variable(x)
    rows = torch.eye(4)[:, None].expand(4, len(x), 4)
    return slope_of(self.net(y), y, grad_outputs=rows, is_grads_batched=True).square().mean()


def under_no_grad(self, x):
    y = variable(x)
    with torch.no_grad():
        scale = self.net(y).mean()
        fixed = grad(lambda y: self.net(y).exp().sum())(x), vmap(jacrev(self.net))(x), jvp(self.net, (x,), (x,))[1]
        assert not any(value.requires_grad for value in fixed)
        with torch.enable_grad():
            energy = self.net(y).exp().sum()
            fixed += (gradient(energy, y)[0],)
    return slope_of((self.up(y).tanh() * scale).sum(), y).square().mean() + sum(value.square().sum() for value in fixed)


def without_graph(self, x):
    y = variable(x)
    energy = self.net(y).sum()
    (force,) = gradient(energy, y, retain_graph=True)
    assert not force.requires_grad
    return (force * self.weight[0]).sum() + energy


def of_factories(self, x):
    hessian_by_vector = torch.autograd.functional.hvp(lambda y: self.net(y).exp().sum(), x, x.cos(), create_graph=True)[
        1
    ]
    zero = torch.zeros(6, 4, dtype=x.dtype, requires_grad=True)
    return hessian_by_vector.square().mean() + slope_of(self.net(x + zero).exp().sum(), zero).square().mean()


def of_writes(self, x):
    y = variable(x)
    hidden = torch.zeros_like(y)
    hidden[:, 1:] = self.net(y)[:, :3]
    hidden[0].mul_(2)
    first, second = (hidden + y).split(2, 1)
    values, _ = second.sort(1)
    outputs = [values.exp().sum(), first.max(1).values.square().sum(), (first * second.detach()).sum()]
    return slope_of(outputs, y).square().mean()


def with_options(self, x):
    slope, (value, other) = grad_and_value(lambda y: (self.net(y).exp().sum(), y.cos()), has_aux=True)(x)
    (of_x, of_cos), sines = jacrev(lambda y, z: (self.net(y * z).sum(0), z.sin()), argnums=(0, 1), has_aux=True)(
        x, x.cos()
    )
    pieces = jacrev(lambda y: self.net(y).sum(0), chunk_size=1)(x), vmap(jacrev(self.net), chunk_size=4)(x)
    outputs, pull, sine = vjp(lambda y: ({"net": self.net(y)}, y.sin()), x, has_aux=True)
    everything = *pieces, slope, other, of_x, of_cos, sines, *pull({"net": sine}), outputs["net"]
    return value + sum(part.square().mean() for part in everything)


def of_an_activation(self, x):
    hidden = self.up(x).tanh()
    of_hidden, of_weight = gradient(self.down(hidden).exp().sum(), [hidden, self.up.weight], create_graph=True)
    return of_hidden.square().mean() + of_weight.square().mean()


def attends(self, x):
    query = self.up(x)[None]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, query.tanh(), query * query)


def adapted(self, x):
    weights = dict(self.up.named_parameters())

    def loss(values):
        return functional_call(self.up, values, (x,)).tanh().square().mean()

    slopes, before = grad_and_value(loss)(weights)
    return loss({name: weights[name] - 0.1 * slopes[name] for name in weights}) + before


def per_sample(self, x):
    def loss(values, row):
        return functional_call(self.up, values, (row,)).tanh().square().sum()

    slopes = vmap(grad(loss), (None, 0))(dict(self.up.named_parameters()), x)
    return sum(slope.flatten(1).norm(dim=1).mean() for slope in slopes.values())


def pulled(self, x):
    value, pull = vjp(self.net, x)
    rows = torch.stack([value, value.sin()])
    return pull(value)[0].square().mean() + (vmap(pull)(rows)[0] * vmap(pull, in_dims=(0,))(rows.cos())[0]).mean()


def stopped(self, x):
    def part(row):
        with torch.no_grad():
            scale = self.net(row).mean() + grad(lambda y: self.net(y).exp().sum())(row)
        return (self.net(row) * scale * row.detach()).sum()

    return vmap(grad(part))(x).square().mean()


def fixed_weights(self, x):
    def scaled(y):
        with torch.no_grad():
            scale = self.weight.exp()
        return self.net(y) @ scale * y.sin().detach()

    return torch.stack(jvp(scaled, (x,), (x.cos(),))).prod(0).mean()


FUNCTIONS = {
    "norm": through(lambda self, y: self.norm(self.up(y))),
    "group norm": through(lambda self, y: self.groups(self.up(y)).exp()),
    "batch norm": through(lambda self, y: self.batch(self.up(y)).tanh()),
    "softmax": through(lambda self, y: self.up(y).softmax(-1)),
    "log softmax": through(lambda self, y: self.up(y).log_softmax(-1)),
    "relu": through(lambda self, y: F.relu(self.up(y)) + F.elu(self.up(y)) + F.leaky_relu(self.up(y), 0.1)),
    "gelu": through(lambda self, y: F.gelu(self.up(y)) + F.silu(self.up(y)) + F.softplus(self.up(y)).sigmoid()),
    "einsum": through(lambda self, y: torch.einsum("bi,ij,bj->b", y, self.weight, y).exp()),
    "attention": through(attends),
    "convolution": through(lambda self, y: self.conv(y.unflatten(1, (2, 2))).tanh()),
    "transposed": through(lambda self, y: self.wide(y.unflatten(1, (2, 2))).tanh()),
    "pooled": through(lambda self, y: F.avg_pool1d(self.up(y)[None], 2).tanh() + F.max_pool1d(self.up(y)[None], 2)),
    "joined": through(lambda self, y: torch.cat([y[:, 1:], self.net(y)[:2].repeat(3, 1).flip(0)], 1).cumsum(1)),
    "written": through(lambda self, y: torch.zeros_like(y).index_copy_(1, torch.tensor([2, 0]), self.net(y)[:, :2])),
    "norms": through(lambda self, y: reductions(self.net(y))),
    "grad": lambda self, x: grad(lambda y: self.net(y).exp().sum())(x).square().mean(),
    "grad of grad": lambda self, x: grad(lambda y: grad(lambda z: self.net(z).sum())(y).square().sum())(x).sum(),
    "jacrev": lambda self, x: jacrev(lambda y: self.net(y).sum(0))(x).square().mean(),
    "jacfwd": lambda self, x: jacfwd(lambda y: self.net(y).sum(0))(x).square().mean(),
    "hessian": lambda self, x: hessian(lambda y: self.net(y).sum())(x).square().mean(),
    "jvp": lambda self, x: torch.stack(jvp(self.net, (x,), (x.cos(),))).prod(0).mean(),
    "vmap": lambda self, x: vmap(lambda row: self.net(row).sum() * row)(x).square().mean(),
    "vmap jacrev": lambda self, x: vmap(jacrev(self.net))(x).square().mean(),
    "vmap hessian": lambda self, x: vmap(hessian(lambda row: self.net(row).sum()))(x).square().mean(),
    "jacobian": lambda self, x: torch.autograd.functional.jacobian(self.net, x[:2], create_graph=True).square().mean(),
    **{
        function.__name__: function
        for function in (
            *(by_setter, twice, by_weights, of_transposed, of_a_table, unused, batched, under_no_grad, without_graph),
            *(
                of_an_activation,
                adapted,
                per_sample,
                pulled,
                stopped,
                fixed_weights,
                of_factories,
                of_writes,
                with_options,
            ),
        )
    },
}


SHORT = {
    *("norm", "softmax", "einsum", "convolution", "attention", "jvp", "unused", "twice", "by_weights", "batched"),
    *("per_sample", "stopped", "of_writes", "grad of grad", "vmap hessian"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FUNCTIONS]
)
def test_the_graph_computes_inner_gradients_as_eager_does(name) -> None:
    torch.manual_seed(0)
    module, x = Calls(FUNCTIONS[name]).double(), torch.randn(6, 4, dtype=torch.float64)
    with warnings.catch_warnings(action="error"):
        captured = capture(module, (x,))
    graph, tensors = captured.graph, {**dict(module.named_parameters()), **dict(module.named_buffers())}
    data = {
        source.value: captured.constants.get(source.value, tensors.get(source.value, x)).detach().clone()
        for source in graph.sources
    }
    trained = {source.value: data[source.value].requires_grad_() for source in graph.sources if source.trainable}
    found = interpret(graph, data)[graph.loss]
    expected = module(x.clone())
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    ours = gradient(found, list(trained.values()), allow_unused=True)
    theirs = gradient(expected, [tensors[name] for name in trained], allow_unused=True)
    for name, own, other in zip(trained, ours, theirs, strict=True):
        assert (own is None) == (other is None), name
        if own is None:
            continue
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    without_rule = {str(op.target) for op in graph.ops if rule_of(op, graph) is None}
    assert without_rule <= {"aten.avg_pool2d_backward.default"}


@pytest.mark.parametrize("kink", [F.relu, F.leaky_relu, F.hardtanh, lambda hidden: F.max_pool1d(hidden[None], 2)[0]])
def test_weights_have_a_zero_gradient_where_eager_has_one(kink) -> None:
    def penalty(self, x):
        y = variable(x)
        return slope_of(kink(self.up(y)).sum(), y).square().mean()

    captured = check_against_eager(Calls(penalty), torch.randn(6, 4, dtype=torch.float64))
    assert captured.graph.loss is not None


def test_writes_reach_a_tensor_by_which_was_differentiated() -> None:
    def of_a_buffer(self, x):
        mean = self.batch.running_mean
        mean.requires_grad_()
        slope = slope_of((self.up(x) * mean).sum(), mean)
        mean.requires_grad_(False)
        mean.add_(1)
        return slope.square().sum() + (self.up(x) * self.batch.running_mean).mean()

    def of_a_viewed(self, x):
        whole = torch.zeros(4, dtype=x.dtype)
        part = whole[:2]
        whole.requires_grad_()
        slope = slope_of((self.net(x) * whole).sum(), whole)
        whole.requires_grad_(False)
        whole.add_(1)
        return (part * self.weight[0, :2]).sum() + slope.sum()

    for function in (of_a_buffer, of_a_viewed):
        check_against_eager(Calls(function), torch.randn(6, 4, dtype=torch.float64))


def test_what_cannot_be_differentiated_inside_is_refused_by_name() -> None:
    def drops(self, x):
        y = variable(x)
        return slope_of(F.dropout(self.net(y), 0.5).sum(), y).sum()

    def inside(self, x):
        return vmap(lambda row: slope_of(self.net(row).sum(), row))(variable(x)).sum()

    def unrelated(self, x):
        return slope_of(self.net(x).sum(), variable(x)).sum()

    def drops_inside(self, x):
        return vmap(lambda row: F.dropout(self.net(row), 0.5), randomness="different")(x).sum()

    def distances(self, x):
        y = variable(x)
        return slope_of(torch.cdist(self.net(y), self.weight).sum(), y).sum()

    def custom(self, x):
        y = variable(x)
        return slope_of(Sine.apply(self.net(y)).sum(), y).sum()

    def stops(self, x):
        def scaled(y):
            with torch.no_grad():
                scale = y.sin()
            return self.net(y) * scale

        return jvp(scaled, (x,), (x.cos(),))[1].sum()

    def stops_rows(self, x):
        def scaled(row):
            with torch.no_grad():
                scale = row.sin()
            return (self.net(row) * scale).sum()

        return vmap(hessian(scaled))(x).sum()

    def stops_inside(self, x):
        def scaled(y):
            with torch.no_grad():
                scale = grad(lambda y: self.net(y).exp().sum())(y)
            return self.net(y) * scale

        return jacfwd(scaled)(x).sum()

    def pulled_by_columns(self, x):
        value, pull = vjp(self.net, x)
        return vmap(pull, in_dims=1)(torch.stack([value, value], 1))[0].sum()

    for function, words, mend in (
        *((function, "torch.no_grad", ".detach()") for function in (stops, stops_rows, stops_inside)),
        (pulled_by_columns, "in_dims", "torch.movedim"),
        (drops_inside, "random numbers inside of torch.func.vmap", "draw the noise outside"),
        (distances, "_cdist_backward, which PyTorch cannot differentiate", "create_graph=False"),
        (custom, "Sine, a torch.autograd.Function", "ordinary operators"),
        (drops, "draws random numbers", "multiply by the noise"),
        (inside, "torch.func.vmap transforms", "torch.func.grad"),
        (unrelated, "appears to not have been used", "one device"),
    ):
        with raises(CaptureError, words, mend, source="test_inner_gradients.py"):
            capture(Calls(function).double(), (torch.randn(6, 4, dtype=torch.float64),))


def test_noise_is_the_same_in_a_gradient() -> None:
    def drops(self, x):
        y = variable(x)
        return slope_of((self.net(y) * F.dropout(torch.ones_like(y), 0.5)).exp().sum(), y).square().sum()

    model, x = Calls(drops), torch.randn(BATCH, 4)
    prove(model, x, sw.plan(model, x, 2, mesh=sw.Mesh(dp=2), mode="data_parallel"), steps=1)


# ----------------------------------------------------------------------------------------------------- models

MODELS = {  # the axis of every plan by hand: splits by the names of modules
    "Critic": {"up": "n@tp", "head": "k@tp"},
    "Heat": {"net.up": "n@tp", "net.mid": "k@tp"},
    "HeatByTransforms": {},
    "ForceField": {"net.up": "n@tp", "net.mid": "k@tp"},
    "Score": {},
    "Adapted": {},
    "AdaptedOnce": {},
}


def is_proven(name: str, plan: sw.Plan) -> None:
    model, inputs = model_and_inputs(name)
    prove(model, inputs, plan)


@pytest.mark.parametrize("name", ["Critic", "HeatByTransforms"])
def test_a_split_batch_is_proven(name) -> None:
    model, inputs = model_and_inputs(name)
    plan = sw.plan(model, inputs, 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    is_proven(name, plan)
    assert plan.inputs[0].layout.startswith("f32[8@dp")


class Deep(nn.Module):
    """Equal layers, differentiated as one function, or each inside itself."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.layers = inside, nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        hidden = x
        for layer in self.layers:
            if self.inside:
                hidden = hidden - 0.1 * grad(lambda y, layer=layer: torch.tanh(layer(y)).exp().sum())(hidden)
            else:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden.square().mean() if self.inside else slope_of(hidden.exp().sum(), x).square().mean()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "settings", [{"mesh": sw.Mesh(dp=2), "recompute": "full"}, {"stages": 2, "mesh": sw.Mesh(dp=1)}]
)
@pytest.mark.sampled(2)
def test_repeated_layers_recomputed_and_in_stages_are_proven(inside, settings) -> None:
    torch.manual_seed(0)
    model, x = Deep(inside), torch.randn(BATCH, 4)
    prove(model, x, sw.plan(model, x, 2, **settings, micro_batch=4), steps=1)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_of_a_model_is_proven(name) -> None:
    model, inputs = model_and_inputs(name)
    for settings in (
        {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"},
        {"mesh": sw.Mesh(dp=2, tp=2), "strategies": MODELS[name]},
        {"mesh": sw.Mesh(dp=2), "mode": "data_parallel", "zero": 3},
    ):
        plan = sw.plan(model, inputs, settings["mesh"].num_devices, **settings)
        is_proven(name, plan)
    captured = capture(model, inputs)
    factored = factor_graph(captured.graph, rules_of(captured.graph))
    for number in range(3):
        plan = random_plan(model, {}, captured, factored, random.Random(number), args=inputs)
        is_proven(name, plan)
