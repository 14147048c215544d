"""The precision of a plan in its file and its printed form, and the dtypes that older plans were only priced for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.autocast import DEVICES, Autocast
from shardwise.graph.step_precision import DTYPES, MODELS_OWN, Precision
from shardwise.layouts.text import format_dtype, parse_dtype
from shardwise.untrusted_text import shorten_repr

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan


def format_precision(precision: Precision) -> str:
    """Format a precision: ``compute bf16, parameter f32``, or ``the model's`` if it names no dtype."""
    named = precision_body(precision).get("precision", {})
    return ", ".join(f"{name} {dtype}" for name, dtype in named.items() if dtype) or "the model's"


def precision_body(precision: Precision) -> dict[str, Any]:
    """Return the entry of a file; empty if all dtypes are the model's."""
    if precision.is_models:
        return {}
    autocast = precision.autocast
    dtypes = {name: _text(getattr(precision, name)) for name in DTYPES}
    return {
        "precision": dtypes | ({} if autocast is None else {"autocast": f"{autocast.device} {_text(autocast.dtype)}"})
    }


def precision_of(data: Any) -> Precision:
    """Return the precision that ``precision_body`` wrote (``data`` is None if there is no entry). Raises PlanError."""
    if data is None:
        return MODELS_OWN
    if not isinstance(data, Mapping) or sorted({"autocast", *data}) != sorted(("autocast", *DTYPES)):
        raise PlanError(f"precision is {shorten_repr(data)}, not an object of {', '.join(DTYPES)}, and autocast if any")
    try:
        compute, parameter, reduce = (_dtype(data[name]) for name in DTYPES)
        precision = Precision(compute, parameter, reduce, _autocast(data.get("autocast", "")))
    except ShardwiseError as error:
        raise PlanError(f"precision: {error}") from error
    if precision.is_models:
        raise PlanError("precision is empty: leave the entry out for the dtypes of the model")
    return precision


def _autocast(text: Any) -> Autocast | None:
    """Parse the text in a file (empty: no autocast)."""
    if not text:
        return None
    device, _, dtype = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if device not in DEVICES:
        raise PlanError(f"{shorten_repr(text)} is no autocast: it reads cpu bf16")
    return Autocast(device, parse_dtype(dtype))


def _text(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else format_dtype(dtype)


def _dtype(text: Any) -> torch.dtype | None:
    if not isinstance(text, str):
        raise PlanError(f"{shorten_repr(text)} is no dtype")
    return parse_dtype(text) if text else None


def only_priced(plan: Plan) -> str:
    """Return a sentence if a plan of an older file was priced for other dtypes than ranks run, which are the model's;
    else an empty text."""
    if plan.pricing is None:
        return ""
    stored = _floating(entry.dtype for stage in plan.stages for entry in stage.parameters)
    computed = stored | _floating(entry.dtype for stage in plan.stages for entry in stage.inputs)
    priced_dtypes = (
        ("compute", plan.pricing.compute, computed),
        ("parameter", plan.pricing.parameter, stored),
        ("reduce", plan.pricing.reduce, stored),
    )
    priced = [f"{name}={dtype}" for name, dtype, dtypes in priced_dtypes if dtype and dtypes - {dtype}]
    if not priced:
        return ""
    return (
        f"priced for Precision({', '.join(priced)}) by an older version, and is not executed so: ranks compute, store "
        f"and reduce in the dtypes of the model ({', '.join(sorted(computed))}); a new plan is"
    )


def _floating(dtypes: Iterable[str]) -> set[str]:
    return {dtype for dtype in dtypes if parse_dtype(dtype).is_floating_point}
