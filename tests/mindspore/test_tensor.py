"""``Tensor`` beside numpy, whose words the reference speaks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import shardwise.mindspore as ms
from raising import raises

DATA = np.random.RandomState(0).normal(size=(2, 3, 4))
LIKE_NUMPY: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "transpose(perm)": (lambda x: x.transpose(2, 0, 1), lambda a: a.transpose(2, 0, 1)),
    "transpose((perm))": (lambda x: x.transpose((0, 2, 1)), lambda a: a.transpose(0, 2, 1)),
    "transpose()": (lambda x: x.transpose(), lambda a: a.transpose()),
    "transpose of a matrix": (lambda x: x[0].transpose(0, 1), lambda a: a[0]),  # the dims in this order
    "transpose(1, 0)": (lambda x: x[0].transpose(1, 0), lambda a: a[0].T),
    "torch's transpose": (lambda x: x.transpose(0, 2), lambda a: a.swapaxes(0, 2)),
    "expand_dims": (lambda x: x.expand_dims(1), lambda a: a[:, None]),
    "split(axis)": (lambda x: x.split(2, axis=2)[1], lambda a: a[:, :, 2:]),
    "split(tensor)": (lambda x: x.split(ms.Tensor(2), axis=2)[1], lambda a: a[:, :, 2:]),
    "split(output_num)": (lambda x: x.split(axis=1, output_num=3)[2], lambda a: a[:, 2:]),
    "mean": (lambda x: x.mean(axis=1, keep_dims=True), lambda a: a.mean(1, keepdims=True)),
    "mean of dims": (lambda x: x.mean((0, 2)), lambda a: a.mean((0, 2))),
    "sum": (lambda x: x.sum(axis=-1, keepdims=True), lambda a: a.sum(-1, keepdims=True)),
    "prod": (lambda x: x.prod((0, 1)), lambda a: a.prod((0, 1))),
    "max": (lambda x: x.max(axis=1), lambda a: a.max(1)),
    "max of all": (lambda x: x.max(), lambda a: a.max()),
    "min": (lambda x: x.min(axis=0, keepdims=True), lambda a: a.min(0, keepdims=True)),
    "std": (lambda x: x.std(), lambda a: a.std()),
    "var": (lambda x: x.var(axis=(0, 1)), lambda a: a.var((0, 1))),
    "var(ddof)": (lambda x: x.var(2, ddof=1), lambda a: a.var(2, ddof=1)),
    "any": (lambda x: (x > 1).any(axis=1), lambda a: (a > 1).any(1)),
    "all": (lambda x: (x > -2).all(), lambda a: (a > -2).all()),
    "astype(name)": (lambda x: x.astype("float16"), lambda a: a.astype(np.float16)),
    "astype(numpy's)": (lambda x: x.astype(np.int32), lambda a: a.astype(np.int32)),
    "astype(ours)": (lambda x: x.astype(ms.float32), lambda a: a.astype(np.float32)),
    "copy": (lambda x: x.copy(), lambda a: a.copy()),
    "init_data": (lambda x: x.init_data(), lambda a: a),
    "backwards": (lambda x: x[:, ::-1, 3:0:-2], lambda a: a[:, ::-1, 3:0:-2]),
    "backwards behind dots": (lambda x: x[..., None, ::-1], lambda a: a[..., None, ::-1]),
    "backwards, nothing": (lambda x: x[0:2:-1], lambda a: a[0:2:-1]),
    "index": (lambda x: x[1, ms.Tensor([0, 2])], lambda a: a[1, [0, 2]]),
    "mask": (lambda x: x[x > 0], lambda a: a[a > 0]),
}


@pytest.mark.parametrize("name", LIKE_NUMPY)
def test_a_method_is_that_of_numpy(name: str) -> None:
    ours, numpys = LIKE_NUMPY[name]
    found, want = ours(ms.Tensor(DATA)), numpys(DATA)
    assert isinstance(found, ms.Tensor)
    assert found.asnumpy().dtype == want.dtype
    np.testing.assert_allclose(found.asnumpy(), want, rtol=1e-13, atol=1e-15)


def test_tensors_and_parameters_print_as_the_references_do() -> None:
    x = ms.Tensor([[1.0, 2.5]])
    assert (str(x), str(x.sum()), str(x > 2)) == ("[[1.  2.5]]", "3.5", "[[False  True]]")
    assert repr([x]) == "[Tensor(shape=[1, 2], dtype=Float32, value=\n[[ 1.00000000e+00,  2.50000000e+00]])]"
    weight = ms.Parameter(x, name="w", requires_grad=False)
    assert str(weight) == "Parameter (name=w, shape=(1, 2), dtype=Float32, requires_grad=False)"
    shown: list[str] = []
    ms.vmap(lambda row: (shown.append(str(row)), row)[1])(x)
    assert "BatchedTensor" in shown[0]  # which has no numbers of its own


def test_the_size_is_a_number_and_torch_may_call_it() -> None:
    x = ms.Tensor(DATA)
    assert (x.size, x.size + 1, x.size(), x.size(-1)) == (24, 25, torch.Size((2, 3, 4)), 4)
    weight = torch.ones(5, 4, dtype=torch.float64)
    assert torch.equal(F.linear(x, weight).as_subclass(torch.Tensor), F.linear(torch.from_numpy(DATA), weight))


def test_assignment_takes_arrays_and_lists_and_copies_are_apart() -> None:
    x = ms.Tensor(np.zeros((2, 3), np.float32))
    kept = x.copy()
    x[0] = np.array([1.0, 2.0, 3.0])
    x[1, :2] = [4, 5]
    x[1, 2] = ms.Tensor(6.0)
    assert x.asnumpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not kept.any()


def test_torchs_words_mean_what_they_mean_in_torch() -> None:
    x, plain = ms.Tensor(DATA), torch.from_numpy(DATA)
    values, places = x.max(dim=1)
    assert torch.equal(places.as_subclass(torch.Tensor), plain.max(dim=1).indices)
    assert torch.equal(values.as_subclass(torch.Tensor), plain.max(dim=1).values)
    assert x.max(dim=1).values.shape == x.median(dim=1).values.shape == (2, 4)
    for pair in (x.max(dim=1, keep_dims=True), x.min(axis=1, keepdim=True), x.max(1, keep_dims=True)):
        assert pair[0].shape == (2, 1, 4)
    assert x.sort(dim=None)[0].shape == x.argsort(dim=None).shape == (2, 3, 4)
    assert x.topk(2, dim=None)[0].shape == (2, 3, 2)
    assert x.std(unbiased=True).item() == plain.std().item()
    assert x.mean(1, keepdim=True).shape == (2, 1, 4)
    for wrong in (lambda: x.mean(axis=1, keep=True), lambda: x.var(ax=1)):
        with raises(TypeError, "unexpected keyword argument", fix="axis=None"):
            wrong()
    with raises(TypeError, "there is no dtype 'flaot16'", "float16"):
        x.astype("flaot16")
    with raises(ValueError, "4 elements in 3 parts"):
        x.split(axis=2, output_num=3)
    with raises(ValueError, "4 elements in 0 parts"):
        x[0, 0].split(0)
    with raises(ValueError, "sizes 2 and output_num=2", "split(axis=..., output_num=2)"):
        x.split(2, output_num=2)
    with raises(TypeError, "split() got an unexpected keyword argument 'parts'"):
        x.split(2, parts=2)


def test_flags_may_be_numbers_and_a_dtype_is_none() -> None:
    x = ms.Tensor(DATA)
    for kept in (1, np.bool_(True)):
        for name in ("mean", "all", "any", "prod"):
            assert getattr(x, name)(1, keep_dims=kept).shape == (2, 1, 4)
        assert x.sum(1, kept).shape == x.sum(1, keepdims=kept).shape == (2, 1, 4)
    assert x.sum(1, ms.float16).dtype == ms.float16
    assert [*inspect.signature(ms.Tensor.sum).parameters][1:4] == ["axis", "dtype", "keepdims"]
    with raises(TypeError, "float32 is in the place of keepdims"):
        x.mean(1, ms.float32)
    np.testing.assert_allclose(x.std(ddof=0.5).asnumpy(), DATA.std(ddof=0.5), rtol=1e-13)


def test_methods_that_torch_has_otherwise_are_the_references() -> None:
    x = ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert x.flatten(order="F").asnumpy().tolist() == [0, 3, 1, 4, 2, 5]
    assert x.flatten(start_dim=1).shape == (2, 3)
    with raises(ValueError, "order='A'"):
        x.flatten(order="A")
    assert x.norm(ord=1, dim=1).asnumpy().tolist() == [3, 12]
    assert x.norm(ord=1) == 7  # of a matrix: the largest column
    assert x.norm(p=1) == 15
    assert x.addcmul(x, x, 2).asnumpy()[1, 2] == 5 + 2 * 25
    assert x.addcdiv(x, x + 1, 2)[1, 2].item() == pytest.approx(5 + 2 * 5 / 6)
    assert x.resize(2, 2).asnumpy().tolist() == [[0, 1], [2, 3]]
    assert x.resize((2, 4)).asnumpy().tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    places = ms.Tensor([[2], [0]], ms.int32)
    assert x.scatter(axis=1, index=places, src=-x[:, 1:2]).asnumpy().tolist() == [[0, 1, -1], [-4, 4, 5]]
    assert x.index_fill(1, ms.Tensor([1], ms.int32), 9.0).asnumpy().tolist() == [[0, 9, 2], [3, 9, 5]]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mean", "axis=None, keep_dims=False"),
        ("std", "axis=None, ddof=0, keepdims=False"),
        ("cumsum", "axis, dtype=None"),
    ],
)
def test_methods_that_call_functions_have_their_signatures(name: str, arguments: str) -> None:
    assert str(inspect.signature(getattr(ms.Tensor, name))).partition(", ")[2] == f"{arguments})"
