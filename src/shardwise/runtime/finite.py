"""Find where a NaN or an infinity begins: ``par.check_finite`` and ``parallelize(check_finite=n)``.

A checked step runs as any other; then one pass over the gradients says whether they and the loss are finite on all
ranks. Only if not, the step is run again from the same state, operator by operator, and every value is looked at.
Masks hold infinities on purpose, so not the first value that is not finite is named, but the first of those from which
the loss or a gradient has it. Ranks exchange what they found, since a value that comes by a message begins elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from shardwise.costs.timeline import ONCE
from shardwise.errors import NotFiniteError, name_ranks, problem
from shardwise.programs.instructions import Compute, Origin
from shardwise.runtime.agree import gather_values
from shardwise.runtime.emit import Emitted, take_all
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.step import Half, Observed, Observer, halves_of
from shardwise.runtime.transit import Arriving, Converting, Departing

Kind = Literal["parameter", "buffer", "input", "operator", "conversion", "sum", "unknown"]
Bad = Literal["", "NaN", "infinity"]  # the worst that a value holds
_FIXES: dict[Kind, str] = {
    "parameter": "an earlier step made it so: pass check_finite=1, or call par.check_finite on that step's batch",
    "buffer": "an earlier call wrote it, or it was loaded: pass check_finite=1 and see which call",
    "input": "drop or mask such samples before they reach the model",
    "operator": "the ranges of its operands say why: keep them where it is defined (clamp, add an epsilon, mask before "
    "it), or compute it in float32 if they are too large for the dtype",
    "conversion": "the sum over ranks is too large for its dtype: sum in float32, or scale the loss",
    "sum": "the gradients of the micro-batches are finite, their sum is not: parameters in float32, or scale the loss",
    "unknown": "without compiled kernels every result is finite: compare with compile=False, and call par.zero_grad() "
    "before a step whose gradients are not to be added to others",
}


@dataclass(frozen=True, order=True)
class NotFinite:
    """Where values that are not finite begin; ``str`` is the message.

    ``order``: the position in a step, over all ranks; ``name``: the parameter, buffer or input, or the operator;
    ``part``: forward or backward, of which micro-batch; ``value``: its form and what it holds; ``operands``: with their
    ranges; ``ranks``: those on which it begins."""

    order: tuple[int, ...]
    kind: Kind
    name: str
    source: str = field(compare=False)
    part: str = field(compare=False)
    value: str = field(compare=False)
    operands: tuple[str, ...] = field(compare=False)
    ranks: tuple[int, ...] = field(compare=False, default=())

    def __str__(self) -> str:
        shown = [(f"operand {i}", text) for i, text in enumerate(self.operands, 1)]
        facts = [("value", self.value), *shown, ("where", name_ranks(self.ranks))]
        if self.kind in ("parameter", "buffer", "input"):
            return problem(f"{self.kind} {self.name} is not finite before the step", facts=facts, fix=_FIXES[self.kind])
        if self.kind == "unknown":
            return problem("the loss or a gradient is not finite, but no operator makes it so", fix=_FIXES[self.kind])
        made = {
            "operator": "the result",
            "conversion": "a value that is converted for the operator",
            "sum": "the sum of gradients of the parameter",
        }[self.kind]
        what = f"the first value that is not finite is {made}, in {self.part}"
        return problem(what, op=self.name, source=self.source, facts=facts, fix=_FIXES[self.kind])


_FROM_OUTSIDE = "the gradient of an output is not finite: it was when it came from the loss, outside of the module"
# Of a value that is not finite: where it begins; or it came by a message, from a rank that knows; or its infinities are
# on purpose, as those of a mask: an operator has one as an argument, or an input or a buffer holds them.
Status = NotFinite | Literal["message", "on purpose"]


def all_finite(loss: Tensor | None, parameters: Iterable[Tensor], device: torch.device) -> bool:
    """Return whether the loss and all gradients are finite on every rank. Collective."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in (loss, *(parameter.grad for parameter in parameters)):
        if x is not None and x.numel():
            groups.setdefault((x.device, x.dtype), []).append(x.detach())
    # A sum of squares overflows where elements are large; the largest element decides then. On a CPU it takes 16 times
    # as long (3.3 ns an element, one core), which would be a tenth of a small model's step.
    return any(_norms_are_finite(groups.values(), order, device) for order in (2.0, float("inf")))


def _norms_are_finite(groups: Iterable[list[Tensor]], order: float, device: torch.device) -> bool:
    """Return whether the norms of all tensors are finite on every rank. ``groups``: each of one device and dtype."""
    ok = torch.ones((), dtype=torch.bool, device=device)
    with torch.no_grad():
        for tensors in groups:
            norms = torch.stack(torch._foreach_norm(tensors, order))  # one pass; it keeps NaN
            ok &= norms.isfinite().all().to(device)
        flag = ok.to(torch.int32)
        with trail.waiting(b"the check of finite values"):
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            return bool(flag.item())


