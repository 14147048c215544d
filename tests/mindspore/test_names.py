"""The names that programs use: functions, primitives, cells, losses, optimizers, metrics; and those that are absent."""

from __future__ import annotations

import importlib
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import planned_by_context
from mindspore.operator_samples import i, r
from raising import raises
from shardwise.mindspore import mint, named, nn, ops
from shardwise.mindspore.nn import simple, wrapped
from shardwise.mindspore.ops.functions import FUNCTIONS
from shardwise.mindspore.ops.simple import SIMPLE

X, Y, CUBE = r(4, 6), r(4, 6) + 0.1, r(2, 4, 6)
IMAGE, MASK, IDS = r(2, 4, 6, 6), r(4, 6) > 0, i(6, 4)
RAMP = torch.arange(64.0).reshape(1, 1, 8, 8) + 2 * torch.arange(8.0).reshape(8, 1)  # 10 y + x
# Calls in the reference's words, and their formulas.
CALLS: list[tuple[Any, Any]] = [
    (ops.where(condition=MASK, input=X, other=0.0), X * MASK),
    (ops.arange(2, 8, 2), torch.tensor([2, 4, 6])), (ops.arange(end=3), torch.arange(3)),
    (ops.bmm(CUBE, CUBE.mT), CUBE @ CUBE.mT), (ops.einsum("ij,kj->ik", X, Y), X @ Y.T),
    (ops.tril(X, diagonal=1), X.tril(1)), (ops.cat((X, Y), axis=1), torch.cat((X, Y), 1)),
    (ops.silu(X), X * torch.sigmoid(X)), (ops.fast_gelu(X), X / (1 + torch.exp(-1.702 * X))),
    (ops.cross_entropy(X, IDS), -X.log_softmax(1)[torch.arange(4), IDS].mean()),
    (ops.masked_fill(X, MASK, 2.0), torch.where(MASK, 2.0, X)), (ops.max(X, axis=1), tuple(X.max(1))),
    (ops.max(X), (X.max(), torch.zeros((), dtype=torch.int32))), (ops.std(X, axis=0, ddof=1), X.std(0)),
    (ops.sum(X, dim=1, keepdim=True), X.sum(1, True)), (ops.reduce_sum(X, axis=1, keep_dims=True), X.sum(1, True)),
    (ops.mean(x=X, axis=(0, 1)), X.mean()), (ops.mean(input=X, dim=0, keepdims=True), X.mean(0, True)),
    (ops.split(X, 2, axis=1), X.split(2, 1)), (ops.split(X, axis=1, output_num=3), X.split(2, 1)),
    (ops.topk(X, k=2, dim=0), tuple(X.topk(2, 0))),
    (ops.gather_elements(X, 1, IDS[:, None]), X.gather(1, IDS[:, None])),
    (ops.one_hot(IDS, 6, 1.0, 0.0), torch.eye(6)[IDS]), (ops.clip_by_norm(X, 1.0), X / (X.norm() + 1e-6)),
    (ops.rms_norm(X, Y[0])[0], X * (X.square().mean(-1, True) + 1e-6).rsqrt() * Y[0]),
    (ops.scatter_nd(IDS[:, None], X[:, 0], (6,)), torch.zeros(6).double().index_add(0, IDS, X[:, 0])),
    (ops.sequence_mask(torch.tensor([1, 3]), 4), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]]).bool()),
    (ops.vander(x=X[0]), torch.vander(X[0])), (ops.vecdot(x=X, y=Y), (X * Y).sum(1)),
    (ops.flatten(IMAGE), IMAGE.reshape(2, -1)), (ops.repeat_elements(X, 2, 1), X.repeat_interleave(2, 1)),
    (ops.meshgrid(X[0], X[1, :2]), tuple(torch.meshgrid(X[0], X[1, :2], indexing="xy"))),
    (ops.addcdiv(X, X, Y, 2.0), X + 2 * X / Y), (ops.xdivy(0 * X, 0 * X), 0 * X),
    (ops.conv2d(IMAGE, r(3, 4, 3, 3), pad_mode="same"), F.conv2d(IMAGE, r(3, 4, 3, 3), padding=1)),
    (ops.l2_normalize(X), F.normalize(X)), (ops.tensor_dot(X, Y, ((0, 1), (0, 1))), (X * Y).sum()),
    (ops.batch_dot(X, Y), (X * Y).sum(1)), (ops.logsumexp(X, 1), X.exp().sum(1).log()),
    (ops.full((2, 3), 1.5), torch.full((2, 3), 1.5)), (ops.norm(X), X.norm()),
    (ops.isclose(X, X), torch.ones(4, 6) > 0),
    (ops.stack((X, Y), axis=-1), torch.stack((X, Y), -1)), (ops.cumsum(x=X, axis=1), X.cumsum(1)),
    (ops.expand_dims(X, 0), X[None]), (ops.transpose(CUBE, (2, 0, 1)), CUBE.permute(2, 0, 1)),
    (ops.clamp(X, min=0), X.clamp(min=0)), (ops.size(X), 24), (ops.shape(X), (4, 6)), (ops.unstack(X), X.unbind(0)),
    # primitives
    (ops.SiLU()(X), F.silu(X)), (ops.Tril(1)(X), X.tril(1)), (ops.RmsNorm(1e-5)(X, Y[0])[0],
                                                               ops.rms_norm(X, Y[0], 1e-5)[0]),
    (ops.Einsum("ij,ij->i")((X, Y)), (X * Y).sum(1)), (ops.LinSpace()(0.0, 1.0, 3), torch.tensor([0, 0.5, 1.0])),
    (ops.ReduceStd(axis=1)(X), (X.std(1), X.mean(1))), (ops.ReverseV2([1])(X), X.flip(1)),
    (ops.DepthToSpace(2)(ops.SpaceToDepth(2)(IMAGE)), IMAGE), (ops.Pad(((1, 0), (0, 2)))(X), F.pad(X, (0, 2, 1, 0))),
    (ops.ResizeBilinear((3, 3))(IMAGE), IMAGE[..., ::2, ::2]),  # element i lies at i * size / wanted
    (ops.ResizeBilinear((3, 3), half_pixel_centers=True)(IMAGE), F.interpolate(IMAGE, (3, 3), mode="bilinear")),
    (nn.ResizeBilinear()(torch.tensor([[[[1.0, 2, 3, 4], [5, 6, 7, 8]]]]), size=(5, 5))[0, 0, :, 1],
     torch.tensor([1.8, 3.4, 5.0, 5.8, 5.8])),
    (ops.ResizeNearestNeighbor((3, 3), True)(IMAGE), IMAGE[..., [0, 3, 5], :][..., [0, 3, 5]]),
    *((ops.MirrorPad(mode.upper())(X, torch.tensor([[1, 1], [2, 0]])), torch.tensor(np.pad(X, ((1, 1), (2, 0)), mode)))
      for mode in ("reflect", "symmetric")),
    (ops.MaxPoolWithArgmax(2, 2)(IMAGE), F.max_pool2d(IMAGE, 2, 2, return_indices=True)),
    (ops.Pack(1)((X, Y)), torch.stack((X, Y), 1)),
    (ops.Cross(1)(X[:, :3], Y[:, :3]), torch.linalg.cross(X[:, :3], Y[:, :3])),
    (ops.FlashAttentionScore(2, scale_value=3**-0.5)(CUBE, CUBE, CUBE)[3],
     F.scaled_dot_product_attention(*(CUBE.view(2, 4, 2, 3).transpose(1, 2),) * 3).transpose(1, 2).reshape(2, 4, 6)),
    (ops.KLDivLoss()(X.log_softmax(1), Y.softmax(1)), (Y.softmax(1) * (Y.log_softmax(1) - X.log_softmax(1))).mean()),
    (ops.BCEWithLogitsLoss("sum")(X, MASK.double(), None, None), F.binary_cross_entropy_with_logits(
        X, MASK.double(), reduction="sum")), (ops.isin(IDS, IDS[:1]), IDS[0] == IDS), (ops.Trunc()(X), X.trunc()),
    (ops.ScatterNdUpdate()(X.clone(), IDS[:1, None], Y[:1]), X.index_copy(0, IDS[:1], Y[:1])),
    (ops.TensorScatterElements(1)(X, IDS[:, None], Y[:, :1]), X.scatter(1, IDS[:, None], Y[:, :1])),
    (ops.MatrixPower(2)(X[:, :4]), X[:, :4] @ X[:, :4]),
    (ops.Renorm(2, 0, 0.5)(X), 0.5 * X / X.norm(dim=1, keepdim=True)),
    (ops.AdaptiveMaxPool2D(3)(IMAGE), F.max_pool2d(IMAGE, 2, return_indices=True)), (ops.Im2Col(2, 2)(IMAGE), F.unfold(
        IMAGE, 2, stride=2)), (ops.UnravelIndex()(IDS, (2, 3)), (IDS // 3, IDS % 3)),
    (ms.recompute(torch.sin, X), X.sin()),
    (nn.ReplicationPad3d(1)(IMAGE[None]), F.pad(IMAGE[None], (1,) * 6, "replicate")),
    (ops.Size()(X), 24), (ops.Rank()(X), 2), (ops.MaskedFill()(X, MASK, 1.0), torch.where(MASK, 1.0, X)),
    # cells and losses
    (nn.SiLU()(X), F.silu(X)), (nn.GLU(0)(X), F.glu(X, 0)), (nn.Hardtanh(-0.5, 0.5)(X), X.clamp(-0.5, 0.5)),
    (nn.AdaptiveAvgPool2d(3)(IMAGE), IMAGE.reshape(2, 4, 3, 2, 3, 2).mean((3, 5))),
    (nn.MaxPool1d(3, 2, "same")(CUBE), F.max_pool1d(F.pad(CUBE, (0, 1), value=-1e9), 3, 2)),
    (nn.MaxPool1d(3, 2, "same", dilation=2)(CUBE),
     F.max_pool1d(F.pad(CUBE, (1, 2), value=-1e9), 3, 2, dilation=2)),
    (nn.MaxPool2d(3, 2, "same", dilation=2)(IMAGE),
     F.max_pool2d(F.pad(IMAGE, (1, 2, 1, 2), value=-1e9), 3, 2, dilation=2)),
    (nn.AvgPool3d(3, 2, "same", divisor_override=9)(CUBE[None]),
     3 * F.avg_pool3d(F.pad(CUBE[None], (0, 1, 0, 1, 0, 1)), 3, 2)),
    (nn.MaxPool3d(3, 2, "same")(CUBE[None]), F.max_pool3d(F.pad(CUBE[None], (0, 1, 0, 1, 0, 1), value=-1e9), 3, 2)),
    (nn.AvgPool3d(3, 2, "same")(1 + 0 * CUBE[None]), torch.ones(1, 1, 2, 3)),
    (nn.MaxUnpool2d(2)(*F.max_pool2d(IMAGE, 2, return_indices=True)), F.max_unpool2d(
        *F.max_pool2d(IMAGE, 2, return_indices=True), 2)),
    (nn.Pad(((1, 1), (0, 2)), "SYMMETRIC")(X), torch.tensor(np.pad(X, ((1, 1), (0, 2)), "symmetric"))),
    (nn.BiDense(6, 6, 1, "ones", "ones")(X.float(), Y.float())[:, 0], 1 + (X.sum(1) * Y.sum(1)).float()),
    (nn.AvgPool1d(2, 2)(CUBE), CUBE.reshape(2, 4, 3, 2).mean(-1)),
    (nn.Pad(((1, 1), (0, 2)))(X), F.pad(X, (0, 2, 1, 1))),
    (nn.MaxPool2d(3, 2, "pad", 1)(IMAGE), F.max_pool2d(IMAGE, 3, 2, 1)), (nn.ClipByNorm()(X, 1.0), X / X.norm()),
    (nn.PixelShuffle(2)(IMAGE), F.pixel_shuffle(IMAGE, 2)), (nn.Norm(1)(X), X.norm(dim=1)), (nn.Tril()(X), X.tril()),
    (nn.Moments(axis=0)(X), (X.mean(0), X.var(0, correction=0))), (nn.ZeroPad2d(1)(IMAGE), F.pad(IMAGE, (1,) * 4)),
    (nn.OneHot(depth=6)(IDS), torch.eye(6)[IDS]), (nn.HuberLoss(delta=0.5)(X, Y), F.huber_loss(X, Y, delta=0.5)),
    (nn.FocalLoss(gamma=0.0)(X, IDS), F.cross_entropy(X, IDS)), (nn.RMSELoss()(X, Y), (X - Y).square().mean().sqrt()),
    (nn.DiceLoss(smooth=1.0)(X, Y), 1 - 2 * (X * Y).sum() / (X.square().sum() + Y.square().sum() + 1)),
    (nn.KLDivLoss("sum")(X.log_softmax(1), Y.softmax(1)), F.kl_div(X.log_softmax(1), Y.softmax(1), reduction="sum")),
    (nn.InstanceNorm2d(4, dtype=torch.float64)(IMAGE), F.instance_norm(IMAGE)),
    (nn.TripletMarginLoss()(X, Y, -X), F.triplet_margin_loss(X, Y, -X)),
    (nn.PSNR(2.0)(IMAGE, IMAGE + 0.2), torch.full((2,), 20.0)), (nn.SSIM(filter_size=5)(IMAGE, IMAGE), torch.ones(2)),
    (nn.SSIM(filter_size=5)(0 * IMAGE + 1, 0 * IMAGE), torch.full((2,), 1e-4 / (1 + 1e-4))),
    (nn.ImageGradients()(IMAGE), (F.pad(IMAGE[:, :, 1:] - IMAGE[:, :, :-1], (0, 0, 0, 1)),
                                  F.pad(IMAGE[..., 1:] - IMAGE[..., :-1], (0, 1)))),
    # boxes: those of a ramp are the values in their middles
    (ops.ROIAlign(2, 2, 0.5)(torch.tensor([[[[1.0, 2], [3, 4]]]]), torch.tensor([[0, 0.2, 0.3, 0.2, 0.3]])),
     torch.tensor([[[[1.775, 2.025], [2.275, 2.525]]]])),
    (ops.ROIAlign(2, 1, 1.0, 3, 0)(RAMP, torch.tensor([[0, 1.0, 1, 5, 3], [0, 2, 2, 2, 2]])),
     torch.tensor([[[[18.0], [28]]], [[[25.0], [30]]]])),
    (ops.NMSWithMask(0.5)(torch.tensor([[0, 0, 9, 9, 0.6], [1, 1, 10, 10, 0.9], [2, 2, 11, 11, 0.5]]))[1:],
     (torch.tensor([1, 0, 2]), torch.tensor([True, False, False]))),
    (ops.NMSWithMask(0.5)(torch.tensor([[0, 0, 9, 9, 0.9], [2, 0, 11, 9, 0.6], [5, 0, 14, 9, 0.5]]))[2],
     torch.tensor([True, False, True])),  # what stands for another is itself gone
    (ops.RandomChoiceWithMask(4)(torch.tensor([[False, False], [True, False]])),
     (torch.tensor([[1, 0], [0, 0], [0, 0], [0, 0]]), torch.tensor([True, False, False, False]))),
    # numpy
    (ms.numpy.concatenate((X, Y), 1), torch.cat((X, Y), 1)), (ms.numpy.mean([1.0, 2.0]), torch.tensor(1.5)),
    (ms.numpy.array([1, 2]), torch.tensor([1, 2])), (ms.numpy.power(X, 2), X**2),
]  # fmt: skip


def test_calls_in_the_words_of_the_reference_are_their_formulas() -> None:
    for number, (found, want) in enumerate(CALLS):
        own, other = pytree.tree_leaves(found), pytree.tree_leaves(want)
        assert len(own) == len(other), number
        for a, b in zip(own, other, strict=True):
            told = f"call {number}"
            if isinstance(b, Tensor):
                torch.testing.assert_close(a.as_subclass(Tensor), b.as_subclass(Tensor), check_dtype=False, msg=told)
            else:
                assert a == b, told


@pytest.mark.parametrize("mode", ["same", "valid", "pad"])
def test_transposed_convolutions_of_volumes_are_gradients_of_convolutions(mode: str) -> None:
    sizes = {"same": (8, 6, 4), "valid": (9, 7, 5), "pad": (8, 6, 4)}[mode]  # which the strides 2 make of 4, 3, 2
    settings: dict[str, Any] = {"stride": 2, "pad_mode": mode, "padding": int(mode == "pad"), "dtype": torch.float64}
    grows, shrinks = (
        nn.Conv3dTranspose(4, 3, 3, output_padding=int(mode == "pad"), **settings),
        nn.Conv3d(3, 4, 3, **settings),
    )
    shrinks.weight.set_data(grows.weight)
    x, y = r(2, 3, *sizes).requires_grad_(), r(2, 4, 4, 3, 2)
    (want,) = torch.autograd.grad(shrinks(x), x, y)
    torch.testing.assert_close(grows(y).as_subclass(Tensor), want)


def test_places_of_the_largest_are_those_of_the_image() -> None:
    for kernel in (3, 5):  # padded behind, and on both sides
        for largest, places in (ops.MaxPoolWithArgmax(kernel, 2, "same")(IMAGE), nn.MaxPool2d(
                kernel, 2, "same", return_indices=True)(IMAGE)):  # fmt: skip
            assert torch.equal(IMAGE.flatten(2).gather(2, places.flatten(2)), largest.flatten(2))
    for cell in (nn.MaxPool2d(3, 2, padding=1), nn.MaxPool1d(3, 2, padding=1), nn.AvgPool1d(3, 2, "same", 1)):
        with raises(ValueError, "padding is 1 with pad_mode"):
            cell(IMAGE[0])
    with raises(ValueError, 'pad_mode is "full"', "choose from pad, same, valid"):
        nn.MaxPool3d(3, 2, "full")(CUBE[None])
    with raises(ValueError, "ResizeBilinear(size=None, scale_factor=None)", "one of the two"):
        nn.ResizeBilinear()(IMAGE)


def test_every_function_and_simple_name_can_be_called_and_described() -> None:
    assert len(FUNCTIONS) > 300
    assert {*FUNCTIONS, *SIMPLE} <= {*ops.__all__}
    assert {*simple.CLASSES, *wrapped.CLASSES} <= {*nn.__all__}
    assert all(callable(getattr(ops, name)) for name in ops.__all__)
    assert all(getattr(nn, name) is not None for name in nn.__all__)
    with raises(TypeError, "SoftShrink(lambd=0.5)"):
        nn.SoftShrink(0.5, 1.0)


@pytest.mark.parametrize("module", [ops, ms.numpy, mint, mint.nn.functional, mint.linalg, mint.special])
def test_every_function_is_pickled_as_itself(module: Any) -> None:
    functions = [function for name in module.__all__ if callable(function := getattr(module, name))]
    assert len(functions) > 5
    assert all(pickle.loads(pickle.dumps(function)) is function for function in functions)


def test_absent_names_say_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for path, name, nearest in (
        ("ops", "Mattmul", "MatMul"), ("ops", "reduce_summ", "reduce_sum"), ("nn", "Dence", "Dense"),
        ("nn", "SoftmaxCrossEntropy", "SoftmaxCrossEntropyWithLogits"),
        ("dataset", "IMDBDataset", "GeneratorDataset"),
        ("dataset.vision", "RandomCropp", "RandomCrop"), ("train", "SummaryColector", "SummaryCollector"),
        ("ops.operations", "Sigmoidd", "Sigmoid"), ("ops", "CropAndResize", "ops.roi_align"),
        ("nn", "ASGD", "mint.optim.ASGD"), ("numpy", "aranje", "arange"), ("", "set_contxt", "set_context"),
        ("", "transform_checkpoint", "transform_checkpoints"), ("common.tensor", "CSRTensor", "ops.gather"),
        ("train.callback", "BackupAndRestore", "ModelCheckpoint"), ("nn.metrics", "Dice", "nn.Metric"),
        ("nn.wrap.cell_wrapper", "WithGradCell", "value_and_grad"), ("nn.optim.adam", "AdamOffload", "nn.Adam"),
        ("ops.function", "inplace_add", "torch.index_add"), ("ops.operations.nn_ops", "ReLUV2", "ops.ReLU"),
        ("boost", "AutoBoost", "amp_level"), ("parallel", "copies_report", "strategy_ckpt_save_file"),
        ("nn.cell", "Cel", "Cell"), ("train.callback", "LossMonitr", "LossMonitor"),
    ):  # fmt: skip
        module = importlib.import_module(f"shardwise.mindspore.{path}".rstrip("."))
        with raises(AttributeError, f"has no {name}\n", nearest):
            getattr(module, name)
        assert not hasattr(module, name)
        assert re.search(rf"has no {name}\n(.|\n)*{nearest}", capsys.readouterr().err)  # what an import drops
        with raises(ImportError, name):
            exec(f"from {module.__name__} import {name}", {})


def test_names_that_are_said_to_be_absent_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(named, "note", told.append)
    for path, rows in named.TABLES["absent"].items():
        module = importlib.import_module(f"shardwise.{'' if path == 'mindspore' else 'mindspore.'}{path}")
        names = " ".join(rows.values()).split()
        assert not [name for name in names if hasattr(module, name)], path
    assert len(told) > 150


def test_long_paths_of_imports_lead_here() -> None:
    for path, own in named.PATHS.items():
        module = importlib.import_module(f"shardwise.mindspore.{path}")
        assert module is importlib.import_module(f"shardwise.mindspore.{own}")
    from shardwise.mindspore.nn.optim.momentum import Momentum

    from shardwise.mindspore.ops import functional as Fn
    from shardwise.mindspore.train.callback import EarlyStopping

    assert (Momentum, Fn.relu, EarlyStopping) == (nn.Momentum, ops.relu, ms.train.EarlyStopping)


def _seen(rows: int, columns: int, before: int, behind: int) -> Tensor:
    """True for keys that a query does not see: those more than so far back or ahead."""
    ahead = torch.arange(columns) - torch.arange(rows)[:, None]
    return (ahead > behind) | (-ahead > before)


# sparse mode, queries, settings, and which keys each query does not see
SPARSE: list[tuple[int, int, dict[str, Any], Any]] = [
    (0, 5, {}, None), (1, 5, {"attn_mask": _seen(5, 5, 2, 1)}, _seen(5, 5, 2, 1)),
    (0, 5, {"attn_mask": _seen(5, 5, 9, 2), "pre_tokens": 1}, _seen(5, 5, 1, 2)),
    (2, 5, {"attn_mask": torch.ones(2048, 2048).triu(1).bool()}, _seen(5, 5, 9, 0)), (2, 2, {}, _seen(2, 5, 9, 0)),
    (3, 2, {}, _seen(2, 5, 9, 3)), (4, 2, {"pre_tokens": 1, "next_tokens": 0}, _seen(2, 5, -2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize(("mode", "rows", "settings", "hidden"), SPARSE)
def test_flash_attention_has_the_layouts_and_masks_of_the_reference(
    layout: str, mode: int, rows: int, settings: dict[str, Any], hidden: Any
) -> None:
    q, k, v = r(2, 4, rows, 3), r(2, 2, 5, 3), r(2, 2, 5, 3)  # two heads of keys for four of queries
    as_given = {
        "BNSD": lambda x: x, "BSND": lambda x: x.transpose(1, 2), "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    }[layout]  # fmt: skip
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    want = as_given(scores.softmax(-1) @ v.repeat_interleave(2, 1))
    found = ops.flash_attention_score(*map(as_given, (q, k, v)), 4, scalar_value=0.3, input_layout=layout,
                                      sparse_mode=mode, **settings)  # fmt: skip
    torch.testing.assert_close(found.as_subclass(Tensor), want)
    own = ops.FlashAttentionScore(4, scale_value=0.3, input_layout=layout, sparse_mode=mode, **{
        word: value for word, value in settings.items() if word != "attn_mask"})  # fmt: skip
    both = own(*map(as_given, (q, k, v)), None, None, None, settings.get("attn_mask"))[3]
    torch.testing.assert_close(both.as_subclass(Tensor), want)


def test_what_flash_attention_has_not_is_refused() -> None:
    for settings, message in (({"real_shift": X}, "real_shift"), ({"sparse_mode": 7}, "sparse_mode=7")):
        with raises(NotImplementedError, message, op="FlashAttentionScore"):
            ops.flash_attention_score(CUBE, CUBE, CUBE, 2, **settings)
    with raises(ValueError, 'input_layout is "TND"'):
        ops.flash_attention_score(CUBE, CUBE, CUBE, 2, input_layout="TND")


# -- mint --------------------------------------------------------------------------------------------------------------


class Attends(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = mint.nn.Embedding(7, 6), mint.nn.LayerNorm(6)
        self.qkv = mint.nn.Linear(6, 18, weight_init="ones", bias_init=0.5)
        self.head, self.drop = mint.nn.Linear(6, 7, bias=False), mint.nn.Dropout(p=0.5)

    def construct(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        q, k, v = mint.split(self.qkv(x), 6, dim=-1)
        weights = mint.nn.functional.softmax(mint.matmul(q, mint.transpose(k, -1, -2)), dim=-1)
        return self.head(self.drop(mint.matmul(weights, v)))


def test_a_network_of_mint_trains_as_torchs_does() -> None:
    net, ids = Attends(), i(7, 4, 5).int()
    assert [p.name for p in net.trainable_params()] == [
        "embedding.weight", "norm.weight", "norm.bias", "qkv.weight", "qkv.bias", "head.weight"]  # fmt: skip
    assert net.qkv.weight.min() == net.qkv.weight.max() == 1
    weights = [p.detach().clone().as_subclass(Tensor).requires_grad_() for p in net.get_parameters()]
    want = torch.optim.AdamW(weights, 0.1, weight_decay=0.2)
    rates = torch.optim.lr_scheduler.SequentialLR(
        want,
        [torch.optim.lr_scheduler.LinearLR(want, total_iters=2), torch.optim.lr_scheduler.StepLR(want, 1, 0.5)],
        [2],
    )
    optimizer = mint.optim.AdamW(net.trainable_params(), lr=0.1, weight_decay=0.2)
    from shardwise.mindspore.experimental.optim import lr_scheduler

    own_rates = lr_scheduler.SequentialLR(optimizer, [
        lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.StepLR(optimizer, 1, 0.5)], [2])  # fmt: skip
    loss_fn = mint.nn.CrossEntropyLoss()
    step = ms.value_and_grad(lambda x: loss_fn(net(x).reshape(-1, 7), x.reshape(-1)), None, optimizer.parameters)
    for _ in range(4):
        loss, grads = step(ms.Tensor(ids))  # in evaluation mode: nothing is dropped
        optimizer(grads)
        table, gain, shift, qkv, bias, head = weights
        q, k, v = (F.layer_norm(table[ids], (6,), gain, shift) @ qkv.T + bias).split(6, -1)
        other = F.cross_entropy(((q @ k.mT).softmax(-1) @ v @ head.T).reshape(-1, 7), ids.reshape(-1).long())
        want.zero_grad()
        other.backward()
        want.step()
        own_rates.step()
        rates.step()
        torch.testing.assert_close(loss.as_subclass(Tensor), other.detach(), rtol=1e-5, atol=1e-6)
        assert own_rates.get_last_lr() == pytest.approx(rates.get_last_lr())
    optimizer.param_groups[0]["lr"] = 0.0
    before = net.head.weight.asnumpy().copy()
    optimizer(grads)
    np.testing.assert_array_equal(net.head.weight.asnumpy(), before)


def test_mint_takes_what_programs_give() -> None:
    column = i(6, 4, 1).int()
    assert torch.equal(mint.gather(X, 1, column), X.gather(1, column.long()))
    assert isinstance(mint.zeros((2, 3)), ms.Tensor)
    assert mint.zeros(2, 3).shape == mint.ones((2, 3), dtype=ms.float16).shape == (2, 3)
    values, places = mint.max(X, dim=1)
    assert torch.equal(values, X.gather(1, places[:, None])[:, 0])
    assert torch.equal(mint.nn.functional.one_hot(IDS.int(), 6), F.one_hot(IDS, 6))
    for name in (*mint.__all__, "concatenate"):
        if name != "concatenate":
            assert getattr(mint, name) is not None
    with raises(AttributeError, "ms.mint", "has no concatenate\n", "concat"):
        _ = mint.concatenate
    conv = nn.SequentialCell(mint.nn.Conv2d(4, 3, 3, padding=1), mint.nn.BatchNorm2d(3), mint.nn.ReLU())
    image = IMAGE.float()
    want = F.relu(F.batch_norm(F.conv2d(image, conv[0].weight, conv[0].bias, padding=1), None, None, training=True))
    torch.testing.assert_close(conv.set_train()(image).as_subclass(Tensor), want.detach(), rtol=1e-4, atol=1e-5)


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_optimizers_follow_their_formulas() -> None:
    """Against torch's where it has the same formula, with the reference's starts."""
    cases: list[tuple[Any, Any]] = [
        (lambda p: nn.Adagrad(p, accum=0.0, learning_rate=0.1), lambda p: torch.optim.Adagrad(p, 0.1, eps=0.0)),
        (lambda p: nn.Adadelta(p, 0.5, 0.8, 1e-6), lambda p: torch.optim.Adadelta(p, 0.5, 0.8, 1e-6)),
        (lambda p: nn.AdaMax(p, 0.1, eps=1e-30), lambda p: torch.optim.Adamax(p, 0.1, eps=1e-30)),
        (lambda p: nn.LazyAdam(p, 0.1, eps=1e-30), lambda p: torch.optim.Adam(p, 0.1, eps=1e-30)),
    ]
    for own, other in cases:
        first, second = ms.Parameter(X.clone(), "p"), torch.nn.Parameter(X.clone())
        ours, torchs = own([first]), other([second])
        for step in range(3):
            gradient = (X * (step + 1)).sin()
            ours([gradient])
            second.grad = gradient.clone()
            torchs.step()
        torch.testing.assert_close(first.detach().as_subclass(Tensor), second.detach(), rtol=1e-9, atol=1e-12)
    p = ms.Parameter(torch.tensor([1.0, -2.0]).double(), "p")
    nn.RMSProp([p], 0.1, decay=0.5, epsilon=0.0)([torch.tensor([1.0, 2.0]).double()])  # s = .5 + .5 g^2
    torch.testing.assert_close(p.detach(), torch.tensor([1 - 0.1 / 1.0, -2 - 0.2 / 2.5**0.5]).double())
    p = ms.Parameter(torch.tensor([1.0]).double(), "p")
    nn.FTRL([p], initial_accum=0.25, learning_rate=0.5)([torch.tensor([0.5]).double()])
    z = 0.5 - (0.5**0.5 - 0.5) / 0.5  # a = .25 + .25
    torch.testing.assert_close(p.detach(), torch.tensor([-z / (0.5**0.5 / 0.5)]).double())
    p, q = (ms.Parameter(torch.full((2,), 3.0).double(), "w") for _ in range(2))
    nn.LARS(nn.Momentum([p], 0.1, 0.9), epsilon=0.0, coefficient=0.5)([torch.ones(2).double()])
    nn.Momentum([q], 0.1, 0.9)([torch.full((2,), 0.5 * 3.0).double()])
    torch.testing.assert_close(p.detach(), q.detach())


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_follow_their_definitions() -> None:
    output = np.array([[0.2, 0.5, 0.3], [0.3, 0.1, 0.6], [0.9, 0.05, 0.05], [0.4, 0.5, 0.1]])
    label = np.array([1, 0, 0, 1])
    measured = {}
    for name, metric in {
        "accuracy": nn.Accuracy(), "precision": nn.Precision(), "recall": nn.Recall(), "F1": nn.F1(),
        "top2": nn.TopKCategoricalAccuracy(2), "matrix": nn.ConfusionMatrix(3), "perplexity": nn.Perplexity(),
    }.items():  # fmt: skip
        metric.clear()
        for rows in (slice(2), slice(2, 4)):
            metric.update(ms.Tensor(output[rows]), label[rows])
        measured[name] = metric.eval()
    assert measured["accuracy"] == 0.75
    np.testing.assert_allclose(measured["precision"], [1, 1, 0])
    np.testing.assert_allclose(measured["recall"], [0.5, 1, 0])
    np.testing.assert_allclose(measured["F1"], [2 / 3, 1, 0])
    assert measured["top2"] == 1.0
    np.testing.assert_allclose(measured["matrix"], [[1, 0, 1], [0, 2, 0], [0, 0, 0]])
    np.testing.assert_allclose(measured["perplexity"], np.exp(-np.log([0.5, 0.3, 0.9, 0.5]).mean()))
    roc = nn.ROC(pos_label=1)
    roc.update(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    false, true, _ = roc.eval()
    np.testing.assert_allclose((false, true), ([0, 0, 0.5, 0.5, 1], [0, 0.5, 0.5, 1, 1]))
    assert nn.auc(false, true) == 0.75
    with raises(RuntimeError, "has seen no batch"):
        nn.Recall().eval()


# -- in construct ------------------------------------------------------------------------------------------------------


class Words(nn.Cell):
    """The reference's methods inside of construct, a torch module in the middle, recurrent and attention layers."""

    def __init__(self, *, recurrent: bool = True) -> None:
        super().__init__()
        self.dense, self.scale, self.recurrent = nn.Dense(6, 5), ms.Tensor(2.0), recurrent
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm = nn.LSTM(5, 5, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)

    def construct(self, x: Tensor) -> Tensor:
        y = self.encoder(x + self.attention(x, x, x)[0])
        z = self.dense(y).astype("float32") * self.scale  # type: ignore[attr-defined]
        z = self.lstm(z)[0] if self.recurrent else z
        best = z.max(axis=1, keepdims=True)  # type: ignore[call-overload]
        mixed = z.transpose((0, 2, 1)).expand_dims(1).squeeze(1)  # type: ignore[attr-defined, call-overload]
        return best.sum() + mixed.std(2).mean(axis=(0, 1)) + z.split(1, axis=0)[0][::-1].mean()  # type: ignore


def test_methods_of_tensors_hold_inside_construct_and_under_a_plan() -> None:
    ms.set_seed(0)
    net, x = Words(), r(4, 3, 6).float()
    value = net(ms.Tensor(x))
    assert isinstance(value, ms.Tensor)
    assert not hasattr(torch.Tensor, "expand_dims")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2)
    net = Words(recurrent=False)
    assert sw.verify(net, x, planned_by_context(net, (x,))).ok
    assert isinstance(ops.zeros((2, 3), ms.float32).asnumpy(), np.ndarray)


class Looks(nn.Cell):
    """Numbers in tuples, and operators whose results depend on which boxes stay, inside of a split cell."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.pad = nn.Dense(8, 8), ops.Pad(((0, 0), (0, 0), (1, 0), (0, 2)))
        self.mirror = nn.Pad(((0, 0), (0, 0), (1, 1), (1, 1)), "SYMMETRIC")
        self.align, self.keeps, self.ctc = ops.ROIAlign(2, 2, 1.0), ops.NMSWithMask(0.3), ops.CTCLoss()

    def construct(self, x: Tensor, boxes: Tensor, places: Tensor, classes: Tensor) -> Tensor:
        y = self.mirror(self.pad(self.dense(x)))
        found, _, kept = self.keeps(boxes)
        parts = self.align(y, ops.cat((torch.zeros(5, 1), found[:, :4]), 1)).mean((1, 2, 3)) * kept
        lengths = torch.full((y.shape[1],), y.shape[0])
        return (
            self.ctc(y[..., 0], places, classes, lengths)[0].sum() + parts.sum() + nn.SSIM(filter_size=3)(y, -y).mean()
        )


class Hooked(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.insert = nn.Dense(8, 8), ops.InsertGradientOf(lambda dx: dx)

    def construct(self, x: Tensor) -> Tensor:
        return self.insert(self.dense(x))


def test_paddings_boxes_and_sequences_hold_under_a_plan() -> None:
    ms.set_seed(0)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2)
    corners = 3 * torch.rand(5, 2)
    boxes = torch.cat((corners, corners + 1.5, torch.rand(5, 1)), 1)
    hooked = Hooked()
    with raises(sw.errors.CaptureError, "bprop(self, x, out, dout)"):
        planned_by_context(hooked, (r(2, 8).float(),))
    net, inputs = Looks(), (r(2, 3, 8, 8).float(), boxes, torch.tensor([[0, 0], [2, 0]]), torch.tensor([1, 2]))
    assert sw.verify(net, inputs, planned_by_context(net, inputs)).ok
