"""Metrics of ``Model.eval``, which are updated with (loss, output, label) of every batch, or by hand: ``clear``,
``update``, ``eval``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, from_on
from shardwise.mindspore.named import WithSettings

Array = np.ndarray[Any, Any]


def _array(x: Any) -> Array:
    return x.detach().as_subclass(torch.Tensor).numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)


class Metric:
    """Base of metrics: ``clear``, ``update(output, label)`` and ``eval``."""

    wants_loss = False
    _indexes: Sequence[int] | None = None
    _convert_data = staticmethod(_array)
    has_selected_inputs = False  # True while Model.eval calls update with selected inputs

    def clear(self) -> None:
        raise NotImplementedError

    def update(self, *inputs: Any) -> None:
        raise NotImplementedError

    def eval(self) -> Any:
        raise NotImplementedError

    @property
    def indexes(self) -> Sequence[int] | None:
        return self._indexes

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


class _Kept(WithSettings, Metric):
    """A metric of all updates: it keeps lists of the arrays of ``update``."""

    def _settle(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._seen: list[list[Array]] = []

    def update(self, *inputs: Any) -> None:
        if self._seen and len(inputs) != len(self._seen):
            raise ValueError(problem(f"{type(self).__name__}.update of {len(inputs)} inputs", fix="as many as before"))
        self._seen = self._seen or [[] for _ in inputs]
        for kept, value in zip(self._seen, inputs, strict=True):
            kept.append(_array(value))

    def seen(self) -> list[Array]:
        """Return every input of ``update``, with batches concatenated. Raises RuntimeError if there was none."""
        if not self._seen:
            raise RuntimeError(f"{type(self).__name__} has seen no batch")
        return [np.concatenate([np.atleast_1d(batch) for batch in kept]) for kept in self._seen]

    def eval(self) -> Any:
        return self.of(*self.seen())

    def of(self, *arrays: Array) -> Any:
        raise NotImplementedError


class Loss(_Kept):
    """The mean of the losses of the batches."""

    wants_loss = True

    def update(self, *inputs: Any) -> None:
        super().update(np.mean(_array(inputs[0])))

    def of(self, *arrays: Array) -> Any:
        return float(arrays[0].mean())


class MAE(_Kept):
    """The mean absolute difference."""

    def of(self, *arrays: Array) -> Any:
        return float(np.abs(arrays[0].reshape(arrays[1].shape) - arrays[1]).mean())


class MSE(_Kept):
    """The mean squared difference."""

    def of(self, *arrays: Array) -> Any:
        return float(np.square(arrays[0].reshape(arrays[1].shape) - arrays[1]).mean())


def _classes(output: Array, label: Array) -> Array:
    """Return labels, which may be one-hot, as class indices."""
    return label.argmax(1) if label.ndim == output.ndim else label


class _Typed(_Kept, eval_type="classification"):
    """A metric with an ``eval_type``: "classification" (outputs per class; labels as indices or one-hot), or
    "multilabel" (zeros and ones)."""

    def _settle(self) -> None:
        if self.eval_type not in ("classification", "multilabel"):
            raise TypeError(problem(f"eval_type is {self.eval_type!r}", fix="classification or multilabel"))
        super()._settle()

    def counts(self) -> tuple[Array, Array, Array]:
        """Return true positives, predictions and labels of each class."""
        output, label = self.seen()
        if self.eval_type == "multilabel":
            dims = tuple(dim for dim in range(output.ndim) if dim != 1)
            return (output * label).sum(dims), output.sum(dims), label.sum(dims)
        number, labels = output.shape[1], _classes(output, label).reshape(-1).astype(int)
        guess = output.argmax(1).reshape(-1)
        right, every, labels = (np.bincount(x, minlength=number) for x in (guess[guess == labels], guess, labels))
        return right, every, labels


class Accuracy(_Typed):
    """The fraction of rows that are right."""

    def of(self, *arrays: Array) -> Any:
        output, label = arrays
        if self.eval_type == "multilabel":
            rows = np.moveaxis(output == label, 1, -1).reshape(-1, output.shape[1])
            return float(rows.all(1).mean())
        return float((output.argmax(1) == _classes(output, label)).mean())


def _ratio(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole != 0)


class _OfClasses(_Typed):
    """A score per class from true positives, predictions and labels; with ``average`` the mean over classes."""

    def eval(self, average: bool = False) -> Any:
        score = self.score(*self.counts())
        return score.mean() if average else score

    def score(self, right: Array, predicted: Array, labels: Array) -> Array:
        raise NotImplementedError


class Precision(_OfClasses):
    """The fraction of each class's predictions that are right; with ``average`` the mean over classes."""

    def score(self, right: Array, predicted: Array, labels: Array) -> Array:
        return _ratio(right, predicted)


