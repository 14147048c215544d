"""Plan files: JSON with a version and a digest, read entry by entry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from math import isfinite
from typing import Any

import torch

from shardwise.costs.pipeline_simulation import PipelinePrediction, StagePrediction
from shardwise.costs.prediction import FasterPlan, PassedOver, Prediction
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.autocast import DEVICES, Autocast
from shardwise.graph.step_precision import DTYPES, MODELS_OWN, Precision
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import format_dtype, parse_dtype
from shardwise.plans.entries import (
    CollectiveEntry,
    ConversionEntry,
    OperatorEntry,
    ParameterEntry,
    PricingEntry,
    SharedEntry,
    Stage,
    TensorEntry,
)
from shardwise.plans.quantities import format_ranges
from shardwise.plans.schedule import check_order, schedule_of
from shardwise.rules.keyed_rows import IMBALANCE, imbalance_fault
from shardwise.untrusted_text import MAX_DEVICES, MAX_NOTATION, is_line, read_json, shorten_repr, whole_number

FORMAT = "shardwise-plan"
VERSION = 8
_STAGE_KEYS = ("mesh", "inputs", "parameters", "buffers", "operators", "conversions", "shared")
_MOST_NAME = 2**10
_MOST_DIMS = 64
_MOST_STAGES = 2**10
_MOST_PASSES = 2**20
_MOST_AT_ONCE = 2**10
_LINES = "pricing.cluster"  # the only text of several lines
_NAMES: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip
_SETTINGS: dict[str, type] = {"mode": str, "search": str, "optimizer": str, "training": bool, "bucket_bytes": int}
_OTHERS = (
    "prefetch",
    "row_chunks",
    "micro_batches",
    "imbalance",
    "constants",
    "per_micro_batch",
    "stages",
    "pricing",
    "prediction",
    "precision",
    "schedule",
    "order",
    "pipeline",
)


def digest_of(body: Any) -> str:
    """Return the SHA-256 of the entries in their order: that of mesh axes and of operators matters."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def plan_digest(body: dict[str, Any]) -> str:
    """Return the digest of a plan's content. The prediction of a plan that no search chose is left out: it depends on
    the cluster (``Cluster.local``: on the host), the plan does not, and ranks compare digests."""
    prediction = body.get("prediction")
    if isinstance(prediction, dict) and prediction.get("additive_price", 1.0) == 0.0:
        body = {**body, "pricing": None, "prediction": None}
    return digest_of(body)


def stage_body(stage: Stage) -> dict[str, Any]:
    """Return a stage as its file has it."""
    conversions = stage.conversions
    return {
        "mesh": dict(stage.mesh.axes),
        "ranks": format_ranges(stage.placement.ranks),
        "inputs": _table(stage.inputs),
        "parameters": {  # most plans have ``once`` nowhere
            name: {key: value for key, value in entry.items() if key != "once" or value}
            for name, entry in _table(stage.parameters).items()
        },
        "buffers": _table(stage.buffers),
        "operators": _table(stage.operators),
        "conversions": None if conversions is None else [asdict(entry) for entry in conversions],
        "shared": _table(stage.shared),
        **({"receives": _table(stage.receives)} if stage.receives else {}),
        **({"sends": _table(stage.sends)} if stage.sends else {}),
    }


