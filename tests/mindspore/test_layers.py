"""Layers and losses against formulas, and on four devices against one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise.mindspore as ms
from mindspore.applied import equal_to_one_device
from mindspore.operator_samples import average_inside, i, r
from raising import raises
from shardwise.mindspore.tensor import as_torch

nn = ms.nn
F64 = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    ms.set_seed(3)


IMAGES, ROWS, CUBE, IDS = r(8, 3, 6, 6), r(8, 6), r(8, 4, 6), i(10, 8, 3)


def norm(x: Tensor, dims: Any, eps: float) -> Tensor:
    return (x - x.mean(dims, True)) / (x.var(dims, correction=0, keepdim=True) + eps).sqrt()


# name -> how it is made, input, formula of the layer and the input (in evaluation), names of parameters
LAYERS: dict[str, tuple[Callable[[], Any], Tensor, Callable[[Any, Tensor], Tensor], str]] = {
    "Dense": (
        lambda: nn.Dense(6, 4, bias_init="normal", **F64), ROWS, lambda c, x: x @ c.weight.T + c.bias, "weight bias",
    ),
    "Dense, relu": (
        lambda: nn.Dense(6, 4, has_bias=False, activation="relu", **F64), ROWS,
        lambda c, x: (x @ c.weight.T).clamp(min=0), "weight",
    ),
    "Dense, a cell as activation": (
        lambda: nn.Dense(6, 4, activation=nn.Tanh(), **F64), CUBE, lambda c, x: torch.tanh(x @ c.weight.T + c.bias),
        "weight bias",
    ),
    "Embedding": (lambda: nn.Embedding(10, 4, **F64), IDS, lambda c, x: c.embedding_table[x], "embedding_table"),
    "EmbeddingLookup": (
        lambda: nn.EmbeddingLookup(10, 4, max_norm=0.01, **F64), IDS,
        lambda c, x: c.embedding_table[x] * (0.01 / c.embedding_table[x].norm(dim=-1, keepdim=True)).clamp(max=1),
        "embedding_table",
    ),
    "Embedding, one-hot": (
        lambda: nn.Embedding(10, 4, True, padding_idx=2, **F64), IDS, lambda c, x: c.embedding_table[x],
        "embedding_table",
    ),
    "Conv2d": (
        lambda: nn.Conv2d(3, 4, 3, has_bias=True, **F64), IMAGES, lambda c, x: F.conv2d(x, c.weight, c.bias, padding=1),
        "weight bias",
    ),
    "Conv2d, stride 2": (
        lambda: nn.Conv2d(3, 4, 3, 2, **F64), IMAGES, lambda c, x: F.conv2d(F.pad(x, (0, 1, 0, 1)), c.weight, stride=2),
        "weight",
    ),
    "Conv2d, pad": (
        lambda: nn.Conv2d(3, 3, (3, 2), pad_mode="pad", padding=(1, 0, 2, 1), dilation=2, group=3, **F64), IMAGES,
        lambda c, x: F.conv2d(F.pad(x, (2, 1, 1, 0)), c.weight, dilation=2, groups=3), "weight",
    ),
    "Conv2dTranspose": (
        lambda: nn.Conv2dTranspose(3, 4, 4, 2, has_bias=True, **F64), IMAGES,
        lambda c, x: F.conv_transpose2d(x, c.weight, c.bias, stride=2, padding=1), "weight bias",
    ),
    "Conv2dTranspose, valid": (
        lambda: nn.Conv2dTranspose(3, 4, 3, 2, "valid", **F64), IMAGES,
        lambda c, x: F.conv_transpose2d(x, c.weight, stride=2), "weight",
    ),
    "Conv2dTranspose, pad": (
        lambda: nn.Conv2dTranspose(3, 4, 3, 2, "pad", 1, output_padding=1, **F64), IMAGES,
        lambda c, x: F.pad(F.conv_transpose2d(x, c.weight, stride=2, padding=1), (0, 1, 0, 1)), "weight",
    ),
    "Conv1dTranspose": (
        lambda: nn.Conv1dTranspose(4, 5, 4, 2, has_bias=True, **F64), CUBE,
        lambda c, x: F.conv_transpose1d(x, c.weight[:, :, 0], c.bias, stride=2, padding=1), "weight bias",
    ),
    "BatchNorm2d": (
        lambda: nn.BatchNorm2d(3, moving_var_init=4.0, **F64), IMAGES, lambda c, x: x / (4 + 1e-5) ** 0.5, "gamma beta",
    ),
    "BatchNorm1d": (
        lambda: nn.BatchNorm1d(6, use_batch_statistics=True, **F64), ROWS, lambda c, x: norm(x, 0, 1e-5), "gamma beta",
    ),
    "BatchNorm3d": (
        lambda: nn.BatchNorm3d(3, **F64), IMAGES[..., None], lambda c, x: x / (1 + 1e-5) ** 0.5, "gamma beta",
    ),
    "SyncBatchNorm": (
        lambda: nn.SyncBatchNorm(3, **F64), IMAGES, lambda c, x: x / (1 + 1e-5) ** 0.5, "gamma beta",
    ),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, **F64), CUBE, lambda c, x: norm(x, 2, 1e-5), "gamma beta"),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, **F64), IMAGES, lambda c, x: norm(x, (2, 3), 1e-5), "gamma beta"),
    "InstanceNorm3d": (
        lambda: nn.InstanceNorm3d(3, **F64), IMAGES[..., None], lambda c, x: norm(x, (2, 3, 4), 1e-5), "gamma beta",
    ),
    "Conv1d": (
        lambda: nn.Conv1d(4, 5, 3, has_bias=True, **F64), CUBE,
        lambda c, x: F.conv1d(x, c.weight[:, :, 0], c.bias, padding=1), "weight bias",
    ),
    "Conv3d": (
        lambda: nn.Conv3d(3, 2, 3, 2, **F64), IMAGES[..., None],
        lambda c, x: F.conv3d(F.pad(x, (1, 1, 0, 1, 0, 1)), c.weight, stride=2), "weight",
    ),
    "Conv3dTranspose": (
        lambda: nn.Conv3dTranspose(3, 2, 4, 2, has_bias=True, **F64), IMAGES[..., None],
        lambda c, x: F.conv_transpose3d(x, c.weight, c.bias, stride=2, padding=1), "weight bias",
    ),
    "LayerNorm": (lambda: nn.LayerNorm((6,), **F64), CUBE, lambda c, x: norm(x, 2, 1e-7), "gamma beta"),
    "LayerNorm, two dims": (
        lambda: nn.LayerNorm([4, 6], 1, 1, gamma_init="normal", **F64), CUBE,
        lambda c, x: norm(x, (1, 2), 1e-7) * c.gamma, "gamma beta",
    ),
    "GroupNorm": (
        lambda: nn.GroupNorm(2, 4, **F64), CUBE, lambda c, x: norm(x.reshape(8, 2, 12), 2, 1e-5).reshape(8, 4, 6),
        "gamma beta",
    ),
    "Dropout": (lambda: nn.Dropout(p=0.3), ROWS, lambda c, x: x, ""),
    "MaxPool2d": (lambda: nn.MaxPool2d(2, 2), IMAGES, lambda c, x: x.reshape(8, 3, 3, 2, 3, 2).amax((3, 5)), ""),
    "AvgPool2d": (
        lambda: nn.AvgPool2d(3, 1, "same"), IMAGES, lambda c, x: average_inside(x, 3, 1, (1, 1, 1, 1)), "",
    ),
    "Flatten": (lambda: nn.Flatten(), IMAGES, lambda c, x: x.reshape(8, -1), ""),
    "Identity": (lambda: nn.Identity(), ROWS, lambda c, x: x, ""),
    "ReLU": (lambda: nn.ReLU(), ROWS, lambda c, x: x.clamp(min=0), ""),
    "ReLU6": (lambda: nn.ReLU6(), 9 * ROWS, lambda c, x: x.clamp(0, 6), ""),
    "Sigmoid": (lambda: nn.Sigmoid(), ROWS, lambda c, x: 1 / (1 + (-x).exp()), ""),
    "Tanh": (lambda: nn.Tanh(), ROWS, lambda c, x: x.tanh(), ""),
    "HSwish": (lambda: nn.HSwish(), ROWS, lambda c, x: x * (x + 3).clamp(0, 6) / 6, ""),
    "HSigmoid": (lambda: nn.HSigmoid(), ROWS, lambda c, x: (x + 3).clamp(0, 6) / 6, ""),
    "SiLU": (lambda: nn.SiLU(), ROWS, lambda c, x: x / (1 + (-x).exp()), ""),
    "FastGelu": (lambda: nn.FastGelu(), ROWS, lambda c, x: x / (1 + (-1.702 * x).exp()), ""),
    "Mish": (lambda: nn.Mish(), ROWS, lambda c, x: x * (1 + x.exp()).log().tanh(), ""),
    "GELU": (lambda: nn.GELU(False), ROWS, lambda c, x: x / 2 * (1 + torch.erf(x / 2**0.5)), ""),
    "ELU": (lambda: nn.ELU(0.5), ROWS, lambda c, x: torch.where(x > 0, x, 0.5 * (x.exp() - 1)), ""),
    "LeakyReLU": (lambda: nn.LeakyReLU(), ROWS, lambda c, x: torch.where(x > 0, x, 0.2 * x), ""),
    "PReLU": (lambda: nn.PReLU(3).to(torch.float64), IMAGES, lambda c, x: torch.where(x > 0, x, 0.25 * x), "w"),
    "Softmax": (lambda: nn.Softmax(0), ROWS, lambda c, x: x.exp() / x.exp().sum(0), ""),
    "LogSoftmax": (lambda: nn.LogSoftmax(), ROWS, lambda c, x: x - x.exp().sum(1, True).log(), ""),
}  # fmt: skip


class Scored(nn.Cell):
    """A layer behind a scale, and a loss of it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.scale = layer, ms.Parameter(torch.full((), 0.7, dtype=torch.float64), "scale")

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x * self.scale if x.is_floating_point() else x)
        return (y.sin() * y).sum() * self.scale, y


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled(20)
def test_a_layer_computes_its_formula_and_equals_one_device_when_split(name: str) -> None:
    make, x, formula, parameters = LAYERS[name]
    layer = make()
    assert " ".join(own for own, _ in layer.named_parameters()) == parameters
    torch.testing.assert_close(layer(x).as_subclass(Tensor), formula(layer, x), rtol=1e-9, atol=1e-10)
    equal_to_one_device(Scored(layer), (x,), 4)
    equal_to_one_device(Scored(make()).set_train(), (x,), 4)


