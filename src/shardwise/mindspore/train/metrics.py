"""Metrics of ``Model.eval``, which are updated with (loss, output, label) of every batch, or by hand: ``clear``,
``update``, ``eval``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ClassVar, cast

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, from_on, one_of
from shardwise.mindspore.named import TABLES, Function, WithSettings, classes_of

Array = np.ndarray[Any, Any]


def _array(x: Any) -> Array:
    return x.detach().as_subclass(torch.Tensor).numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)


class Metric:
    """Base of metrics: ``clear``, ``update(output, label)`` and ``eval``."""

    wants_loss = False
    _indexes: Sequence[int] | None = None
    _convert_data = staticmethod(_array)
    has_selected_inputs = False  # True while Model.eval calls update with selected inputs

    indexes = property(lambda self: self._indexes)

    def _undefined(self, *inputs: Any) -> Any:
        raise NotImplementedError

    clear = update = eval = cast(Any, _undefined)

    def set_indexes(self, indexes: Sequence[int]) -> Metric:
        """Set the inputs of ``update`` by their positions in (loss, output, label)."""
        self._indexes = list(indexes)
        return self

    def update_from(self, outputs: tuple[Any, ...], all_of_them: bool = False) -> None:
        """Update with entries of (loss, output, label). ``all_of_them``: with all results of a user's network."""
        if self._indexes is not None:
            self.has_selected_inputs = True
            self.update(*(outputs[place] for place in self._indexes))
            self.has_selected_inputs = False
        else:
            self.update(*(outputs[:1] if self.wants_loss else outputs if all_of_them else outputs[1:] or outputs))