class Recall(_OfClasses):
    """The fraction of each class's labels that were predicted; with ``average`` the mean over classes."""

    def score(self, right: Array, predicted: Array, labels: Array) -> Array:
        return _ratio(right, labels)


class Fbeta(_OfClasses, beta=...):
    """(1 + beta^2) precision recall / (beta^2 precision + recall) of each class, or the mean."""

    eval_type = "classification"

    def score(self, right: Array, predicted: Array, labels: Array) -> Array:
        return _ratio((1 + self.beta**2) * right, self.beta**2 * labels + predicted)


class F1(Fbeta):
    """Fbeta with beta 1."""

    def __init__(self) -> None:
        super().__init__(1.0)


class TopKCategoricalAccuracy(_Kept, k=...):
    """The fraction of rows whose label is among the k largest outputs."""

    def _settle(self) -> None:
        from_on("k", self.k, 1)
        super()._settle()

    def of(self, *arrays: Array) -> Any:
        output, label = arrays
        best = np.argsort(-output, 1, kind="stable")[:, : self.k]
        return float((best == _classes(output, label).reshape(-1, 1)).any(1).mean())


class Top1CategoricalAccuracy(TopKCategoricalAccuracy):
    """Top-k accuracy with k = 1."""

    def __init__(self) -> None:
        super().__init__(1)


class Top5CategoricalAccuracy(TopKCategoricalAccuracy):
    """Top-k accuracy with k = 5."""

    def __init__(self) -> None:
        super().__init__(5)


class Perplexity(_Kept, ignore_label=None):
    """The exponential of the mean negative log-probability of the labels. ``ignore_label``: a label that is not
    counted."""

    def of(self, *arrays: Array) -> Any:
        output, label = arrays[0].reshape(-1, arrays[0].shape[-1]), arrays[1].reshape(-1).astype(int)
        counted = np.ones(label.shape, bool) if self.ignore_label is None else label != self.ignore_label
        chosen = output[np.arange(len(label)), np.where(counted, label, 0)][counted]
        return float(np.exp(-np.log(np.maximum(chosen, 1e-10)).mean()))


class CosineSimilarity(_Kept, similarity="cosine", reduction="none", zero_diagonal=True):
    """The cosines of all pairs of rows. ``similarity``: "cosine" or "dot"; ``reduction``: "none", "sum" or "mean" over
    rows; ``zero_diagonal``: set the similarity of a row with itself to 0."""

    def of(self, *arrays: Array) -> Any:
        rows = arrays[0]
        if self.similarity == "cosine":
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        matrix = rows @ rows.T
        if self.zero_diagonal:
            np.fill_diagonal(matrix, 0)
        return matrix if self.reduction == "none" else getattr(matrix, self.reduction)(-1)


class Dice(_Kept, smooth=1e-5):
    """The mean of 2 |both| / (|output| + |label|) over batches."""

    def update(self, *inputs: Any) -> None:
        output, label = (_array(value) for value in inputs)
        both = 2 * (output * label).sum() + self.smooth
        super().update(both / (np.square(output).sum() + np.square(label).sum() + self.smooth))

    def of(self, *arrays: Array) -> Any:
        return float(arrays[0].mean())