def test_every_layer_and_activation_has_a_sample() -> None:
    names = {*nn.layers.__all__, *nn.simple.ACTIVATIONS, "GELU", "PReLU"}
    assert names | {"Flatten", "Identity"} == {name.partition(",")[0] for name in LAYERS}


def test_batch_norm_in_training_moves_its_statistics_by_one_minus_momentum() -> None:
    layer = nn.BatchNorm2d(3, momentum=0.8, **F64).set_train()
    torch.testing.assert_close(layer(IMAGES).as_subclass(Tensor), norm(IMAGES, (0, 2, 3), 1e-5))
    torch.testing.assert_close(layer.moving_mean, 0.2 * IMAGES.mean((0, 2, 3)))
    torch.testing.assert_close(layer.moving_variance, 0.8 + 0.2 * IMAGES.var((0, 2, 3)))


def test_dropout_drops_in_training_only_and_takes_either_probability() -> None:
    x = torch.ones(100, 100)
    for layer in (nn.Dropout(keep_prob=0.8), nn.Dropout(p=0.2)):
        assert torch.equal(layer(x).as_subclass(Tensor), x)
        found = layer.set_train()(x)
        assert 0.15 < (found == 0).double().mean() < 0.25
        assert found.max().item() == pytest.approx(1.25)
    assert nn.Dropout().p == 0.5


