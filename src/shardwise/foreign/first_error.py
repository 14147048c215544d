"""Finds where a plan of another tool first goes wrong: the call, its line, and the layouts of operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from shardwise.errors import ShardwiseError, listed
from shardwise.foreign.call_recorder import CallKey, CallRecorder, RecordedResult, error_line
from shardwise.foreign.inferred_layout import infer_layout, overcounted_factor, whole_text
from shardwise.foreign.rank_threads import DifferentExchangesError, RankThread
from shardwise.layouts.mesh import Mesh
from shardwise.proof.errors_by_tensor import TensorError, magnitude, relative_difference

_PARTIAL = "an operator that is not linear reads a partial sum, or a whole value is added to it: reduce it before"


@dataclass(frozen=True)
class FirstError:
    """The first wrong value. ``what``: such as "the result of blocks.0.up/linear"; ``error``: relative, on the worst
    rank; ``operands``: (name, layout on ranks) of what the call reads."""

    what: str
    source: str
    ranks: tuple[int, ...]
    error: float
    expected: str
    found: str
    operands: tuple[tuple[str, str], ...] = ()
    hint: str = ""

    def lines(self) -> list[str]:
        where = f" ({self.source})" if self.source else ""
        ranks = f" on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        by = "" if self.error == float("inf") else f", by {self.error:.2g}"
        return [
            f"first wrong: {self.what}{where}{ranks}{by}",
            f"  expected {self.expected}, found {self.found}",
            *(f"  it reads {name}: {layout}" for name, layout in self.operands),
            *([f"  {self.hint}"] if self.hint else []),
        ]

    def as_data(self) -> dict[str, Any]:
        data = asdict(self)
        return data | {"error": None if self.error == float("inf") else self.error}


@dataclass(frozen=True)
class RankError:
    """An error on a rank (None: before ranks started). ``refutes``: whether it proves the plan wrong, and is no limit
    of this machine or version."""

    rank: int | None
    error: str
    source: str
    refutes: bool

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.error}{'' if self.rank is None else f' on rank {self.rank}'}{where}"


def describe_rank_error(rank: RankThread) -> RankError:
    """Describe a rank's error. Missing implementations or packages do not refute a plan."""
    error = rank.error
    assert error is not None, "the rank has failed"
    text = str(error).strip().split("\n")[0] or "no message"
    unknown = isinstance(error, (NotImplementedError, ImportError, ShardwiseError)) or any(
        phrase in str(error) for phrase in ("not implemented", "does not have a sharding strategy", "not supported")
    )
    mixed = "mixed torch.Tensor and DTensor" in str(error)
    name = type(error).__name__ if not isinstance(error, DifferentExchangesError) else "different exchanges"
    return RankError(rank.rank, f"{name}: {text}", error_line(error), mixed or not unknown)


def first_wrong_value(
    one: CallRecorder,
    ranks: Sequence[RankThread],
    wrong: Sequence[TensorError],
    gradients: Mapping[str, tuple[Tensor, list[Tensor]]],
    mesh: Mesh,
    data_axes: Sequence[str],
    tolerance: float,
) -> FirstError | None:
    """Return the first call whose differentiable result is in no layout of the result on one device; if all results are
    right, the wrong gradient that backward computes first."""
    wrong_call = first_wrong_call(one, ranks, mesh, tolerance)
    return wrong_call or _of_gradient(one, wrong, gradients, mesh, data_axes, tolerance)


def first_wrong_call(one: CallRecorder, ranks: Sequence[RankThread], mesh: Mesh, tolerance: float) -> FirstError | None:
    """Return the first call whose differentiable result is in no layout of the result on one device, unless all its
    readers are right (a tool may add a bias later than the model does); if ranks stopped, the call where they did."""
    if any(rank.result is None for rank in ranks):
        return None
    calls: list[CallRecorder] = [rank.result.calls for rank in ranks]
    results: list[Mapping[CallKey, RecordedResult]] = [recorder.made for recorder in calls]
    readers: dict[CallKey, list[CallKey]] = {}
    for call, whole in one.made.items():
        for operand in whole.operands:
            if isinstance(operand, CallKey):
                readers.setdefault(operand, []).append(call)
    wrong: dict[CallKey, tuple[Tensor, list[Tensor]]] = {}
    order = list(one.made)
    reached = max((i for i, call in enumerate(order) if all(call in made for made in results)), default=-1)
    absent = order[reached + 1 :]
    for call, whole in one.made.items():
        if not whole.differentiable or not all(call in made for made in results):
            continue
        for place, tensor in enumerate(whole.results):
            shards = [made[call].results[place] for made in results if len(made[call].results) > place]
            if (
                tensor.is_floating_point()
                and len(shards) == len(results)
                and infer_layout(tensor, shards, mesh, tolerance) is None
            ):
                wrong.setdefault(call, (tensor, shards))
    for call, (tensor, shards) in wrong.items():
        after = readers.get(call, [])
        if not after or any(reader in wrong or reader in absent for reader in after):
            return _of_call(call, one, calls, tensor, shards, mesh, tolerance)
    if absent and any(rank.error is not None for rank in ranks):
        call, whole = absent[0], one.made[absent[0]]
        reads = _operands(call, one, calls, mesh, tolerance)
        expected = f"{whole_text(whole.results[0])} or parts of it"
        return FirstError(f"{call.name}", call.source, (), float("inf"), expected, "an error", reads, _hint(reads))
    return None