def _table(entries: Sequence[Any]) -> dict[str, Any]:
    return {entry.name: {key: value for key, value in asdict(entry).items() if key != "name"} for entry in entries}


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse what ``format_ranges`` wrote. Raises PlanError."""
    runs: list[range] = []
    for run in text.split(","):
        first, dash, last = run.partition("-")
        begin, end = whole_number(first), whole_number(last if dash else first)
        if begin is None or end is None or end < begin:
            raise PlanError(f"ranks must be like 0-3,8, not {shorten_repr(text)}")
        if end >= MAX_DEVICES or sum(map(len, runs)) + end - begin >= MAX_DEVICES:
            raise PlanError(
                f"ranks {shorten_repr(text)}: ranks are counted from 0 to {MAX_DEVICES - 1:,} at most, each once"
            )
        twice = next((max(begin, seen.start) for seen in runs if begin < seen.stop and seen.start <= end), None)
        if twice is not None:
            raise PlanError(f"ranks {shorten_repr(text)}: rank {twice} is named twice")
        runs.append(range(begin, end + 1))
    return tuple(chain.from_iterable(runs))


# --------------------------------------------------------------------------------------------------------- reading


def checked_body(text: str, name: str, edited: bool) -> dict[str, Any]:
    """Return the content of a plan file without its head. Raises PlanError unless it is a plan that is unchanged since
    it was saved (``edited``: or changed on purpose)."""
    try:
        data = read_json(text)
    except ShardwiseError as error:
        raise PlanError(
            f"{name} cannot be read: {error}", fix="the file may be truncated: save the plan again"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f'{name} is not a shardwise plan: it has no "format": "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise PlanError(
            f"{name} has plan version {shorten_repr(data.get('version'))}; this shardwise reads version {VERSION}",
            fix="make the plan again with sw.plan",
        )
    body = {key: value for key, value in data.items() if key not in ("format", "version", "digest")}
    listed_digest = str(data.get("digest"))[:12]
    if not edited and data.get("digest") != plan_digest(body):
        raise PlanError(
            f"{name} was changed after it was saved: its content has digest {plan_digest(body)[:12]}, it says "
            f"{listed_digest if is_line(listed_digest) else shorten_repr(listed_digest)}",
            fix="if you edited it on purpose, load it with Plan.load(path, edited=True); otherwise save it again",
        )
    return body


def settings_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan. Raises PlanError naming the entry that is missing or has the wrong form."""
    unknown = body.keys() - {*_SETTINGS, *_OTHERS}
    if unknown:
        raise PlanError(f"unknown entry {_listed(unknown)}")
    stages = _field(body, "stages", list, "stages")
    if not stages:
        raise PlanError("stages is [], a plan has one at least")
    if len(stages) > _MOST_STAGES:
        raise PlanError(f"stages has {len(stages):,} entries, a plan has {_MOST_STAGES:,} at most")
    read, places = [], 0
    for i, data in enumerate(stages):
        read.append(_stage(data, f"stages[{i}]"))
        places += len(read[-1].placement.ranks)
        if places > _MOST_STAGES + MAX_DEVICES:
            raise PlanError(f"stages 0 to {i} name {places:,} ranks together, more than {_MOST_STAGES + MAX_DEVICES:,}")
    return {
        "stages": tuple(read),
        **{key: _field(body, key, kind, key) for key, kind in _SETTINGS.items()},
        "micro_batches": _count(body, "micro_batches", _MOST_PASSES),
        "prefetch": _count(body, "prefetch", _MOST_AT_ONCE),
        "row_chunks": "fused" if body.get("row_chunks") == "fused" else _count(body, "row_chunks", _MOST_AT_ONCE),
        "constants": _lines(body, "constants"),
        "per_micro_batch": _terms(body),
        "imbalance": _imbalance(body),
        "pricing": _pricing(body.get("pricing")),
        "predicted": _prediction(body.get("prediction")),
        "precision": precision_of(body.get("precision")),
        **_pipeline(body, read),
    }


def _count(body: dict[str, Any], name: str, most: int) -> int:
    """Return a number that has an entry only if it is above 1."""
    if name not in body:
        return 1
    count: int = _field(body, name, int, name)
    if not 1 < count <= most:
        raise PlanError(f"{name} is {_shown(count)}, not a number from 2 to {most:,} (of one, no entry)")
    return count


def _imbalance(body: dict[str, Any]) -> float:
    factor: float = _field({"imbalance": IMBALANCE, **body}, "imbalance", float, "imbalance")
    if fault := imbalance_fault(factor):
        raise PlanError(fault)
    return factor


def _lines(body: dict[str, Any], key: str) -> tuple[str, ...]:
    listed = _field({key: [], **body}, key, list, key)
    for i, line in enumerate(listed):
        _check_form(line, str, f"{key}[{i}]")
    return tuple(listed)


def _terms(body: dict[str, Any]) -> tuple[str, ...]:
    names = _lines(body, "per_micro_batch")
    if names and "micro_batches" not in body:
        raise PlanError("per_micro_batch names terms of the loss, and a step has one micro-batch")
    return names


def _stage(data: Any, where: str) -> Stage:
    if not isinstance(data, dict):
        raise PlanError(f"{where} is {_shown(data)}, not an object")
    unknown = data.keys() - {*_STAGE_KEYS, "ranks", "receives", "sends"}
    if unknown:
        raise PlanError(f"{where} has an unknown entry {_listed(unknown)}")

    def table(kind: Any, key: str) -> tuple[Any, ...]:
        entries = _field({"receives": {}, "sends": {}, **data}, key, dict, f"{where}.{key}")
        check_names(entries, f"{where}.{key}")
        if kind is ParameterEntry:  # most plans have ``once`` nowhere
            entries = {n: {"once": False, **e} if isinstance(e, dict) else e for n, e in entries.items()}
        return tuple(_entry(kind, entry, f"{where}.{key}[{name!r}]", name=name) for name, entry in entries.items())

    mesh = Mesh(_field(data, "mesh", dict, f"{where}.mesh"))
    return Stage(
        placement=_placement(mesh, _field(data, "ranks", str, f"{where}.ranks"), where),
        inputs=table(TensorEntry, "inputs"),
        parameters=table(ParameterEntry, "parameters"),
        buffers=table(TensorEntry, "buffers"),
        operators=table(OperatorEntry, "operators"),
        conversions=_conversions(data, f"{where}.conversions"),
        shared=table(SharedEntry, "shared"),
        receives=table(TensorEntry, "receives"),
        sends=table(TensorEntry, "sends"),
    )