def test_default_weights_are_drawn_within_the_bound_of_their_fan() -> None:
    dense, conv = nn.Dense(100, 50), nn.Conv2d(4, 8, 5, has_bias=True)
    assert dense.weight.shape == (50, 100)
    assert 0.09 < dense.weight.abs().max() <= 0.1
    assert 0.08 < dense.bias.abs().max() <= 0.1
    assert conv.weight.shape == (8, 4, 5, 5)
    assert 0.09 < conv.weight.abs().max() <= 0.1
    assert torch.equal(nn.Dense(3, 2, weight_init="ones", bias_init=0.5).bias, torch.full((2,), 0.5))


# --------------------------------------------------------------------------------------------------------------- losses

LABELS, CLASSES, WEIGHT = r(8, 6).softmax(1), i(6, 8), torch.rand(6, dtype=torch.float64) + 0.5
P1 = ROWS.sigmoid()


def entropy(x: Tensor, classes: Tensor) -> Tensor:
    return -x.softmax(1).log()[torch.arange(8), classes]


def binary(p: Tensor, y: Tensor) -> Tensor:
    return -y * p.log() - (1 - y) * (1 - p).log()


def smooth(d: Tensor, beta: float) -> Tensor:
    return torch.where(d < beta, d * d / (2 * beta), d - beta / 2)


