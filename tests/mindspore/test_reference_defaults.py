"""Every default, and the order of arguments, of every loss, optimizer, layer and function of the dialect is that of the
reference in the version that the dialect follows, or is listed in ``reference_differences`` with a reason.

The reference's side is ``reference_signatures.json``, which ``make dialect-reference`` makes of its package.
"""

from __future__ import annotations

import importlib
import inspect
import json
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _C
from torch.nn import functional as F

from mindspore.reference_differences import DEFAULTS, ORDERS
from raising import raises
from shardwise.mindspore import Tensor, mint, nn, ops, train
from shardwise.mindspore.named import WORDS

CONTENT = json.loads(Path(__file__).with_name("reference_signatures.json").read_text())
REQUIRED = "(required)"


def plain(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return REQUIRED
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return items[0] if items and items.count(items[0]) == len(items) else items or None  # (): all dims
    return f"({str(value).rpartition('.')[2].lower()})"


def schemas(function: Any) -> list[dict[str, Any]]:
    """Of a function of torch's in C++: argument -> default, for every overload."""
    for prefix in ("", "special_", "linalg_", "fft_"):
        if found := _C._jit_get_schemas_for_operator(f"aten::{prefix}{function.__name__}"):
            return [
                {a.name.replace("self", "input"): plain(a.default_value) if a.has_default_value() else REQUIRED
                 for a in overload.arguments if not a.is_out}
                for overload in found
            ]  # fmt: skip
    return []


def signatures(value: Any) -> list[dict[str, Any]]:
    """Argument -> default, of every overload of a name of the dialect; behind ``"*"`` those given by name."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return schemas(inspect.unwrap(value))
    told = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if parameters and not told:  # what it hands its arguments to says them
        inner = inspect.unwrap(value)
        cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
        kinds = [getattr(value, name, None) for name in ("make", "operator", "kind")] if inspect.isclass(value) else []
        behind = next(filter(callable, (*kinds, *(cells if not inspect.isclass(value) else ()))), None)
        return [] if behind is None else signatures(behind)
    known: dict[str, Any] = {}
    for parameter in told:
        if parameter.kind is parameter.KEYWORD_ONLY:
            known.setdefault("*", None)
        known[parameter.name] = plain(parameter.default)
    return [known]


def found_in(argument: str, known: dict[str, Any]) -> str | None:
    same = (word for word in known if any({argument, word} <= group for group in WORDS))
    return argument if argument in known else next(same, None)


def compared() -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]], int, list[str]]:
    """("module.name argument" -> other default, "module.name" -> other order, how many defaults were compared, names
    whose arguments nothing says)."""
    defaults: dict[str, tuple[Any, Any]] = {}
    orders: dict[str, tuple[Any, Any]] = {}
    count, unknown = 0, []
    for module_name, names in CONTENT["modules"].items():
        module = importlib.import_module(f"shardwise.mindspore.{module_name}")
        for name in names.keys() & {*dir(module), *getattr(module, "__all__", ())}:
            place, reference = f"{module_name}.{name}", names[name]
            overloads = signatures(getattr(module, name))
            if not overloads:
                unknown.append(place)
            for argument, default in reference.items():
                here = [known[word] for known in overloads if (word := found_in(argument, known)) and word != "*"]
                if here and default != REQUIRED:
                    count += 1
                    if plain(default) not in here:
                        defaults[f"{place} {argument}"] = default, here
            if len(overloads) == 1:
                given, own = (list(takewhile("*".__ne__, known)) for known in (reference, overloads[0]))
                pairs = zip(given, own, strict=False)
                if any(a != b and not any({a, b} <= group for group in WORDS) for a, b in pairs):
                    orders[place] = given, own
    return defaults, orders, count, unknown


def unlisted(found: dict[str, Any], listed: dict[str, tuple[str, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(What no pattern has, patterns that nothing has.)"""
    patterns = [pattern for some in listed.values() for pattern in some]
    rest = {place: pair for place, pair in found.items() if not any(fnmatch(place, pattern) for pattern in patterns)}
    return rest, [pattern for pattern in patterns if not any(fnmatch(place, pattern) for place in found)]


def test_defaults_and_the_order_of_arguments_are_the_references_or_listed_with_a_reason() -> None:
    assert (CONTENT["reference"], CONTENT["version"]) == ("mindspore", "2.10.0")
    defaults, orders, count, unknown = compared()
    assert unlisted(defaults, DEFAULTS) == ({}, [])
    assert unlisted(orders, ORDERS) == ({}, [])
    assert count > 1200
    assert sorted(unknown) == [  # they take what they are made of, or nothing
        "common.initializer.Initializer", "common.initializer.Tensor", "mint.einsum", "mint.nn.Identity",
        "mint.nn.LogSigmoid", "mint.nn.Sigmoid", "mint.nn.Tanh", "nn.CellList", "nn.SequentialCell",
        "train.LambdaCallback",
    ]  # fmt: skip


X = Tensor(torch.tensor([[3.0, -1.0, float("nan"), 2.0], [0.5, 4.0, 1.0, -2.0], [1.0, 2.0, 3.0, 8.0]]).double())
P, Q = torch.rand(3, 3, dtype=torch.float64), torch.rand(3, 3, dtype=torch.float64)
CLASSES = torch.tensor([[0, 2, -1], [1, -1, -1], [2, 0, -1]])
BOXES = torch.tensor([[1.0, 2.0, 5.0, 7.0], [0.0, 0.0, 3.0, 3.0]])
FIRST, SECOND = torch.rand(3, 4, 3), torch.rand(3, 4, 3)
# A call that leaves out, or gives in the reference's order, what the dialect had otherwise; what it is.
CALLS: dict[str, tuple[Any, Any]] = {
    "BCELoss": (lambda: nn.BCELoss()(P, Q), lambda: F.binary_cross_entropy(P, Q)),
    "mint BCELoss": (
        lambda: mint.nn.BCELoss(None, "none")(P, Q), lambda: F.binary_cross_entropy(P, Q, reduction="none")),
    "mint MSELoss": (lambda: mint.nn.MSELoss("sum")(P, Q), lambda: (P - Q).square().sum()),
    "mint SmoothL1Loss": (
        lambda: mint.nn.SmoothL1Loss("none", 0.5)(P, Q), lambda: F.smooth_l1_loss(P, Q, reduction="none", beta=0.5)),
    "mint KLDivLoss": (
        lambda: mint.nn.KLDivLoss("sum", True)(P, Q), lambda: F.kl_div(P, Q, reduction="sum", log_target=True)),
    "mint NLLLoss": (
        lambda: mint.nn.NLLLoss(None, 2, "sum")(P, torch.tensor([0, 1, 2])), lambda: -P[0, 0] - P[1, 1]),
    "mint binary_cross_entropy": (
        lambda: mint.nn.functional.binary_cross_entropy(P, Q, None, "none"),
        lambda: F.binary_cross_entropy(P, Q, reduction="none")),
    "mint cross_entropy": (
        lambda: mint.nn.functional.cross_entropy(P, torch.tensor([0, 1, 2]), None, 2, "sum", 0.1),
        lambda: F.cross_entropy(P, torch.tensor([0, 1, 2]), ignore_index=2, reduction="sum", label_smoothing=0.1)),
    "mint softmax": (
        lambda: mint.nn.functional.softmax(P, 0, torch.float32), lambda: F.softmax(P, 0, dtype=torch.float32)),
    "mint LayerNorm's dtype": (
        lambda: mint.nn.LayerNorm(3, 1e-5, True, True, torch.float64)(P), lambda: F.layer_norm(P, (3,))),
    "multilabel_margin_loss": (
        lambda: ops.multilabel_margin_loss(P, CLASSES, "sum"),
        lambda: F.multilabel_margin_loss(P, CLASSES, reduction="sum")),
    "multi_margin_loss": (
        lambda: ops.multi_margin_loss(P, torch.tensor([0, 1, 2]), 1, 1.0, None, "none"),
        lambda: F.multi_margin_loss(P, torch.tensor([0, 1, 2]), reduction="none")),
    "std_mean": (lambda: ops.std_mean(Tensor(P), 1), lambda: (P.std(1, correction=0), P.mean(1))),
    "aminmax": (lambda: ops.aminmax(Tensor(P)), lambda: (P.amin(0), P.amax(0))),
    "nanmedian": (lambda: ops.nanmedian(X), lambda: (torch.tensor([2, 0.5, 2]).double(), torch.tensor([3, 0, 1]))),
    "avg_pool1d": (lambda: ops.avg_pool1d(P, 2), lambda: (P[:, :-1] + P[:, 1:]) / 2),
    "avg_pool3d": (lambda: ops.avg_pool3d(P[None, None], 1), lambda: P[None, None]),
    "cross": (lambda: ops.cross(FIRST, SECOND), lambda: torch.linalg.cross(FIRST, SECOND, dim=0)),
    "TruncatedNormal": (lambda: ops.TruncatedNormal(torch.float16)((3,)).dtype, lambda: torch.float16),
    "layer_norm": (
        lambda: ops.layer_norm(P, (3,), P[0], P[1]), lambda: F.layer_norm(P, (3,), P[0], P[1])),
    "layer_norm of older versions": (
        lambda: ops.layer_norm(P, P[0], P[1], epsilon=1e-5)[0], lambda: F.layer_norm(P, (3,), P[0], P[1])),
    "IsClose": (lambda: ops.IsClose()(X, X), lambda: X == X),
    "boxes": (lambda: ops.bounding_box_decode(BOXES, ops.bounding_box_encode(BOXES, BOXES), (9, 9)), lambda: BOXES),
    "Roll": (lambda: ops.Roll(1)(Tensor(P)), lambda: P.roll(1)),
    "Perplexity": (lambda: nn.Perplexity is train.Perplexity, lambda: True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_the_references_defaults_and_order(name: str) -> None:
    call, want = CALLS[name]
    found, wanted = call(), want()
    if isinstance(wanted, torch.Tensor):
        found, wanted = (found,), (wanted,)
    if not isinstance(wanted, tuple):
        assert found == wanted
        return
    for one, other in zip(found, wanted, strict=True):
        plain_one, plain_other = (x.detach().as_subclass(torch.Tensor) for x in (one, other))
        torch.testing.assert_close(plain_one, plain_other, equal_nan=True)


def test_what_the_reference_computes_by_default_and_the_dialect_does_not_is_refused() -> None:
    with raises(TypeError, "MSELoss takes 1 arguments: reduction"):
        mint.nn.MSELoss("sum", True)