def check_names(names: Iterable[str], where: str) -> None:
    """Raise PlanError for a name that no file may have: a long one, or one of several lines."""
    for name in names:
        if not is_line(name, _MOST_NAME):
            what = f"a name is one line of at most {_MOST_NAME:,} characters, without control characters"
            raise PlanError(f"{where}[{shorten_repr(name)}]: {what}")


def _placement(mesh: Mesh, ranks: str, where: str) -> Placement:
    try:
        return Placement(mesh, parse_ranks(ranks))
    except ValueError as error:
        raise PlanError(f"{where}.ranks: {error}") from error


def _conversions(data: dict[str, Any], where: str) -> tuple[ConversionEntry, ...] | None:
    """Return the conversions of a stage, or None if it was edited: they are then derived when it is used."""
    if "conversions" in data and data["conversions"] is None:
        return None
    listed = _field(data, "conversions", list, where)
    entries = tuple(_conversion(entry, f"{where}[{i}]") for i, entry in enumerate(listed))
    without = [i for i, entry in enumerate(entries) if not entry.path]
    if without:
        raise PlanError(f"{where}[{without[0]}].path is [], and a conversion has moves")
    return entries


def _conversion(data: Any, where: str) -> ConversionEntry:
    entry: ConversionEntry = _entry(ConversionEntry, data, where)
    if entry.bucket < 0:
        raise PlanError(f"{where}.bucket is {entry.bucket}, buckets are counted from 1 (0: none)")

    def collectives(items: Sequence[Any], side: str) -> tuple[CollectiveEntry, ...]:
        return tuple(_entry(CollectiveEntry, item, f"{where}.{side}[{i}]") for i, item in enumerate(items))

    return replace(
        entry, forward=collectives(entry.forward, "forward"), backward=collectives(entry.backward, "backward")
    )


def _prediction(data: Any) -> Any:
    """Return the prediction of a searched plan, which may contain that of another plan."""
    if not isinstance(data, dict):
        return _optional(Prediction, data, "prediction")
    other = _optional(PassedOver, data.get("passed_over"), "prediction.passed_over")
    faster = _optional(FasterPlan, data.get("faster"), "prediction.faster")
    rest = {key: value for key, value in data.items() if key not in ("passed_over", "faster")}
    later = ("host_wait", "message_wait", "copy_wait", "compiled_seconds", "cast_seconds", "graph_seconds")
    rest = {**dict.fromkeys(later, 0.0), **rest}  # added in this version
    return _entry(Prediction, rest, "prediction", passed_over=other, faster=faster)


def _pipeline(body: dict[str, Any], stages: Sequence[Stage]) -> dict[str, Any]:
    if "schedule" not in body:
        for key, says in (("pipeline", "says what is predicted for one"), ("order", "is that of one")):
            if key in body:
                raise PlanError(f"schedule is missing, and {key} {says}")
        return {}
    order = _field({"order": [], **body}, "order", list, "order")
    for i, line in enumerate(order):
        _check_form(line, str, f"order[{i}]")
    schedule = schedule_of(_field(body, "schedule", str, "schedule"), order)
    num_places = len({stage.placement.ranks for stage in stages})
    if len(stages) < 2 or len(stages) != num_places * schedule.stages_per_place:
        raise PlanError(
            f"schedule {schedule.name} has {schedule.stages_per_place} stages on every place; the plan has "
            f"{len(stages)} stages on {num_places} places"
        )
    if schedule.is_solved:
        check_order(schedule, num_places, _count(body, "micro_batches", _MOST_PASSES))
    elif order:
        raise PlanError(f"order is for a solved schedule, and the plan has {schedule.name}")
    plan_fields = {"schedule": schedule.name, "order": tuple(order)}
    data = body.get("pipeline")
    if data is None:
        return plan_fields
    _check_form(data, dict, "pipeline")
    listed = _field(data, "stages", list, "pipeline.stages")
    defaults = {"weight": 0.0, "send": 0.0, "update": 0.0}  # added later in this version; so were bound and memory
    whole = [{**defaults, **entry} if isinstance(entry, dict) else entry for entry in listed]
    predictions = tuple(_entry(StagePrediction, entry, f"pipeline.stages[{i}]") for i, entry in enumerate(whole))
    if len(predictions) != len(stages):
        raise PlanError(f"pipeline.stages has {len(predictions)} entries, and the plan {len(stages)} stages")
    rest = {key: value for key, value in data.items() if key != "stages"}
    rest = {"bound_seconds": 0.0, "memory_bytes": 0.0, "compiled_seconds": 0.0, **rest}
    return {**plan_fields, "pipeline": _entry(PipelinePrediction, rest, "pipeline", stages=predictions)}