class ConfusionMatrix(_Kept, num_classes=..., normalize="no_norm", threshold=0.5):
    """Counts of (label, prediction). ``normalize``: "no_norm", "target", "prediction" or "all"."""

    def _settle(self) -> None:
        if self.normalize not in ("no_norm", "target", "prediction", "all"):
            raise ValueError(problem(f"normalize is {self.normalize!r}", fix="no_norm, target, prediction or all"))
        super()._settle()

    def of(self, *arrays: Array) -> Any:
        output, label = arrays
        if output.ndim == label.ndim + 1:
            output = output.argmax(1)
        elif output.dtype.kind == "f":
            output = output >= self.threshold
        matrix = np.zeros((self.num_classes,) * 2)
        np.add.at(matrix, (label.reshape(-1).astype(int), output.reshape(-1).astype(int)), 1)
        if self.normalize == "no_norm":
            return matrix
        axis = {"target": 1, "prediction": 0, "all": None}[self.normalize]
        return _ratio(matrix, np.broadcast_to(matrix.sum(axis, keepdims=True), matrix.shape))


class ROC(_Kept, class_num=None, pos_label=None):
    """The ROC curve of a score: false positive rates, true positive rates, thresholds. ``class_num``: number of
    classes; with several, each result is a list with one entry per class. ``pos_label``: the positive label."""

    def of(self, *arrays: Array) -> Any:
        output, label = arrays
        if self.class_num is None or self.class_num < 2 or output.ndim == 1:
            return _curve(output.reshape(-1), label.reshape(-1) == (1 if self.pos_label is None else self.pos_label))
        curves = [_curve(output[:, c], label.reshape(-1) == c) for c in range(self.class_num)]
        return tuple(map(list, zip(*curves, strict=True)))


def _curve(score: Array, right: Array) -> tuple[Array, Array, Array]:
    order = np.argsort(-score, kind="stable")
    score, right = score[order], right[order]
    ends = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    hits, wrong = np.cumsum(right)[ends], np.cumsum(~right)[ends]
    rates = (np.append(0, counts) / max(counts[-1], 1) for counts in (wrong, hits))
    false, true = rates
    return false, true, np.append(score[0] + 1, score[ends])


def auc(x: Any, y: Any, reorder: bool = False) -> float:
    """Return the area under a curve by the trapezoidal rule."""
    x, y = np.asarray(x), np.asarray(y)
    if reorder:
        order = np.lexsort((y, x))
        x, y = x[order], y[order]
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))


NAMES: dict[str, Callable[..., Metric]] = {
    "loss": Loss, "accuracy": Accuracy, "acc": Accuracy, "mae": MAE, "mse": MSE, "precision": Precision,
    "recall": Recall, "F1": F1, "f1": F1, "dice": Dice, "roc_curve": ROC, "perplexity": Perplexity,
    "cosine_similarity": CosineSimilarity, "top_1_accuracy": Top1CategoricalAccuracy,
    "top_5_accuracy": Top5CategoricalAccuracy, "confusion_matrix": ConfusionMatrix,
}  # fmt: skip


def names() -> list[str]:
    """Return the names of metrics for ``Model(metrics=)``."""
    return list(NAMES)


def get_metric_fn(name: str, *args: Any, **kwargs: Any) -> Metric:
    """Return a metric by its name."""
    if name not in NAMES:
        raise ValueError(problem(f"there is no metric {name!r}", fix=closest(name, NAMES)))
    return NAMES[name](*args, **kwargs)


def metrics_of(argument: Any) -> dict[str, Metric]:
    """Return metrics by name, from a name, several, or a dict of name -> Metric."""
    if argument is None:
        return {}
    if isinstance(argument, dict):
        return dict(argument)
    listed: Iterable[str] = [argument] if isinstance(argument, str) else argument
    metrics: dict[str, Metric] = {}
    for name in listed:
        if name not in NAMES:
            fix = f"one of {', '.join(NAMES)}, or {{name: Metric}}"
            raise ValueError(problem(f"there is no metric {name!r}", fix=fix))
        metrics[name] = NAMES[name]()
    return metrics


__all__ = [
    "F1", "MAE", "MSE", "ROC", "Accuracy", "ConfusionMatrix", "CosineSimilarity", "Dice", "Fbeta", "Loss", "Metric",
    "Perplexity", "Precision", "Recall", "Top1CategoricalAccuracy", "Top5CategoricalAccuracy",
    "TopKCategoricalAccuracy", "auc", "get_metric_fn", "names", "rearrange_inputs",
]  # fmt: skip