# name -> loss, logits, labels, the loss per element or row; the loss's reduction is applied to it
LOSSES: dict[str, tuple[Any, Tensor, Tensor, Callable[[], Tensor]]] = {
    "MSELoss": (nn.MSELoss(), ROWS, LABELS, lambda: (ROWS - LABELS) ** 2),
    "MSELoss, sum": (nn.MSELoss("sum"), ROWS, LABELS, lambda: (ROWS - LABELS) ** 2),
    "L1Loss": (nn.L1Loss(), ROWS, LABELS, lambda: (ROWS - LABELS).abs()),
    "MAELoss": (nn.MAELoss("none"), ROWS, LABELS, lambda: (ROWS - LABELS).abs()),
    "SmoothL1Loss": (nn.SmoothL1Loss(0.5), ROWS, LABELS, lambda: smooth((ROWS - LABELS).abs(), 0.5)),
    "SmoothL1Loss, mean": (nn.SmoothL1Loss(1.0, "mean"), ROWS, LABELS, lambda: smooth((ROWS - LABELS).abs(), 1.0)),
    "SoftmaxCrossEntropyWithLogits": (
        nn.SoftmaxCrossEntropyWithLogits(), ROWS, LABELS, lambda: -(LABELS * ROWS.softmax(1).log()).sum(1),
    ),
    "SoftmaxCrossEntropyWithLogits, sparse": (
        nn.SoftmaxCrossEntropyWithLogits(True), ROWS, CLASSES, lambda: entropy(ROWS, CLASSES),
    ),
    "SoftmaxCrossEntropyWithLogits, mean": (
        nn.SoftmaxCrossEntropyWithLogits(True, "mean"), ROWS, CLASSES, lambda: entropy(ROWS, CLASSES),
    ),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), ROWS, CLASSES, lambda: entropy(ROWS, CLASSES)),
    "CrossEntropyLoss, weight": (
        nn.CrossEntropyLoss(WEIGHT, reduction="sum"), ROWS, CLASSES, lambda: WEIGHT[CLASSES] * entropy(ROWS, CLASSES),
    ),
    "CrossEntropyLoss, probabilities": (
        nn.CrossEntropyLoss(reduction="none"), ROWS, LABELS, lambda: -(LABELS * ROWS.softmax(1).log()).sum(1),
    ),
    "NLLLoss": (nn.NLLLoss(), ROWS.log_softmax(1), CLASSES, lambda: entropy(ROWS, CLASSES)),
    "BCELoss": (nn.BCELoss(None, "none"), P1, LABELS, lambda: binary(P1, LABELS)),
    "BCELoss, weight": (nn.BCELoss(WEIGHT, "mean"), P1, LABELS, lambda: WEIGHT * binary(P1, LABELS)),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), ROWS, LABELS, lambda: binary(P1, LABELS)),
    "BCEWithLogitsLoss, weights": (
        nn.BCEWithLogitsLoss("sum", WEIGHT, 2 * WEIGHT), ROWS, LABELS,
        lambda: WEIGHT * (-2 * WEIGHT * LABELS * P1.log() - (1 - LABELS) * (1 - P1).log()),
    ),
}  # fmt: skip