def _optional(kind: Any, data: Any, where: str) -> Any:
    return None if data is None else _entry(kind, data, where)


def pricing_body(entry: PricingEntry) -> dict[str, Any]:
    """Return the entry as a file has it: a limit only if one was given."""
    body = {**asdict(entry), "separate": [*entry.separate]}
    return body if entry.limit else {key: value for key, value in body.items() if key != "limit"}


def _pricing(data: Any) -> PricingEntry | None:
    if data is None:
        return None
    entry: PricingEntry = _entry(PricingEntry, {"limit": "", **data} if isinstance(data, dict) else data, "pricing")
    return entry


def precision_body(precision: Precision) -> dict[str, Any]:
    """Return the entry of a file; empty if all dtypes are the model's."""
    if precision.is_models:
        return {}
    autocast = precision.autocast
    dtypes = {name: _text(getattr(precision, name)) for name in DTYPES}
    dtypes |= {} if precision.products is None else {"products": precision.products}
    return {
        "precision": dtypes | ({} if autocast is None else {"autocast": f"{autocast.device} {_text(autocast.dtype)}"})
    }


def precision_of(data: Any) -> Precision:
    """Return the precision that ``precision_body`` wrote (``data`` is None if there is no entry). Raises PlanError."""
    if data is None:
        return MODELS_OWN
    if not isinstance(data, Mapping) or {"autocast", "products", *data} != {"autocast", "products", *DTYPES}:
        what = (
            f"precision is {shorten_repr(data)}, not an object of {', '.join(DTYPES)}, and autocast or products if any"
        )
        raise PlanError(what)
    try:
        compute, parameter, reduce = (_dtype(data[name]) for name in DTYPES)
        autocast, products = _autocast(data.get("autocast", "")), data.get("products")
        precision = Precision(compute, parameter, reduce, autocast, products)
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


def _entry(kind: Any, data: Any, where: str, **known: Any) -> Any:
    """Return an entry of ``kind`` from the object at ``where``, which must have every field with its type."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} is {_shown(data)}, not an object")
    forms = {"str": str, "int": int, "float": float, "bool": bool}  # other annotations are tuples, lists in JSON
    read = [entry for entry in fields(kind) if entry.name not in known]
    unknown = data.keys() - {entry.name for entry in read}
    if unknown:
        raise PlanError(f"{where} has an unknown entry {_listed(unknown)}")
    values = {f.name: _field(data, f.name, forms.get(str(f.type), list), f"{where}.{f.name}") for f in read}
    shape = values.get("shape")
    if shape is not None:
        if len(shape) > _MOST_DIMS or not all(type(size) is int and size >= 0 for size in shape):
            raise PlanError(f"{where}.shape is {_shown(shape)}, not a list of sizes")
        values["shape"] = tuple(shape)
    for key in values.keys() & {"separate", "path"}:
        for i, text in enumerate(values[key]):
            _check_form(text, str, f"{where}.{key}[{i}]")
        values[key] = tuple(values[key])
    return kind(**known, **values)


def _field(data: dict[str, Any], key: str, form: type, where: str) -> Any:
    if key not in data:
        raise PlanError(f"{where} is missing")
    value = data[key]
    if form is float and type(value) is int:
        value = float(value)
    _check_form(value, form, where)
    return value


def _check_form(value: Any, form: type, where: str) -> None:
    fits: bool = isinstance(value, form) and (form is bool or not isinstance(value, bool))
    if not fits:
        raise PlanError(f"{where} is {_shown(value)}, not {_NAMES[form]}")
    if form is str and not (is_line(value) or where.endswith(_LINES)):
        what = f"not a line of at most {MAX_NOTATION:,} characters, without control characters"
        raise PlanError(f"{where} is {_shown(value)}, {what}")
    if form in (int, float) and not (value >= 0 and isfinite(value)):
        raise PlanError(f"{where} is {_shown(value)}, not a number from 0")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 4:,} more" if len(ordered) > 4 else ""
    return ", ".join(name if is_line(name, 60) else shorten_repr(name) for name in ordered[:4]) + more
