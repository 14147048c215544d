"""Every line of the normalisation table: the same numbers, in forms that can be split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graph.against_eager import check_against_eager, operators, run_graph
from shardwise.graph.attention_within import ATTENTION_WITHIN
from shardwise.graph.capture import capture
from shardwise.graph.custom_operators import dropout_mask, mask_columns
from shardwise.graph.normalize import NORMALIZATIONS
from shardwise.graph.normalize_layers import LAYER_NORMALIZATIONS
from shardwise.graph.normalize_random import RANDOM_NORMALIZATIONS

aten = torch.ops.aten


class Calls(nn.Module):
    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, *inputs):
        return self.function(*self.weights, *inputs)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def class_loss(**options):
    return lambda logits, target: F.cross_entropy(logits, target, **options)


def high_less_low(low, high):
    return high - low


LABELS = torch.tensor([0, 2, -100, 1, 2, -100])
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)

# name: (function over parameters and inputs, shapes of parameters, inputs)
CASES = {
    "linear": (lambda w, b, x: F.linear(x, w, b), [(3, 4), (3,)], [rand(2, 5, 4)]),
    "linear without bias": (lambda w, x: F.linear(x, w), [(3, 4)], [rand(2, 4)]),
    "both extremes": (lambda w, x: w * high_less_low(*torch.aminmax(x, dim=1, keepdim=True)), [(3, 4)], [rand(3, 4)]),
    "both extremes of all": (lambda w, x: w * high_less_low(*torch.aminmax(x)), [(3, 4)], [rand(3, 4)]),
    "addmm": (lambda b, a, x: torch.addmm(b, x, a), [(3,), (4, 3)], [rand(2, 4)]),
    "addmm scaled": (lambda b, a, x: torch.addmm(b, x, a, beta=0.5, alpha=2), [(2, 3), (4, 3)], [rand(2, 4)]),
    "addmm that ignores its summand": (lambda a, x: torch.addmm(x.new_zeros(3), x, a, beta=0), [(4, 3)], [rand(2, 4)]),
    "product with a transpose": (lambda a, x: torch.mm(x, a.t().t().t()), [(3, 4)], [rand(2, 4)]),
    "baddbmm": (lambda b, a, x: torch.baddbmm(b, x, a, alpha=3), [(2, 1, 3), (2, 4, 3)], [rand(2, 5, 4)]),
    "addbmm": (lambda b, a, x: torch.addbmm(b, x, a, beta=2), [(5, 1), (2, 4, 3)], [rand(2, 5, 4)]),
    "addmv": (lambda b, v, x: torch.addmv(b, x, v), [(2,), (4,)], [rand(2, 4)]),
    "addr": (lambda b, v, x: torch.addr(b, x, v, beta=0.5, alpha=2), [(3, 1), (4,)], [rand(3)]),
    "margin ranking": (
        lambda w, x, y: F.margin_ranking_loss(w * x, y, y.sign(), margin=0.3),
        [(6,)],
        [rand(6), rand(6)],
    ),
    "hinge embedding": (lambda w, x, y: F.hinge_embedding_loss(w * x, y.sign()), [(6,)], [rand(4, 6), rand(6)]),
    "conv1d": (lambda w, b, x: F.conv1d(x, w, b, padding=1), [(3, 4, 3), (3,)], [rand(2, 4, 6)]),
    "conv1d same": (lambda w, b, x: F.conv1d(x, w, b, padding="same"), [(3, 4, 3), (3,)], [rand(2, 4, 6)]),
    "conv2d": (lambda w, b, x: F.conv2d(x, w, b, stride=2), [(3, 4, 2, 2), (3,)], [rand(2, 4, 6, 6)]),
    "conv2d unbatched": (lambda w, b, x: F.conv2d(x, w, b), [(3, 4, 2, 2), (3,)], [rand(4, 6, 6)]),
    "conv2d same": (lambda w, b, x: F.conv2d(x, w, b, padding="same"), [(4, 2, 3, 3), (4,)], [rand(2, 2, 6, 6)]),
    "conv2d groups": (lambda w, b, x: F.conv2d(x, w, b, groups=2), [(4, 2, 3, 3), (4,)], [rand(2, 4, 6, 6)]),
    "conv3d": (lambda w, b, x: F.conv3d(x, w, b), [(3, 2, 2, 2, 2), (3,)], [rand(2, 2, 3, 3, 3)]),
    "conv3d same": (lambda w, b, x: F.conv3d(x, w, b, padding="same"), [(3, 2, 1, 1, 1), (3,)], [rand(2, 2, 3, 3, 3)]),
    "conv_transpose1d": (lambda w, b, x: F.conv_transpose1d(x, w, b, stride=2), [(4, 3, 2), (3,)], [rand(2, 4, 5)]),
    "conv_transpose2d": (
        lambda w, b, x: F.conv_transpose2d(x, w, b, groups=2),
        [(4, 3, 2, 2), (6,)],
        [rand(2, 4, 5, 5)],
    ),
    "conv_transpose3d": (lambda w, b, x: F.conv_transpose3d(x, w, b), [(2, 3, 2, 2, 2), (3,)], [rand(1, 2, 3, 3, 3)]),
    "convolution": (
        lambda w, b, x: aten.convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        [(3, 4, 2, 2), (3,)],
        [rand(2, 4, 6, 6)],
    ),
    "mean": (lambda w, x: (x * w).mean(), [(4,)], [rand(2, 4)]),
    "mean over dims": (lambda w, x: (x * w).mean((0, -1), keepdim=True), [(4,)], [rand(2, 3, 4)]),
    "mean over one dim": (lambda w, x: (x * w).mean(1), [(4,)], [rand(2, 3, 4)]),
    "mean over no dims": (lambda w, x: (x * w).mean(()), [(4,)], [rand(2, 4)]),
    "mean with a dtype": (
        lambda w, x: (x.mean(0, dtype=torch.float64) * w, x.mean(dtype=torch.float64)),
        [(4,)],
        [torch.arange(8).reshape(2, 4)],
    ),
    "mean of a scalar": (lambda w, x: (w.sum() + x.sum()).mean(), [(4,)], [rand(2)]),
    "cross entropy": (class_loss(), [(6, 3)], [LABELS]),
    "cross entropy weights": (class_loss(weight=CLASS_WEIGHTS), [(6, 3)], [LABELS]),
    "cross entropy ignore": (class_loss(ignore_index=2), [(6, 3)], [LABELS.clamp(min=0)]),
    "cross entropy smoothed": (class_loss(label_smoothing=0.2), [(6, 3)], [LABELS]),
    "cross entropy smoothed weights": (class_loss(label_smoothing=0.2, weight=CLASS_WEIGHTS), [(6, 3)], [LABELS]),
    "cross entropy soft": (class_loss(), [(6, 3)], [rand(6, 3).softmax(1)]),
    "cross entropy soft smoothed": (
        class_loss(label_smoothing=0.1, weight=CLASS_WEIGHTS),
        [(6, 3)],
        [rand(6, 3).softmax(1)],
    ),
    "cross entropy pixels": (class_loss(), [(2, 3, 4)], [torch.randint(0, 3, (2, 4))]),
    "cross entropy soft pixels": (class_loss(), [(2, 3, 4)], [rand(2, 3, 4).softmax(1)]),
    "cross entropy one sample": (class_loss(), [(3,)], [torch.tensor(1)]),
    "cross entropy sum": (class_loss(reduction="sum"), [(6, 3)], [LABELS]),
    "cross entropy none": (class_loss(reduction="none"), [(6, 3)], [LABELS]),
    "nll": (lambda w, t: F.nll_loss(w.log_softmax(1), t, weight=CLASS_WEIGHTS), [(6, 3)], [LABELS]),
    "nll pixels": (lambda w, t: F.nll_loss(w.log_softmax(1), t), [(2, 3, 4, 4)], [torch.randint(0, 3, (2, 4, 4))]),
    "nll direct": (lambda w, t: aten.nll_loss(w, t), [(6, 3)], [LABELS]),
    "nll2d direct": (lambda w, t: aten.nll_loss2d(w, t), [(2, 3, 4, 4)], [torch.randint(0, 3, (2, 4, 4))]),
    "mse": (F.mse_loss, [(4, 3)], [rand(4, 3)]),
    "l1": (F.l1_loss, [(4, 3)], [rand(4, 3)]),
    "smooth l1": (lambda w, t: F.smooth_l1_loss(w, t, beta=0.5), [(4, 3)], [rand(4, 3)]),
    "huber": (lambda w, t: F.huber_loss(w, t, delta=0.7), [(4, 3)], [rand(4, 3)]),
    "bce": (lambda w, t: F.binary_cross_entropy(w.sigmoid(), t), [(4, 3)], [rand(4, 3).sigmoid()]),
    "bce weighted": (
        lambda w, t, s: F.binary_cross_entropy(w.sigmoid(), t, weight=s),
        [(4, 3)],
        [rand(4, 3).sigmoid(), rand(3).sigmoid()],
    ),
    "bce with logits": (
        lambda w, t, s: F.binary_cross_entropy_with_logits(w, t, weight=s, pos_weight=s),
        [(4, 3)],
        [rand(4, 3).sigmoid(), rand(3).sigmoid()],
    ),
    "kl": (lambda w, t: aten.kl_div(w.log_softmax(1), t), [(4, 3)], [rand(4, 3).softmax(1)]),
    "kl log target": (
        lambda w, t: F.kl_div(w.log_softmax(1), t, reduction="batchmean", log_target=True),
        [(4, 3)],
        [rand(4, 3).log_softmax(1)],
    ),
    "soft margin": (F.soft_margin_loss, [(4, 3)], [rand(4, 3).sign()]),
    "poisson": (lambda w, t: F.poisson_nll_loss(w, t, full=True), [(4, 3)], [rand(4, 3).abs() * 3]),
    "dropout off": (lambda w, x: F.dropout(x * w, 0.5, training=False), [(4,)], [rand(2, 4)]),
    "dropout of nothing": (lambda w, x: F.dropout(x * w, 0.0), [(4,)], [rand(2, 4)]),
    "dropout of all": (lambda w, x: F.dropout(x * w, 1.0), [(4,)], [rand(2, 4)]),
    "feature dropout off": (lambda w, x: F.dropout2d(x * w, 0.5, training=False), [(4,)], [rand(2, 3, 4, 4)]),
    "native dropout off": (lambda w, x: torch.native_dropout(x * w, 0.5, False), [(4,)], [rand(2, 4)]),
    "rrelu off": (lambda w, x: F.rrelu(x * w, training=False), [(4,)], [rand(2, 4)]),
    "expand as": (lambda w, x: w.expand_as(x * w) * x, [(4,)], [rand(2, 4)]),
    "expand as itself": (lambda w, x: w.expand_as(x) * x, [(4,)], [rand(4)]),
    "meshgrid": (
        lambda v, w, x: [grid * x for grid in torch.meshgrid(v, w, w.sum(), indexing="ij")],
        [(2,), (3,)],
        [rand(2, 3, 1)],
    ),
    "meshgrid xy": (
        lambda v, w, x: torch.stack(torch.meshgrid(v, w, w.sum(), indexing="xy")) * x,
        [(2,), (3,)],
        [rand(3, 2, 1)],
    ),
    "one of a meshgrid": (lambda v, w: torch.meshgrid(v, w, indexing="ij")[1], [(2,), (3,)], []),
    "meshgrid of one": (lambda w, x: torch.meshgrid(w, indexing="ij")[0] * x, [(4,)], [rand(4)]),
    "attention": (lambda w, x: F.scaled_dot_product_attention(x * w, x, x), [(4,)], [rand(2, 3, 5, 4)]),
    "attention with narrow values": (
        lambda w, x: F.scaled_dot_product_attention(x * w, x, x[..., :2] * 2, is_causal=True),
        [(4,)],
        [rand(2, 3, 5, 4)],
    ),
    "attention with wide values": (
        lambda w, x: F.scaled_dot_product_attention(
            x[..., :2] * w, x[:, :1, :, 2:], x[:, :1], x[0, 0, :, :1] > 0, enable_gqa=True
        ),
        [(2,)],
        [rand(2, 3, 5, 4)],
    ),
    "attention with wide values and a scale": (
        lambda w, x: F.scaled_dot_product_attention(x[..., :2] * w, x[..., 2:], x, scale=0.3),
        [(2,)],
        [rand(2, 3, 5, 4)],
    ),
    "attention with a learned mask": (
        lambda w, m, x: F.scaled_dot_product_attention(x * w, x, x[..., :2], attn_mask=m),
        [(4,), (5, 5)],
        [rand(2, 3, 5, 4)],
    ),
    "batch norm without statistics": (
        lambda w, b, x: F.batch_norm(x, None, None, w, b, training=True),
        [(4,), (4,)],
        [rand(6, 4)],
    ),
}
# The operators of some normal forms.
EXPECTED = {
    "linear": "linear.default add.Tensor",
    "linear without bias": "linear.default",
    "both extremes": "amin.default amax.default sub.Tensor mul.Tensor",
    "both extremes of all": "amin.default amax.default sub.Tensor mul.Tensor",
    "addmm": "mm.default add.Tensor",
    "addmm scaled": "mm.default mul.Tensor mul.Tensor add.Tensor",
    "addmm that ignores its summand": "mm.default",
    "product with a transpose": "linear.default",
    "addmv": "mv.default add.Tensor",
    "convolution": "convolution.default reshape.default add.Tensor",
    "mean": "mul.Tensor sum.default div.Tensor",
    "cross entropy sum": "cross_entropy_loss.default",
    "cross entropy none": "cross_entropy_loss.default",
    "mse": "mse_loss.default div.Tensor",
    "l1": "l1_loss.default div.Tensor",
    "dropout off": "mul.Tensor",
    "dropout of nothing": "mul.Tensor",
    "feature dropout off": "mul.Tensor",
    "rrelu off": "mul.Tensor leaky_relu.default",
    "expand as": "expand.default mul.Tensor",
    "expand as itself": "mul.Tensor",
    "one of a meshgrid": "reshape.default expand.default",
    "meshgrid of one": "mul.Tensor",
    "attention with narrow values": "mul.Tensor slice.Tensor mul.Tensor constant_pad_nd.default "
    "scaled_dot_product_attention.default slice.Tensor",
}


@pytest.mark.parametrize("name", CASES)
def test_the_normal_form_computes_the_same(name):
    torch.manual_seed(0)
    function, shapes, inputs = CASES[name]
    captured = check_against_eager(Calls(function, *shapes), *inputs)
    if name in EXPECTED:
        assert operators(captured) == EXPECTED[name].split()
    if name.startswith(("cross", "nll", "mse", "l1")) and "none" not in name:
        losses = [op for op in captured.graph.ops if "loss" in str(op.target)]
        assert all(2 in op.args for op in losses), "a sum"


def test_both_extremes_have_the_gradients_of_each():
    """aminmax itself has none in torch 2.11."""
    for options in ({}, {"dim": 1}, {"dim": -1, "keepdim": True}):
        both, each = (
            Calls(lambda w, x, extremes=extremes, options=options: high_less_low(*extremes(w * x, **options)), (3, 4))
            for extremes in (
                torch.aminmax,
                lambda x, dim=(), keepdim=False: (x.amin(dim, keepdim), x.amax(dim, keepdim)),
            )
        )
        each.load_state_dict(both.state_dict())
        x = rand(3, 4)
        gradients = []
        for module in (both, each):
            module.double()
            leaves, _ = run_graph(capture(module, (x,)), module, (x,), {})
            leaves[0].sum().backward()
            gradients.append(module.weights[0].grad)
        assert gradients[0].count_nonzero() > 0
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_normal_forms_have_no_hidden_bias_or_mean():
    torch.manual_seed(0)
    for name, (function, shapes, inputs) in CASES.items():
        for op in capture(Calls(function, *shapes).double(), tuple(inputs)).graph.ops:
            word = str(op.target)
            assert not any(hidden in word for hidden in ("mean", "addmm", "aten.dropout")), name
            if "conv" in word or "linear" in word:
                assert len(op.args) < 3 or op.args[2] is None, name


def test_every_line_of_the_table_is_reached():
    reached = set()
    for function, shapes, inputs in CASES.values():
        module = Calls(function, *shapes).double()
        with torch.no_grad():
            program = torch.export.export(module, tuple(inputs), strict=False)
        reached |= {node.target for node in program.graph.nodes if node.op == "call_function"}
    # below, in test_annotate.py and in tests/rules/test_einsum.py
    elsewhere = {aten.bernoulli.p, torch.ops.shardwise.mark.default, aten.einsum.default}
    elsewhere |= {aten.bmm.default, aten.matmul.default, aten.index.Tensor}  # in tests/models/test_expert_forms.py
    elsewhere |= {ATTENTION_WITHIN}  # in tests/programs/test_attention_splits.py
    elsewhere |= set(RANDOM_NORMALIZATIONS) | set(LAYER_NORMALIZATIONS)  # in test_normalize_layers.py
    assert set(NORMALIZATIONS) - reached - elsewhere == set()


def test_new_operators_have_the_names_lines_and_scope_of_the_old():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    graph = capture(model, (torch.ones(2, 3),), strategies={"1": "m@dp"}).graph
    assert list(graph.op_by_name) == ["0/linear", "0/add", "1/linear", "1/add"]
    assert [op.scope for op in graph.ops] == ["", "", "1", "1"]
    assert graph.ops[2].source == graph.ops[3].source


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_overflow(dtype):
    class Means(nn.Module):
        def forward(self, x, target):
            return x.mean(), x.mean(0), F.mse_loss(x, target), F.cross_entropy(x[None], target.softmax(0)[None])

    x, target = torch.full((4096,), 100.0, dtype=dtype), torch.zeros(4096, dtype=dtype)
    captured = capture(Means(), (x, target))
    leaves, _ = run_graph(captured, Means(), (x, target), {})
    assert [leaf.dtype for leaf in leaves] == [dtype] * 4
    assert all(torch.isfinite(leaf).all() for leaf in leaves)
    torch.testing.assert_close(leaves[0], x.mean())
    torch.testing.assert_close(leaves[2], F.mse_loss(x, target))


class Drops(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, *inputs):
        return self.function(self.weight, *inputs)


def test_training_dropout_is_a_mask_of_the_global_index():
    x = rand(64, 8)
    module = Drops(lambda w, x: F.dropout(F.dropout(x * w, 0.25), 0.5))
    captured = capture(module, (x,))
    assert operators(captured) == ["mul.Tensor", "shardwise.dropout.default", "shardwise.dropout.default"]
    (seed,) = [source for source in captured.graph.sources if source.names == ("_shardwise_seed",)]
    assert seed.kind == "buffer"
    assert captured.graph.by_name[seed.value].dtype == torch.int64
    leaves, _ = run_graph(captured, module, (x,), {})
    masks = [dropout_mask(torch.tensor(0), p, call, 8, (64, 8), (0, 0), (64, 8)) for call, p in enumerate((0.25, 0.5))]
    torch.testing.assert_close(leaves[0], x * masks[0] / 0.75 * masks[1] / 0.5)
    leaves[0].sum().backward()
    torch.testing.assert_close(module.weight.grad, (x * masks[0] / 0.75 * masks[1] / 0.5).sum(0))


def test_a_graph_without_randomness_has_no_seed():
    captured = capture(nn.Linear(2, 2), (torch.ones(2, 2),))
    assert all(source.names != ("_shardwise_seed",) for source in captured.graph.sources)


def test_channel_dropout_and_bernoulli_follow_the_same_hash():
    x = rand(16, 4, 2, 2)
    module = Drops(
        lambda w, x: (F.dropout2d(x, 0.5), torch.empty_like(x).bernoulli_(0.3), torch.native_dropout(x, 0.5, True))
    )
    leaves, _ = run_graph(capture(module, (x,)), module, (x,), {})
    channels = dropout_mask(torch.tensor(0), 0.5, 0, 4, (16, 4, 1, 1), (0, 0, 0, 0), (16, 4, 1, 1))
    torch.testing.assert_close(leaves[0], x * channels * 2)
    assert set(leaves[1].unique().tolist()) == {0.0, 1.0}
    assert 0.2 < leaves[1].mean() < 0.4
    torch.testing.assert_close(leaves[2], x * leaves[3] * 2)


@pytest.mark.parametrize("form", ["plain", "causal", "boolean mask", "float mask", "grouped", "scaled"])
def test_attention_with_dropout_is_written_out(form):
    torch.manual_seed(0)
    heads = 2 if form == "grouped" else 4
    query, key, value = (
        rand(2, 4, 5, 8),
        rand(2, heads, 6 if form != "causal" else 5, 8),
        rand(2, heads, 6 if form != "causal" else 5, 8),
    )
    options = {
        "is_causal": form == "causal",
        "enable_gqa": form == "grouped",
        "scale": 0.3 if form == "scaled" else None,
    }
    mask = {"boolean mask": torch.rand(5, 6) < 0.6, "float mask": rand(2, 1, 5, 6)}.get(form)
    if form == "boolean mask":
        mask[0] = False

    def attend(w, q, k, v):
        return F.scaled_dot_product_attention(q * w, k, v, attn_mask=mask, dropout_p=0.4, **options)

    module = Drops(attend)
    captured = capture(module, (query, key, value))
    assert not any("attention" in name for name in operators(captured))
    assert {op.source for op in captured.graph.ops} == {captured.graph.ops[-1].source}
    assert captured.graph.ops[-1].source
    (out,), values = run_graph(captured, module, (query, key, value), {})
    (drop,) = [op for op in captured.graph.ops if str(op.target) == "shardwise.dropout.default"]
    weights = values[drop.args[0].name]
    undropped = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    wide = value.repeat_interleave(4 // heads, 1)
    torch.testing.assert_close(weights @ wide, undropped)
    columns = mask_columns(weights.shape)
    keep = dropout_mask(torch.tensor(0), 0.4, 0, columns, weights.shape, (0,) * 4, weights.shape)
    torch.testing.assert_close(out, (weights * keep / 0.6) @ wide)
    out.sum().backward()
    assert torch.isfinite(module.weight.grad).all()
    assert not math.isclose(module.weight.grad.abs().sum(), 0)


def test_names_of_new_operators_leave_room_for_those_that_are_kept():
    """Every bias becomes an ``add``; the model's own ``add_5`` is met after five of them were made."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x):
            for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = x + second(torch.relu(first(x)))
            return x + x.sin() + x.cos() + x.tanh()

    check_against_eager(Residual().double(), torch.randn(3, 4, dtype=torch.float64))