class FiniteWatch(Observer):
    """Follows values that are not finite through the halves of a step on this rank.

    ``stage``: the number of the stage that the halves are of; ``reached``: where those begin that the loss or a
    gradient has; ``sent``: that another output or rank has, with what it holds; ``arrived``: conversions whose results
    are not finite although their operands are; ``from_elsewhere``: what the loss and gradients hold that begins on
    another rank.
    """

    def __init__(self, stage: int = 0) -> None:
        self.stage = stage
        self.reached: set[NotFinite] = set()
        self.sent: set[tuple[NotFinite, Bad]] = set()
        self.from_elsewhere: set[Bad] = set()
        self.arrived: set[NotFinite] = set()
        self._known: dict[tuple[int, int, str], Status] = {}  # program, micro-batch (0: of all), value -> its status
        self._now: dict[fx.Node, Status] = {}
        self._runs: Counter[fx.GraphModule] = Counter()

    def begin(self, half: Half) -> None:
        self._now = {}
        self._runs[half.module] += 1

    def add(self, source: str, total: Tensor, gradient: Tensor) -> None:
        is_bad = bool(_holds((total, gradient)))
        total.add_(gradient)
        if not is_bad and _holds(total):
            order = max(self._runs.values()), 1, -self.stage, 1
            self.reached.add(NotFinite(order, "sum", source, "", "backward", _form(total), ()))

    def run(self, node: fx.Node, half: Half, values: Mapping[fx.Node, Any], call: Callable[[], Any]) -> Any:
        operands = {n: values.get(n) for n in node.all_input_nodes}
        compute = half.instructions[node.meta["index"]] if "index" in node.meta else None
        before = _described(operands, half) if compute is not None and compute.writes else ()  # the call changes them
        result = call()
        if node.op == "output":
            self._end(node, half, result)
        elif (status := self._status(node, half, operands, result, before)) is not None:
            self._now[node] = status
            if "value" in node.meta:
                self._known[self._key(half, node.meta["value"])] = status
        return result

    def _end(self, node: fx.Node, half: Half, values: Any) -> None:
        """Note what the results of a half are: the loss and gradients of parameters, or for others to read."""
        program, returned = half.program, tuple[Any, ...](node.args[0])  # type: ignore[arg-type]
        if half.is_backward:
            sources = program.spmd.graph.source_of
            is_last = [name not in sources or sources[name].kind != "activation" for name in program.gradients]
        else:
            is_last = [name == program.spmd.loss for name in program.delivered]
            returned, values = tuple(returned[0]), values[0]
        for result, value, last in zip(returned, values, is_last, strict=True):
            status = self._now.get(result)
            if not last:
                self._note([(status, value)])
            elif isinstance(status, NotFinite):
                self.reached.add(status)
            elif status == "message":
                self.from_elsewhere.add(_holds(value))

    def observed(self, emitted: Emitted) -> Observed:
        """Return what runs the halves of a program and raises NotFiniteError on all ranks behind each, if the loss or a
        gradient is not finite or another output, which may be masked, holds a NaN."""

        def forward(*tensors: Tensor) -> Any:
            results = halves_of(emitted)[0].run(self, *tensors)
            loss, outputs = emitted.program.spmd.loss, dict(zip(emitted.program.delivered, results[0], strict=True))
            raise_if_found(self, bool(_holds(outputs.get(loss or ""))) or _holds(outputs) == "NaN")
            return results

        def backward(variant: Emitted, saved: list[Any], cotangents: Sequence[Tensor]) -> Any:
            gradients = halves_of(variant)[1].run(self, saved, *cotangents)
            raise_if_found(self, bool(_holds(gradients)))
            return gradients

        return Observed(forward, backward)

    def _key(self, half: Half, value: str) -> tuple[int, int, str]:
        if half.part == ONCE:
            return 0, 0, value
        return id(half.program.spmd.graph), self._runs[half.module], value

    def _status(
        self, node: fx.Node, half: Half, operands: Mapping[fx.Node, Any], result: Any, before: tuple[str, ...]
    ) -> Status | None:
        known, target = {n: self._now[n] for n in operands if n in self._now}, half.target(node)
        if isinstance(target, Departing):  # its result is a handle
            self._note([(status, operands[n]) for n, status in known.items()])
            return _earliest(known.values())
        has = _holds(result)
        if not has or node.target is take_all:
            return None
        nan = [status for n, status in known.items() if has == _holds(operands[n]) == "NaN"]
        earliest = _earliest(nan or known.values())  # a NaN is of a NaN rather than of a mask's infinity
        if node.op == "placeholder" or (node.args and getattr(node.args[0], "target", None) is take_all):
            return self._given(half, str(node.meta.get("value", "")), result, has)
        if isinstance(target, Converting | Arriving):
            self._note([(status, operands[n]) for n, status in known.items()])
            if earliest is None or (earliest == "on purpose" and has == "NaN"):
                instruction = target.instruction
                about = self._begins(half, "conversion", instruction.origin, result, ())
                self.arrived.add(about)
                return "message"
            return earliest
        if "index" not in node.meta or (earliest is not None and earliest != "on purpose"):
            return earliest  # an item of a tuple or a copy, or it has been so before
        if has == "infinity" and (earliest == "on purpose" or _names_infinity(node)):
            return "on purpose"
        compute = half.instructions[node.meta["index"]]
        assert isinstance(compute, Compute), f"{node} is not an operator"
        described = before or _described(operands, half)
        return self._begins(half, "operator", compute.origin, result, described)

    def _note(self, sent: Iterable[tuple[Status | None, Any]]) -> None:
        self.sent.update((status, _holds(value)) for status, value in sent if isinstance(status, NotFinite))

    def _given(self, half: Half, name: str, value: Tensor, has: str) -> Status:
        """Return the status of a value that another list has made, or of a source."""
        graph = half.program.spmd.graph
        source = graph.source_of.get(name)
        if source is None or source.kind == "activation":
            return self._known.get(self._key(half, name)) or self._known.get((0, 0, name)) or "message"
        if source.kind != "parameter" and has == "infinity":
            return "on purpose"
        kind: Kind = "parameter" if source.kind == "parameter" else "input" if source.kind == "input" else "buffer"
        position = [source.value for source in graph.sources].index(name)
        return NotFinite((-1, self.stage, position), kind, source.names[0], "", "", _form(value), ())

    def _begins(self, half: Half, kind: Kind, origin: Origin, result: Any, operands: tuple[str, ...]) -> NotFinite:
        number = self._runs[half.module]
        # Ranks have the same operators, but not the same instructions: only the first adds a bias to a partial sum.
        at = next((i for i, op in enumerate(half.program.spmd.graph.ops) if op.name == origin.op), -1)
        sign = -1 if half.is_backward else 1
        order = (number, int(half.is_backward), sign * self.stage, sign * at)
        part = "backward" if half.is_backward and not origin.again else "forward"
        value = next(x for x in tree_leaves(result) if isinstance(x, Tensor) and _holds(x))
        part += "" if half.part == ONCE or number == 1 else f" of micro-batch {number}"
        return NotFinite(order, kind, origin.op, origin.source, part, _form(value), operands)


