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


@dataclass(frozen=True)
class ErrorSearch:
    """Searches for the first wrong value. ``one``: the calls on one device; ``ranks``: with theirs."""

    one: CallRecorder
    ranks: Sequence[RankThread]
    mesh: Mesh
    data_axes: Sequence[str]
    tolerance: float

    def wrong_call(self) -> FirstError | None:
        """Return the first call whose differentiable result is in no layout of the result on one device, unless all its
        readers are right (a tool may add a bias later than the model does); if ranks stopped, the call where they
        did."""
        if any(rank.result is None for rank in self.ranks):
            return None
        results: list[Mapping[CallKey, RecordedResult]] = [rank.result.calls.made for rank in self.ranks]
        readers: dict[CallKey, list[CallKey]] = {}
        for call, whole in self.one.made.items():
            for operand in whole.operands:
                if isinstance(operand, CallKey):
                    readers.setdefault(operand, []).append(call)
        wrong: dict[CallKey, tuple[Tensor, list[Tensor]]] = {}
        order = list(self.one.made)
        reached = max((i for i, call in enumerate(order) if all(call in made for made in results)), default=-1)
        absent = order[reached + 1 :]
        for call, whole in self.one.made.items():
            if not whole.differentiable or not all(call in made for made in results):
                continue
            for place, tensor in enumerate(whole.results):
                shards = [made[call].results[place] for made in results if len(made[call].results) > place]
                is_compared = tensor.is_floating_point() and len(shards) == len(results)
                if is_compared and infer_layout(tensor, shards, self.mesh, self.tolerance) is None:
                    wrong.setdefault(call, (tensor, shards))
        for call, (tensor, shards) in wrong.items():
            after = readers.get(call, [])
            if not after or any(reader in wrong or reader in absent for reader in after):
                errors, expected = _errors(tensor, shards), f"{whole_text(tensor)} or parts of it"
                return FirstError(
                    f"the result of {call.name}",
                    call.source,
                    tuple(errors),
                    max(errors.values()),
                    expected,
                    self._describe(tensor, shards),
                    *self._operands(call),
                )
        if absent and any(rank.error is not None for rank in self.ranks):
            call, whole = absent[0], self.one.made[absent[0]]
            expected, reads = f"{whole_text(whole.results[0])} or parts of it", self._operands(call)
            return FirstError(f"{call.name}", call.source, (), float("inf"), expected, "an error", *reads)
        return None

    def _operands(self, call: CallKey) -> tuple[tuple[tuple[str, str], ...], str]:
        """Return ((name, layout on ranks) of the results of other calls that a call reads, a hint about them)."""
        operands: dict[CallKey, tuple[str, str]] = {}
        calls: list[CallRecorder] = [rank.result.calls for rank in self.ranks]
        read = [ran.made[call].read if call in ran.made else ran.failed.get(call, ()) for ran in calls]
        one = self.one.made[call]
        for place, (maker, whole) in enumerate(zip(one.operands, one.read, strict=True)):
            if not isinstance(maker, CallKey) or whole is None:
                continue
            shards = [tensors[place] for tensors in read if len(tensors) > place]
            parts = [part for part in shards if part is not None]
            if not parts:
                continue  # no rank reached the call
            layout = infer_layout(whole, parts, self.mesh, self.tolerance) if len(parts) == len(calls) else None
            operands.setdefault(maker, (maker.name, str(layout) if layout else "in no layout of it"))
        reads = tuple(operands.values())
        return reads, _PARTIAL if any("partial(sum" in layout for _, layout in reads) else ""

    def wrong_gradient(
        self, wrong: Sequence[TensorError], gradients: Mapping[str, tuple[Tensor, list[Tensor]]]
    ) -> FirstError | None:
        """Return the wrong gradient that backward computes first. ``gradients``: name -> (expected, per rank)."""
        made, mesh = self.one.made, self.mesh
        reads = {name: call for call, record in made.items() for name in record.operands if isinstance(name, str)}
        order = {call: position for position, call in enumerate(made)}
        floor = 1e-6 * max((magnitude(whole) for whole, _ in gradients.values()), default=0.0)

        def is_wrong(whole: Tensor, shards: Sequence[Tensor]) -> bool:
            scale, is_everywhere = max(magnitude(whole), floor), len(shards) == mesh.num_devices
            if is_everywhere and all(relative_difference(whole, x, scale) <= self.tolerance for x in shards):
                return False
            layout = infer_layout(whole, shards, mesh, self.tolerance) if is_everywhere else None
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
            every = tuple(range(mesh.num_devices))
            return FirstError(what, source, every, float("inf"), whole_text(whole), "no gradient")
        errors = _errors(whole, shards)
        found = self._describe(whole, shards)
        hint = "its ranks do different work with it: their gradients must be summed" if "partial" in found else ""
        num_groups = mesh.size_of(tuple(axis for name in self.data_axes for axis in mesh.expand(name)))
        terms = infer_layout(whole * num_groups, shards, mesh, self.tolerance) if num_groups > 1 else None
        if terms is not None and not terms.splits and set(terms.partial) == {f"sum@{name}" for name in self.data_axes}:
            found = str(replace(terms, partial=tuple(f"avg@{name}" for name in self.data_axes)))
            hint = (
                f"its ranks have different samples along {listed(self.data_axes)}, but nothing averages their "
                "gradients: pass a function (module, device_mesh) that applies this plan and DDP or fully_shard"
            )
        return FirstError(what, source, tuple(errors), max(errors.values()), whole_text(whole), found, (), hint)

    def _describe(self, whole: Tensor, shards: Sequence[Tensor]) -> str:
        layout = infer_layout(whole, shards, self.mesh, self.tolerance)
        if layout is not None:
            return str(layout)
        factors = {overcounted_factor(whole, tensor, self.mesh.num_devices, self.tolerance) for tensor in shards}
        if len(factors) == 1 and (factor := factors.pop()):
            return f"{factor} times that on every rank"
        shapes = sorted({str(list(tensor.shape)) for tensor in shards})
        return f"{' and '.join(shapes)} on ranks, in no layout of it"


def _errors(whole: Tensor, shards: Sequence[Tensor]) -> dict[int, float]:
    """Map ranks to their distance from the whole value: infinite if shapes differ."""
    scale = magnitude(whole)
    errors = {rank: relative_difference(whole, tensor, scale) for rank, tensor in enumerate(shards)}
    return {rank: error for rank, error in errors.items() if error > 1e-12} or errors