def rearrange_inputs(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method ``update`` so that it gets its inputs in the order of ``set_indexes``, also when it is called by
    hand."""

    @wraps(update)
    def ordered(metric: Metric, *inputs: Any) -> Any:
        if metric.indexes is not None and len(inputs) > max(metric.indexes) and not metric.has_selected_inputs:
            inputs = tuple(inputs[place] for place in metric.indexes)
        return update(metric, *inputs)

    return ordered


def _eval_type(name: str, value: Any) -> Any:
    if value not in ("classification", "multilabel"):
        raise TypeError(problem(f"{name} is {value!r}", fix="classification or multilabel"))
    return value


class _Kept(WithSettings, Metric):
    """A metric of all updates: ``function`` of every input of ``update``, with batches concatenated, and settings."""

    function: Function
    checks: ClassVar = {"eval_type": _eval_type, "k": partial(from_on, low=1),
                        "normalize": one_of("no_norm", "target", "prediction", "all")}  # fmt: skip

    def _settle(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._seen: list[tuple[Array, ...]] = []

    def update(self, *inputs: Any) -> None:
        if self._seen and len(inputs) != len(self._seen[0]):
            raise ValueError(problem(f"{type(self).__name__}.update of {len(inputs)} inputs", fix="as many as before"))
        self._seen.append(tuple(np.atleast_1d(_array(value)) for value in inputs))

    def eval(self) -> Any:
        """Return the value. Raises RuntimeError if there was no update."""
        if not self._seen:
            raise RuntimeError(f"{type(self).__name__} has seen no batch")
        return type(self).function(*map(np.concatenate, zip(*self._seen, strict=True)), **self._chosen())


class _OfClasses(_Kept):
    """A score per class; with ``average`` the mean over classes."""

    def eval(self, average: bool = False) -> Any:
        score = super().eval()
        return score.mean() if average else score


class Loss(_Kept):
    """The mean of the losses of the batches."""

    wants_loss = True
    function = staticmethod(lambda losses: float(losses.mean()))

    def update(self, *inputs: Any) -> None:
        super().update(_array(inputs[0]).mean())


def _classes(output: Array, label: Array) -> Array:
    """Return labels, which may be one-hot, as class indices."""
    return label.argmax(1) if label.ndim == output.ndim else label


def _ratio(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole != 0)


def _counts(output: Array, label: Array, eval_type: str = "classification") -> tuple[Array, Array, Array]:
    if eval_type == "multilabel":
        dims = tuple(dim for dim in range(output.ndim) if dim != 1)
        return (output * label).sum(dims), output.sum(dims), label.sum(dims)
    labels, guess = _classes(output, label).reshape(-1).astype(int), output.argmax(1).reshape(-1)
    count = output.shape[1]
    right, every, all_labels = (np.bincount(x, minlength=count) for x in (guess[guess == labels], guess, labels))
    return right, every, all_labels


def _accuracy(output: Array, label: Array, *, eval_type: str = "classification") -> float:
    if eval_type == "multilabel":
        return float(np.moveaxis(output == label, 1, -1).reshape(-1, output.shape[1]).all(1).mean())
    return float((output.argmax(1) == _classes(output, label)).mean())


def _in_top(output: Array, label: Array, *, k: int) -> float:
    best = np.argsort(-output, 1, kind="stable")[:, :k]
    return float((best == _classes(output, label).reshape(-1, 1)).any(1).mean())


def _perplexity(output: Array, label: Array, *, ignore_label: Any = None) -> float:
    output, label = output.reshape(-1, output.shape[-1]), label.reshape(-1).astype(int)
    counted = np.ones(label.shape, bool) if ignore_label is None else label != ignore_label
    chosen = output[np.arange(len(label)), np.where(counted, label, 0)][counted]
    return float(np.exp(-np.log(np.maximum(chosen, 1e-10)).mean()))


def _confusion(
    output: Array, label: Array, *, num_classes: int, normalize: Any = "no_norm", threshold: Any = 0.5
) -> Any:
    if output.ndim == label.ndim + 1:
        output = output.argmax(1)
    elif output.dtype.kind == "f":
        output = output >= threshold
    matrix = np.zeros((num_classes,) * 2)
    np.add.at(matrix, (label.reshape(-1).astype(int), output.reshape(-1).astype(int)), 1)
    if normalize == "no_norm":
        return matrix
    axis = {"target": 1, "prediction": 0, "all": None}[normalize]
    return _ratio(matrix, np.broadcast_to(matrix.sum(axis, keepdims=True), matrix.shape))


def _roc(output: Array, label: Array, *, class_num: Any = None, pos_label: Any = None) -> Any:
    if class_num is None or class_num < 2 or output.ndim == 1:
        return _curve(output.reshape(-1), label.reshape(-1) == (1 if pos_label is None else pos_label))
    curves = [_curve(output[:, c], label.reshape(-1) == c) for c in range(class_num)]
    return tuple(map(list, zip(*curves, strict=True)))


def _curve(score: Array, right: Array) -> tuple[Array, Array, Array]:
    order = np.argsort(-score, kind="stable")
    score, right = score[order], right[order]
    ends = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    hits, wrong = np.cumsum(right)[ends], np.cumsum(~right)[ends]
    false, true = (np.append(0, counts) / max(counts[-1], 1) for counts in (wrong, hits))
    return false, true, np.append(score[0] + 1, score[ends])


def auc(x: Any, y: Any, reorder: bool = False) -> float:
    """Return the area under a curve by the trapezoidal rule."""
    x, y = np.asarray(x), np.asarray(y)
    if reorder:
        order = np.lexsort((y, x))
        x, y = x[order], y[order]
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))


def _far(power: int) -> Function:
    return lambda x, y: float((np.abs(x.reshape(y.shape) - y) ** power).sum() / len(y))


CLASSES: dict[str, Any] = {
    **classes_of({
        "Accuracy": _accuracy, "ConfusionMatrix": _confusion, "MAE": _far(1), "MSE": _far(2), "Perplexity": _perplexity,
        "ROC": _roc, "TopKCategoricalAccuracy": _in_top,
        "Top1CategoricalAccuracy": lambda output, label: _in_top(output, label, k=1),
        "Top5CategoricalAccuracy": lambda output, label: _in_top(output, label, k=5),
    }, _Kept, __name__),
    **classes_of({
        "F1": lambda output, label: _ratio(2 * (counts := _counts(output, label))[0], counts[1] + counts[2]),
        "Precision": lambda output, label, *, eval_type="classification": _ratio(
            *_counts(output, label, eval_type)[:2]),
        "Recall": lambda output, label, *, eval_type="classification": _ratio(*_counts(output, label, eval_type)[::2]),
    }, _OfClasses, __name__),
    "Loss": Loss,
}  # fmt: skip
globals().update(CLASSES)
NAMES: dict[str, Callable[..., Metric]] = {
    name: CLASSES[kind] for name, _, kind in (row.partition("=") for row in TABLES["train"]["metrics"].split())
}


def get_metric_fn(name: str, *args: Any, **kwargs: Any) -> Metric:
    """Return a metric by its name."""
    if name not in NAMES:
        raise ValueError(problem(f"there is no metric {name!r}", fix=f"{closest(name, NAMES)}, or {{name: Metric}}"))
    return NAMES[name](*args, **kwargs)


def metrics_of(argument: Any) -> dict[str, Metric]:
    """Return metrics by name, from a name, several, or a dict of name -> Metric."""
    if argument is None:
        return {}
    if isinstance(argument, dict):
        return dict(argument)
    return {name: get_metric_fn(name) for name in ([argument] if isinstance(argument, str) else argument)}


__all__ = ["Metric", "auc", "get_metric_fn", "rearrange_inputs", *CLASSES]