class Judged(nn.Cell):
    def __init__(self, loss: Any, logits: Tensor) -> None:
        super().__init__()
        self.loss, self.logits = loss, ms.Parameter(logits.clone(), "logits")

    def construct(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = self.loss(self.logits, labels)
        return own.sum(), own


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_reduced_and_equals_one_device_when_split(name: str) -> None:
    loss, logits, labels, formula = LOSSES[name]
    want = {"mean": Tensor.mean, "sum": Tensor.sum, "none": lambda own: own}[loss.reduction](formula())
    torch.testing.assert_close(loss(logits, labels).as_subclass(Tensor), want, rtol=1e-9, atol=1e-12)
    equal_to_one_device(Judged(loss, logits), (labels,), 4)


def test_every_loss_has_a_sample() -> None:
    kinds = ("BCE", "Cross", "L1", "MAE", "MSE", "NLL", "Smooth", "Softmax")
    of_labels = {
        name for name in nn.loss.__all__ if name.startswith(kinds) and issubclass(getattr(nn, name), nn.LossBase)
    }
    assert of_labels <= {name.partition(",")[0] for name in LOSSES}


def test_reductions_default_as_in_the_reference() -> None:
    assert nn.SoftmaxCrossEntropyWithLogits().reduction == nn.SmoothL1Loss().reduction == "none"
    assert nn.MSELoss().reduction == nn.L1Loss().reduction == nn.CrossEntropyLoss().reduction == "mean"
    ignored = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)(ROWS, torch.tensor([0, 1, 2, 3, 4, 5, 0, 0]))
    kept = ROWS[1:6].log_softmax(1)
    want = -(0.9 * kept[torch.arange(5), torch.arange(1, 6)] + 0.1 * kept.mean(1)).mean()
    torch.testing.assert_close(ignored.as_subclass(Tensor), want)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: nn.Dense(0, 3), ValueError, "in_channels is 0"),
        (lambda: nn.Dense(3, 2, activation="rely"), ValueError, ('no activation "rely"', "relu")),
        (lambda: nn.Embedding(4, -1), ValueError, "embedding_size is -1"),
        (lambda: nn.Conv2d(3, 4, 3, group=2), ValueError, "group 2 does not divide 3 and 4"),
        (lambda: nn.Conv2d(3, 4, 3, pad_mode="nearly"), ValueError, 'pad_mode is "nearly"'),
        (lambda: nn.Conv2d(3, 4, "3"), ValueError, "kernel_size is '3'"),
        (lambda: nn.Conv2d(3, 4, 3, pad_mode="pad", padding=(1, 2)), ValueError, "pad is (1, 2)"),
        (lambda: nn.BatchNorm2d(3, momentum=1.5), ValueError, "momentum is 1.5"),
        (lambda: nn.BatchNorm2d(3)(torch.rand(2, 3)), ValueError, "shape [2, 3]"),
        (
            lambda: nn.BatchNorm2d(3, data_format="NHWC"),
            NotImplementedError,
            ("BatchNorm2d(data_format='NHWC')", "channels are dim 1"),
        ),
        (lambda: nn.LayerNorm(6), TypeError, ("normalized_shape is 6", "(6,)")),
        (lambda: nn.GroupNorm(3, 4), ValueError, "3 groups of 4 channels"),
        (lambda: nn.Dropout(0.5, 0.5), ValueError, ("Dropout(keep_prob=0.5, p=0.5)", "one of the two")),
        (lambda: nn.Dropout(p=1.0), ValueError, "drop with probability 1.0"),
        (lambda: nn.MSELoss("max"), ValueError, "reduction is 'max'"),
        (lambda: nn.SmoothL1Loss(0), ValueError, "beta is 0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_numbers(make: Any, error: type[Exception], words: object) -> None:
    with raises(error, words):
        make()


def test_weights_of_losses_may_be_arrays() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT.numpy())
    assert torch.equal(loss.weight, as_torch(WEIGHT))


def test_arguments_are_those_of_the_class_statement_and_initial_values_are_not_kept() -> None:
    assert list(inspect.signature(nn.Conv1d).parameters)[:4] == ["in_channels", "out_channels", "kernel_size", "stride"]
    with raises(TypeError, "Dense: missing a required argument: 'out_channels'", "Dense(in_channels"):
        nn.Dense(3)
    with raises(TypeError, "unexpected keyword argument 'slope'"):
        ms.ops.ReLU(slope=0.1)
    layer = nn.Dense(2, 3, weight_init="ones", activation="relu")
    assert layer.in_channels == 2
    assert not hasattr(layer, "weight_init")
    assert torch.equal(layer.weight, torch.ones(3, 2))