def _of_call(
    call: CallKey,
    one: CallRecorder,
    ranks: Sequence[CallRecorder],
    whole: Tensor,
    shards: Sequence[Tensor],
    mesh: Mesh,
    tolerance: float,
) -> FirstError:
    errors = _errors(whole, shards)
    reads = _operands(call, one, ranks, mesh, tolerance)
    return FirstError(
        f"the result of {call.name}",
        call.source,
        tuple(errors),
        max(errors.values()),
        f"{whole_text(whole)} or parts of it",
        _describe(whole, shards, mesh, tolerance),
        reads,
        _hint(reads),
    )


def _operands(
    call: CallKey, one: CallRecorder, ranks: Sequence[CallRecorder], mesh: Mesh, tolerance: float
) -> tuple[tuple[str, str], ...]:
    """Return (name, layout on ranks) of the results of other calls that a call reads."""
    operands: dict[CallKey, tuple[str, str]] = {}
    read = [recorder.made[call].read if call in recorder.made else recorder.failed.get(call, ()) for recorder in ranks]
    for place, (maker, whole) in enumerate(zip(one.made[call].operands, one.made[call].read, strict=True)):
        if not isinstance(maker, CallKey) or whole is None:
            continue
        shards = [tensors[place] for tensors in read if len(tensors) > place]
        parts = [part for part in shards if part is not None]
        if not parts:
            continue  # no rank reached the call
        layout = infer_layout(whole, parts, mesh, tolerance) if len(parts) == len(ranks) else None
        operands.setdefault(maker, (maker.name, str(layout) if layout else "in no layout of it"))
    return tuple(operands.values())


def _hint(operands: Sequence[tuple[str, str]]) -> str:
    return _PARTIAL if any("partial(sum" in layout for _, layout in operands) else ""


def _of_gradient(
    one: CallRecorder,
    wrong: Sequence[TensorError],
    gradients: Mapping[str, tuple[Tensor, list[Tensor]]],
    mesh: Mesh,
    data_axes: Sequence[str],
    tolerance: float,
) -> FirstError | None:
    reads = {name: call for call, record in one.made.items() for name in record.operands if isinstance(name, str)}
    order = {call: position for position, call in enumerate(one.made)}
    floor = 1e-6 * max((magnitude(whole) for whole, _ in gradients.values()), default=0.0)

    def is_wrong(whole: Tensor, shards: Sequence[Tensor]) -> bool:
        scale = max(magnitude(whole), floor)
        if len(shards) == mesh.num_devices and all(relative_difference(whole, x, scale) <= tolerance for x in shards):
            return False
        layout = infer_layout(whole, shards, mesh, tolerance) if len(shards) == mesh.num_devices else None
        return layout is None or layout.is_summand

    suspects = {d.name for d in wrong if d.kind == "gradient"} & gradients.keys()
    names = [name for name in sorted(suspects) if is_wrong(*gradients[name])]
    if not names:
        return None
    name = max(names, key=lambda name: order.get(reads[name], -1) if name in reads else -1)
    whole, shards = gradients[name]
    reader = reads.get(name)
    what = f"the gradient of {name}" + (f", which {reader.name} reads" if reader else "")
    source = reader.source if reader else ""
    if len(shards) < mesh.num_devices:
        return FirstError(what, source, tuple(range(mesh.num_devices)), float("inf"), whole_text(whole), "no gradient")
    errors = _errors(whole, shards)
    description = _describe(whole, shards, mesh, tolerance)
    hint = "its ranks do different work with it: their gradients must be summed" if "partial" in description else ""
    num_groups = mesh.size_of(tuple(axis for name in data_axes for axis in mesh.expand(name)))
    terms = infer_layout(whole * num_groups, shards, mesh, tolerance) if num_groups > 1 else None
    if terms is not None and not terms.splits and set(terms.partial) == {f"sum@{name}" for name in data_axes}:
        description = str(replace(terms, partial=tuple(f"avg@{name}" for name in data_axes)))
        hint = (
            f"its ranks have different samples along {listed(data_axes)}, but nothing averages their gradients: "
            "pass a function (module, device_mesh) that applies this plan and DDP or fully_shard"
        )
    return FirstError(what, source, tuple(errors), max(errors.values()), whole_text(whole), description, (), hint)


def _errors(whole: Tensor, shards: Sequence[Tensor]) -> dict[int, float]:
    """Map ranks to their distance from the whole value: infinite if shapes differ."""
    scale = magnitude(whole)
    errors = {rank: relative_difference(whole, tensor, scale) for rank, tensor in enumerate(shards)}
    return {rank: error for rank, error in errors.items() if error > 1e-12} or errors


def _describe(whole: Tensor, shards: Sequence[Tensor], mesh: Mesh, tolerance: float) -> str:
    layout = infer_layout(whole, shards, mesh, tolerance)
    if layout is not None:
        return str(layout)
    factors = {overcounted_factor(whole, tensor, mesh.num_devices, tolerance) for tensor in shards}
    if len(factors) == 1 and (factor := factors.pop()):
        return f"{factor} times that on every rank"
    shapes = sorted({str(list(tensor.shape)) for tensor in shards})
    return f"{' and '.join(shapes)} on ranks, in no layout of it"