def _earliest(statuses: Collection[Status]) -> Status | None:
    origins = [status for status in statuses if isinstance(status, NotFinite)]
    others: tuple[Status, ...] = ("message", "on purpose")
    return min(origins) if origins else next((status for status in others if status in statuses), None)


def first_of(watches: Sequence[FiniteWatch]) -> NotFinite | None:
    """Return where values that are not finite begin first, over all ranks; None if all are finite. Collective."""
    reached = {origin for watch in watches for origin in watch.reached}
    sent = {pair for watch in watches for pair in watch.sent}
    arrived = {origin for watch in watches for origin in watch.arrived}
    wanted = set[Bad]().union(*gather_values({bad for watch in watches for bad in watch.from_elsewhere}))
    reached |= {origin for origin, bad in sent if bad in wanted}
    begun = reached, {origin for origin, _ in sent}, arrived
    for found in zip(*gather_values([min(origins, default=None) for origins in begun]), strict=True):
        if any(found):
            first: NotFinite = min(filter(None, found))
            has_it = gather_values(any(first in origins for origins in begun))
            return replace(first, ranks=tuple(rank for rank, has in enumerate(has_it) if has))
    return None


def raise_if_found(watch: FiniteWatch, is_bad: bool) -> None:
    """Raise NotFiniteError on all ranks if a result is bad on one of them. Collective."""
    if any(gather_values(is_bad)):
        raise NotFiniteError(str(first_of([watch]) or _FROM_OUTSIDE))


def _readable(x: Tensor) -> Tensor:
    """Return a tensor in a dtype that has all comparisons: of one byte in float32."""
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


def _holds(result: Any) -> Bad:
    """Return the worst that the tensors of a result hold."""
    worst: Bad = ""
    for x in tree_leaves(result):
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.numel():
            x = _readable(x.detach())
            if x.isnan().any():
                return "NaN"
            worst = "infinity" if x.isinf().any() else worst
    return worst


def _names_infinity(node: fx.Node) -> bool:
    return any(isinstance(x, float) and not isfinite(x) for x in tree_leaves((node.args, dict(node.kwargs))))


def _described(operands: Mapping[fx.Node, Any], half: Half) -> tuple[str, ...]:
    sources = half.program.spmd.graph.source_of
    texts = []
    for node, value in operands.items():
        if isinstance(value, Tensor):
            name = str(node.meta.get("value", node.name))
            texts.append(f"{sources[name].names[0] if name in sources else name}: {_form(value)}")
    return tuple(texts)


def _form(value: Tensor) -> str:
    """Return shape, dtype and range of this rank's part of a value."""
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not value.numel() or value.dtype == torch.bool:
        return text
    flat = _readable(value.detach()).flatten()
    flat = flat.abs() if flat.is_complex() else flat
    bad = []
    if flat.is_floating_point():
        counts = ("NaN", int(flat.isnan().sum())), ("infinite", int(flat.isinf().sum()))
        bad = [f"{count} of {flat.numel()} {name}" for name, count in counts if count]
        flat = flat[flat.isfinite()]
    within = [f"in [{flat.min().item():.4g}, {flat.max().item():.4g}]"] if flat.numel() else []
    return " ".join([text, ", ".join([*bad, *within])])
