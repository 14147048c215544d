"""Differentiates a rank's local operators into its training step: instruction lists for forward and backward.

``_StepWriter`` visits the forward entries from last to first and appends their derivatives to backward:

* a call adds the kernels of its vector-Jacobian product (``programs.vjp``);
* a conversion adds the collectives of the reverse direction (the ``backward`` primitive in ``layouts.conversions``).

Invariant: when an entry is visited, all consumers of its results were visited before it. So the cotangent of each
result is complete: the sum over its consumers. The terms are added in autograd's order, the latest consumer first.

Each call writes the cotangents of its inputs first and the gradients of its parameters after these (``late``). The
message that carries an input's cotangent then overlaps with the kernels of the gradients.

A conversion that changes nothing on this rank adds no instruction. Its result becomes an alias of its operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.graph.float8 import E4M3, FLOAT8_LINEAR, LARGEST, TO_FLOAT8
from shardwise.graph.ir import Ref, map_refs, needed_for
from shardwise.programs.buckets import Bucket, cuts_windows
from shardwise.programs.casts import before_first_use, cast, computed_name, gradients_of
from shardwise.programs.comm_schedule import GradientReduceQueue, legs_ahead
from shardwise.programs.exchanges import ExchangeWriter
from shardwise.programs.float8_gathers import operand_name, rounded_name
from shardwise.programs.forms import Form
from shardwise.programs.fused_products import with_biases, with_fused_products
from shardwise.programs.instructions import Arrive, Compute, Convert, Depart, Instruction, Origin, with_operands
from shardwise.programs.keyed_rows import CountRows, ReadCounts
from shardwise.programs.lifetimes import with_lifetimes
from shardwise.programs.moves import converted_form
from shardwise.programs.overlap_messages import with_chunks_beside_products, with_rows_beside_products
from shardwise.programs.program import LocalOp, LocalProgram, busiest_rank, localize
from shardwise.programs.rank_program import RankProgram, delivered_values, mark_overwrites, with_saved
from shardwise.programs.spmd import backward_order
from shardwise.programs.spmd_steps import Conversion, OpStep, collectives_of
from shardwise.programs.vjp import (
    BackwardTrace,
    Call,
    Differentiate,
    ForwardTrace,
    Record,
    VjpCache,
    counting_rows,
    needed_kernels,
    numbered,
)
from shardwise.rules.rule import LocalOpCall

aten = torch.ops.aten


def differentiate(
    local: LocalProgram,
    vjp_cache: VjpCache,
    *,
    loss_only: bool = True,
    overlap: bool = True,
    reached: Sequence[bool] | None = None,
    with_gradients: bool = True,
) -> RankProgram:
    """Return the step of a rank, with recomputation and offloading applied.

    Args:
        local: The rank's forward: operator calls with local sizes, and conversions.
        vjp_cache: Cache of traced kernels.
        loss_only: Compute only the loss and the values written back to buffers, not the other outputs.
        overlap: Whether messages overlap with computation. If not, every message blocks.
        reached: Per delivered value, whether it receives a cotangent. Default: every differentiable value. In a part of
            a cut graph the default is the loss and the values whose cotangents come from other stages.
        with_gradients: Whether to write a backward.
    """
    delivered = delivered_values(local.spmd, loss_only=loss_only)
    program, *leader = (
        _StepWriter(part, vjp_cache, overlap).write(delivered, reached, with_gradients, loss_only)
        for part in (local, *_leader(local))
    )
    return finish_exchanges(with_lifetimes(program, *leader))


def keeping_all(local: LocalProgram, vjp_cache: VjpCache) -> RankProgram:
    """Return the step of a rank that keeps every value that backward reads.

    The caller may replace the lifetimes of the step's ``spmd``, and applies them (``with_lifetimes``).
    """
    return _StepWriter(local, vjp_cache, overlap=True).write(
        delivered_values(local.spmd, loss_only=True), None, True, True
    )


def _leader(local: LocalProgram) -> tuple[LocalProgram, ...]:
    """Return the local program of the rank whose messages all ranks repeat in backward, if backward may read other
    values there than on this rank: with parts of other sizes, or empty ones, other kernels may run, and others of
    their results are views. Even parts differ in offsets only."""
    spmd = local.spmd
    layouts = (*spmd.layouts.values(), *(layout for c in spmd.conversions for layout in (c.source, c.target)))
    if not spmd.lifetimes.conversions or all(layout.is_even for layout in layouts):
        return ()
    rank = busiest_rank(spmd)
    return () if rank == local.rank else (localize(spmd, rank),)


def finish_exchanges(program: RankProgram) -> RankProgram:
    """Send rows beside products, or within them, and mark what exchanges may overwrite."""
    moved = with_chunks_beside_products(with_rows_beside_products(program))
    return mark_overwrites(with_fused_products(moved) if program.spmd.is_fused else moved)


@dataclass(eq=False)
class _LocalCall:
    """The call of an operator on this rank. ``names``: its operands in the Spmd program."""

    local: LocalOp
    call: Call
    names: tuple[str, ...]
    kind: ForwardTrace
    backward: BackwardTrace | None = None
    keyed: str = ""  # an operand whose rows follow keys, so that their number is known in the step only

    @property
    def results(self) -> tuple[str, ...]:
        return self.local.results


def _row_counts(entry: _LocalCall) -> list[str]:
    """Return the numbers of rows that the kernels of a call read (``programs.vjp.counting_rows``)."""
    kernels = [*entry.kind.kernels, *(entry.backward.kernels if entry.backward else ())]
    return sorted({name for kernel in kernels for name in kernel.operands if name[0] == "n"})


def _counts_of(received: str) -> str:
    """Name what the host reads of the counts of rows received (``programs.keyed_rows``)."""
    return f"{received}.read"


def _in_backward_order(
    entries: Sequence[_LocalCall | Bucket], steps: Sequence[OpStep | Conversion | Bucket]
) -> list[_LocalCall | Bucket]:
    """Return the entries in the order that ``spmd.backward_order`` gives to their steps. It depends only on the program
    that all ranks share, not on this rank."""
    by_result: dict[str, _LocalCall | Bucket] = {}
    for entry in entries:
        by_result.update(dict.fromkeys(entry.results, entry))
    made = (by_result.get(result) for step in backward_order(steps) for result in step.results)
    return list({id(entry): entry for entry in made if entry is not None}.values())


@dataclass
class _StepWriter:
    """Writes the step of one rank.

    Generated names: ``r.f0`` and ``r'b0`` are results of a forward and a backward kernel of the call whose first result
    is r. ``d:v`` is the cotangent of v that backward starts from. ``a>v`` is the cotangent a in the layout of v.
    ``a~dtype`` is a cast to a dtype. ``a+b`` is a sum of cotangents.

    Attributes:
        forms: Every name to its shape, strides and dtype on this rank.
        aliases: Names to the name of the tensor that they stand for (``resolve``).
        returning: The gradient exchanges in flight while backward is written.
    """

    local: LocalProgram
    vjp_cache: VjpCache
    overlap: bool
    forms: dict[str, Form] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    returning: GradientReduceQueue[tuple[Depart | Arrive, ...]] = field(default_factory=GradientReduceQueue)
    casts: dict[str, Compute] = field(default_factory=dict)  # name of a cast source -> the cast
    stored: dict[str, Form] = field(default_factory=dict)  # cast source -> its form before the cast

    def __post_init__(self) -> None:
        self.spmd = self.local.spmd
        self.graph = self.spmd.graph
        self.coordinates = self.spmd.mesh.coordinates(self.local.rank)
        self.cotangents: dict[str, str] = {}  # value -> the name of its cotangent: the sum over its consumers so far
        self.exchanges = ExchangeWriter(self.graph, self.coordinates, self.forms)
        self.backward: list[Instruction] = []
        self.parameter_values: set[str] = set()  # values that depend on parameters only

    # -- the step ------------------------------------------------------------------------------------------------------

    def write(
        self, delivered: tuple[str, ...], reached: Sequence[bool] | None, with_gradients: bool, prune: bool
    ) -> RankProgram:
        if reached is None and self.graph.cotangents is not None:
            reached = [name == self.spmd.loss or name in self.spmd.cotangents for name in delivered]
        self._sources()
        entries = self._entries(self._needed(delivered) if prune else with_biases(self.local))
        seeds: list[str | None] = [None] * len(delivered)
        if with_gradients:
            for i, name in enumerate(delivered):
                if self.forms[name].requires_grad and (reached is None or reached[i]):
                    seeds[i] = f"d:{name}"
                    self.forms[f"d:{name}"] = self.forms[name].with_gradient(False)
                    self._add_cotangent(name, f"d:{name}", Origin("", "", "input"), self.backward)
            self._write_backward(entries)
        mutations = tuple((buffer, self.resolve(value)) for buffer, value in self.spmd.mutations)
        written = self._write_forward(entries)
        self.backward, gradients = gradients_of(self.graph, self.cotangents, self.backward, self.forms)
        used = dict.fromkeys(name for instruction in self.backward for name in instruction.operands)
        ends = (*map(self.resolve, delivered), *(value for _, value in mutations), *used)
        forward = before_first_use(written, self.casts, ends)
        program = RankProgram(
            self.local.rank,
            self.spmd,
            tuple(forward),
            tuple(self.backward),
            (),
            tuple(map(self.resolve, delivered)),
            mutations,
            tuple(seeds),
            gradients,
            dict(self.aliases),
            self.forms | self.stored,
            dict(self.vjp_cache.untraceable),
        )
        return with_saved(program)

    def resolve(self, name: str) -> str:
        return self.aliases.get(name, name)

    def _sources(self) -> None:
        for source in self.graph.sources:
            value = self.graph.by_name[source.value]
            shape = self.spmd.layouts[source.value].local_shape(self.coordinates)
            inexact = value.dtype.is_floating_point or value.dtype.is_complex
            frozen = source.kind == "parameter" and not source.trainable
            takes_grad = value.requires_grad and inexact and not frozen
            form = self.forms[source.value] = Form.contiguous(shape, value.dtype, takes_grad)
            if value.stored is not None:
                name = self.aliases[source.value] = computed_name(source.value)
                origin = Origin("", source.names[0], "forward")
                self.casts[name] = cast(source.value, name, form.with_gradient(False), origin)
                self.forms[name] = form
                self.stored[source.value] = Form.contiguous(shape, value.stored, takes_grad)
            if source.kind == "parameter":
                self.parameter_values.add(source.value)

    def _needed(self, delivered: Iterable[str]) -> list[LocalOp | Conversion | Bucket]:
        ends = *delivered, *(value for _, value in self.spmd.mutations)
        return needed_for(ends, with_biases(self.local))[0]

    # -- forward -------------------------------------------------------------------------------------------------------

    def _entries(self, instructions: Iterable[LocalOp | Conversion | Bucket]) -> list[_LocalCall | Bucket]:
        entries: list[_LocalCall | Bucket] = []
        for instruction in instructions:
            if isinstance(instruction, LocalOp):
                entries.append(self._call(instruction))
            else:
                entry = instruction if isinstance(instruction, Bucket) else Bucket((instruction,), False)
                for conversion in entry.conversions:
                    self._converted(conversion)
                entries.append(entry)
        return entries

    def _call(self, local: LocalOp) -> _LocalCall:
        call, names = numbered(self._with_rounded(local.call))
        keyed = next((name for name in names if self.spmd.layouts[name].keyed_axes), "")
        kind = self.vjp_cache.forward(call, tuple(self.forms[name] for name in names))
        if keyed:
            other = self.vjp_cache.forward(call, tuple(self._longer(name, self.forms[name]) for name in names))
            kind = replace(kind, kernels=counting_rows(kind.kernels, other.kernels, self._rows(keyed)))
        assert len(kind.results) == len(local.results), f"{local.op}: {len(kind.results)} results"
        for result, name, form in zip(local.results, kind.results, kind.forms, strict=True):
            takes_grad = form.requires_grad and self.graph.by_name[result].requires_grad
            self.forms[result] = form.with_gradient(takes_grad)
            if name.isdigit():  # the call returns an operand; only ``requires_grad`` may differ
                self.aliases[result] = self.resolve(names[int(name)])
        if names and all(name in self.parameter_values for name in names):
            self.parameter_values.update(local.results)
        return _LocalCall(local, call, names, kind, keyed=keyed)

    def _with_rounded(self, call: LocalOpCall) -> LocalOpCall:
        """Return a product in float8 whose weight arrives rounded, with that as its last operand."""
        weight = call.args[1].name if call.target == FLOAT8_LINEAR and isinstance(call.args[1], Ref) else ""
        name = operand_name(weight)
        return replace(call, args=(*call.args, None, Ref(name))) if name in self.forms else call

    def _rows(self, keyed: str) -> tuple[int, int]:
        return self.forms[keyed].shape[0], self.forms[keyed].shape[0] + 1

    def _longer(self, name: str, form: Form) -> Form:
        """Return the form with one more row, if the rows of the value follow keys."""
        if not self.spmd.layouts[name].keyed_axes:
            return form
        return replace(form, shape=(form.shape[0] + 1, *form.shape[1:]))

    def _converted(self, conversion: Conversion) -> None:
        before = self.forms[conversion.value]
        form, _, identity = converted_form(conversion.moves, self.coordinates, before, backward=False)
        takes_grad = before.requires_grad and conversion.differentiable
        self.forms[conversion.result] = form.with_gradient(takes_grad)
        if identity:
            self.aliases[conversion.result] = self.resolve(conversion.value)
        if conversion.value in self.parameter_values:
            self.parameter_values.add(conversion.result)
        if conversion.scale:  # until it is sent, its result has the form of its cotangent
            self._round(conversion, before, form)

    def _round(self, conversion: Conversion, before: Form, form: Form) -> None:
        result, name, operand = conversion.result, rounded_name(conversion.result), operand_name(conversion.result)
        part = self.forms[name] = Form.contiguous(before.shape, E4M3)
        self.forms[operand], self.aliases[operand] = Form.contiguous(form.shape, E4M3), result
        args = Ref(self.resolve(conversion.value)), Ref(self.resolve(conversion.scale))
        origin = self.exchanges.origin(conversion, False)
        self.casts[name] = Compute(TO_FLOAT8, args, (), (name,), ((),), (part,), (None,), origin)

    def _write_forward(self, entries: Sequence[_LocalCall | Bucket]) -> list[Instruction]:
        forward: list[Instruction] = []
        departing = [
            entry
            for entry in entries
            if self.overlap and isinstance(entry, Bucket) and entry.of_parameters and self._sends(entry, False)
        ]
        flights = [self.exchanges.on_its_way(self._exchange(entry, backward=False)) for entry in departing]
        places = [self.spmd.place_of(entry.conversions) for entry in departing]
        start, *slots = legs_ahead([len(legs) - 1 for legs in flights], places, self.spmd.lifetimes.prefetch)
        needed = {id(entry): (slot, legs[-1]) for entry, slot, legs in zip(departing, slots, flights, strict=True)}
        conversions = (c for entry in entries if isinstance(entry, Bucket) for c in entry.conversions if c.ways)
        ways = {self.resolve(conversion.ways[2]): conversion for conversion in conversions}
        for entry in entries:
            if start and not self.spmd.of_scales(entry.results):
                forward += [instruction for flight, leg in start for instruction in flights[flight][leg]]
                start = []
            if isinstance(entry, _LocalCall):
                forward += self._forward_of(entry)
            elif id(entry) in needed:  # depart the messages of later entries before waiting for this one
                slot, arrival = needed[id(entry)]
                forward += [instruction for flight, leg in slot for instruction in flights[flight][leg]]
                forward += arrival
            else:
                forward += self._exchanged(entry, backward=False)
                forward += [self._read(ways[entry.results[0]])] if entry.results[0] in ways else []
        return forward

    def _read(self, conversion: Conversion) -> Compute:
        """Return the instruction by which the host reads how many rows travel, as soon as the rank knows."""
        _, sent, received = map(self.resolve, conversion.ways)
        name = _counts_of(received)
        form = self.forms[name] = Form((), (), torch.uint8, False)
        origin = self.exchanges.origin(conversion, False)
        return Compute(ReadCounts(), (Ref(sent), Ref(received)), (), (name,), ((),), (form,), (None,), origin)

    def _forward_of(self, entry: _LocalCall) -> list[Instruction]:
        origin, counts = Origin(entry.local.op, entry.local.source, "forward"), list[Instruction]()
        for name in _row_counts(entry):
            result, operand = f"{entry.local.results[0]}.{name}", Ref(self.resolve(entry.keyed))
            self.forms[result] = form = Form((), (), torch.uint8, False)
            counts.append(Compute(CountRows(int(name[1:])), (operand,), (), (result,), ((),), (form,), (None,), origin))
        return [*counts, *self._kernels_in_forward(entry)]

    def _kernels_in_forward(self, entry: _LocalCall) -> list[Instruction]:
        local, kind = entry.local, entry.kind
        origin = Origin(local.op, local.source, "forward")
        operands = tuple(map(self.resolve, entry.names))
        if entry.backward is not None and entry.backward.opaque:
            requires_grad = tuple(self.forms[name].requires_grad for name in entry.names)
            tape = f"{entry.results[0]}.tape"
            self.forms[tape] = Form((), (), torch.uint8, False)
            forms = (*(self.forms[result] for result in entry.results), self.forms[tape])
            places = tuple((i,) for i in range(len(forms)))
            target, args = Record(entry.call, requires_grad), tuple(map(Ref, operands))
            shares = (None,) * len(forms)
            return [Compute(target, args, (), (*entry.results, tape), places, forms, shares, origin)]
        if entry.backward is None or entry.backward.whole:
            names = dict(zip(map(str, range(len(operands))), operands, strict=True))
            kept = [i for i, name in enumerate(kind.results) if not name.isdigit()]
            if not kept:
                return []  # it returns its operand
            named = dict(zip(kind.results, entry.results, strict=True))
            args, kwargs = map_refs(entry.call[1:], lambda name: Ref(names[name]))
            return [
                Compute(
                    entry.call[0],
                    args,
                    kwargs,
                    tuple(entry.results[i] for i in kept),
                    tuple(kind.places[i] for i in kept),
                    tuple(self.forms[entry.results[i]] for i in kept),
                    tuple(
                        None if (shared := kind.shares[i]) is None else names.get(shared) or named[shared] for i in kept
                    ),
                    origin,
                    workspace=kind.workspace,
                )
            ]
        names = self._forward_names(entry)
        needed = needed_kernels(kind.kernels, {*kind.results, *entry.backward.needs})
        return [self._compute(kernel, names, origin) for kernel in needed]

    def _forward_names(self, entry: _LocalCall) -> dict[str, str]:
        """Map the forward names of the call's trace (``programs.vjp``) to names of the program."""
        names = {str(i): self.resolve(name) for i, name in enumerate(entry.names)}
        names |= {name: self.resolve(result) for name, result in zip(entry.kind.results, entry.results, strict=True)}
        for kernel in entry.kind.kernels:
            for name in kernel.results:
                names.setdefault(name, f"{entry.results[0]}.{name}")
        return names | {name: f"{entry.results[0]}.{name}" for name in _row_counts(entry)}

    def _compute(self, kernel: Compute, names: Mapping[str, str], origin: Origin) -> Compute:
        assert names.keys() >= {*kernel.operands, *kernel.writes}, "a name of the trace has none in the program"
        results = tuple(names[name] for name in kernel.results)
        for name, form in zip(results, kernel.forms, strict=True):
            self.forms.setdefault(name, form.with_gradient(False))
        forms = tuple(self.forms[name] for name in results)
        return with_operands(kernel, names, results=results, forms=forms, origin=origin)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _write_backward(self, entries: Sequence[_LocalCall | Bucket]) -> None:
        """Write backward, from the last entry to the first.

        Of the conversions before a call, those of values come before those of parameters (``_in_backward_order``).
        ``late`` holds the parameter gradients of the call visited last. They are written before the next call that has
        a backward, or between departure and arrival of a message.
        """
        late: list[Instruction] = []
        for entry in _in_backward_order(entries, self.spmd.steps):
            if isinstance(entry, _LocalCall):
                if any(result in self.cotangents for result in entry.results):
                    self.backward += late
                    late = self._backward_of(entry)
                continue
            travelling = self._travelling(entry, backward=True)
            if not travelling:
                continue
            sends = self._sends(entry, True)
            waits_for_late = any(conversion.value in self.parameter_values for conversion in travelling)
            if waits_for_late or not sends or not self.overlap:
                self.backward += late
                late = []
            if entry.of_parameters and sends and self.overlap:
                legs = self.exchanges.on_its_way(self._exchange(entry, backward=True))
                place = self.spmd.place_of(entry.conversions)
                for leg in self.returning.leave(place, self._sends(entry, False) > 0, legs):
                    self._go_on(leg)
            elif sends == 1 and self.overlap and late and not cuts_windows(entry.conversions):
                departure, arrival = self.exchanges.on_its_way(self._exchange(entry, backward=True))
                self._go_on(departure)
                self.backward += late
                late = []
                self._go_on(arrival)
            else:
                self.backward += late
                late = []
                self.backward += self._exchanged(entry, backward=True)
        self.backward += late
        for leg in self.returning.end():
            self._go_on(leg)

    def _go_on(self, leg: tuple[Depart | Arrive, ...]) -> None:
        """Append a leg of an exchange of cotangents. A leg that ends with an arrival is final: record its results."""
        self.backward += leg
        if isinstance(leg[-1], Arrive):
            self._arrived(leg[-1].conversions, leg[-1].results, self.backward)

    def _backward_of(self, entry: _LocalCall) -> list[Instruction]:
        """Append the kernels for the cotangents of values. Return those for the gradients of parameters."""
        cotangents = tuple(self.cotangents.get(result) for result in entry.results)
        if not any(cotangents):
            return []
        operands = tuple(self.forms[name] for name in entry.names)
        forms = tuple(None if name is None else self.forms[name] for name in cotangents)
        kind = self.vjp_cache.backward(entry.call, operands, forms)
        if entry.keyed and not kind.opaque:
            longer = tuple(map(self._longer, entry.names, operands))
            of_results = tuple(
                form and self._longer(r, form) for r, form in zip(entry.local.results, forms, strict=True)
            )
            other = self.vjp_cache.backward(entry.call, longer, of_results)
            kind = replace(kind, kernels=counting_rows(kind.kernels, other.kernels, self._rows(entry.keyed)))
        entry.backward = kind
        origin = Origin(entry.local.op, entry.local.source, "input")
        late_origin = Origin(entry.local.op, entry.local.source, "weight")
        weights = {i for i, name in enumerate(entry.names) if name in self.parameter_values}
        late: list[Instruction] = []
        names = self._forward_names(entry) | {f"c{i}": name for i, name in enumerate(cotangents) if name is not None}
        if kind.opaque:
            self._differentiate(entry, kind, cotangents, origin, names)
        else:
            for name in {name for kernel in kind.kernels for name in kernel.results}:
                names[name] = f"{entry.results[0]}'{name}"
            largest = self.spmd.largest.get(entry.local.op)
            first = set(map(id, kind.kernels_beside(weights)))
            for kernel in kind.kernels:
                if largest is not None and kernel.target is LARGEST:
                    self.backward.append(self._compute(kernel, names, origin))
                    (found,) = kernel.results
                    names[found] = self._of_all_ranks(largest, names[found])
                elif id(kernel) in first:
                    self.backward.append(self._compute(kernel, names, origin))
                else:
                    late.append(self._compute(kernel, names, late_origin))
        for i, cotangent in enumerate(kind.cotangents):
            if not operands[i].requires_grad:
                continue
            into, why = (late, late_origin) if i in weights else (self.backward, origin)
            if cotangent is None:  # PyTorch returns no zeros; but all ranks must run the same exchanges
                name = f"{entry.results[0]}'0:{i}"
                form = self.forms[name] = Form.contiguous(operands[i].shape, operands[i].dtype)
                zeros: tuple[Any, Any, Any] = (
                    aten.zeros.default,
                    (form.shape,),
                    (("dtype", form.dtype), ("device", None)),
                )
                if self.spmd.layouts[entry.names[i]].keyed_axes:  # of as many rows as there are in the step
                    zeros = aten.zeros_like.default, (Ref(self.resolve(entry.names[i])),), ()
                into.append(Compute(*zeros, (name,), ((),), (form,), (None,), why))
            else:
                name = names[cotangent]
            self._add_cotangent(entry.names[i], name, why, into)
        return late

    def _of_all_ranks(self, largest: Conversion, found: str) -> str:
        """Append the exchange of what ranks found in their parts. Return the name of its result."""
        if not largest.collectives():
            return found
        self.backward.append(self.exchanges.convert((largest,), (found,), (largest.result,), backward=False))
        return largest.result

    def _differentiate(
        self,
        entry: _LocalCall,
        kind: BackwardTrace,
        cotangents: Sequence[str | None],
        origin: Origin,
        names: dict[str, str],
    ) -> None:
        """Write the backward of a call that only autograd can differentiate."""
        requested = [(i, name) for i, name in enumerate(kind.cotangents) if name is not None]
        results = tuple(f"{entry.results[0]}'{name}" for _, name in requested)
        names.update({name: result for (_, name), result in zip(requested, results, strict=True)})
        forms = tuple(form for form in kind.forms if form is not None)
        self.forms.update(zip(results, forms, strict=True))
        args = (Ref(f"{entry.results[0]}.tape"), *(Ref(name) for name in cotangents if name is not None))
        places = tuple((i,) for i in range(len(results)))
        target = Differentiate(tuple(name is not None for name in cotangents))
        shares = (None,) * len(results)
        self.backward.append(Compute(target, args, (), results, places, forms, shares, origin))

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def _travelling(self, entry: Bucket, *, backward: bool) -> tuple[Conversion, ...]:
        """Return the conversions of an exchange that run in a direction: in backward, those with a cotangent."""
        if not backward:
            return entry.conversions
        return tuple(conversion for conversion in entry.conversions if conversion.result in self.cotangents)

    def _sends(self, entry: Bucket, backward: bool) -> int:
        return len(collectives_of(self._travelling(entry, backward=backward), backward=backward))

    def _exchange(self, entry: Bucket, *, backward: bool) -> Convert:
        conversions = self._travelling(entry, backward=backward)
        sent = {c.value: rounded_name(c.result) for c in conversions if c.scale}
        operands, results = tuple(self.resolve(sent.get(name, name)) for name in entry.operands), entry.results
        if backward:
            operands = tuple(map(self._to_reduce, conversions))
            results = tuple(f"{name}>{c.value}" for name, c in zip(operands, conversions, strict=True))
        if conversions[0].ways:
            order, _, received = map(self.resolve, conversions[0].ways)
            operands = (*operands[: len(conversions)], order, _counts_of(received))
        return self.exchanges.convert(
            conversions, operands, results, backward=backward, of_parameters=entry.of_parameters
        )

    def _to_reduce(self, conversion: Conversion) -> str:
        """Return the name of a conversion's cotangent in its reduction dtype. Append the cast if needed."""
        name, dtype = self.cotangents[conversion.result], self.graph.by_name[conversion.origin].reduced
        if dtype is None or self.forms[name].dtype == dtype:
            return name
        result = self.exchanges.cast_name(name, dtype)
        if result not in self.forms:  # two parameters may have one cotangent
            self.backward.append(self.exchanges.cast(name, dtype, conversion))
        return result

    def _exchanged(self, entry: Bucket, *, backward: bool) -> list[Instruction]:
        """Return the instructions of a blocking exchange. Without messages these are local conversions only."""
        written: list[Instruction] = []
        if self._sends(entry, backward):
            written.append(exchange := self._exchange(entry, backward=backward))
            if backward:
                self._arrived(exchange.conversions, exchange.results, written)
            return written
        for conversion in self._travelling(entry, backward=backward):
            if not backward and conversion.result not in self.aliases:
                operands, results = (self.resolve(conversion.value),), (conversion.result,)
                written.append(self.exchanges.convert((conversion,), operands, results, backward=False))
            elif backward and conversion.differentiable:
                name = result = self.cotangents[conversion.result]
                _, _, identity = converted_form(conversion.moves, self.coordinates, self.forms[name], backward=True)
                if not identity:
                    result = f"{name}>{conversion.value}"
                    written.append(self.exchanges.convert((conversion,), (name,), (result,), backward=True))
                self._arrived((conversion,), (result,), written)
        return written

    def _arrived(self, conversions: Sequence[Conversion], results: Sequence[str], into: list[Instruction]) -> None:
        for conversion, result in zip(conversions, results, strict=True):
            origin, value = self.exchanges.origin(conversion, True), self.graph.by_name[conversion.origin]
            if conversion.origin not in self.graph.source_of and self.forms[result].dtype != value.dtype:
                # It was reduced in another dtype; the backward of the value's producer needs the value's dtype.
                into.append(self.exchanges.cast(result, value.dtype, conversion))
                result = into[-1].results[0]
            self._add_cotangent(conversion.value, result, origin, into)

    def _add_cotangent(self, value: str, cotangent: str, origin: Origin, into: list[Instruction]) -> None:
        """Add a cotangent to that which other consumers of the value sent. The addition is appended to ``into``."""
        if not self.forms[value].requires_grad:
            return
        before = self.cotangents.get(value)
        if before is None:
            self.cotangents[value] = cotangent
            return
        first, second = self.forms[before], self.forms[cotangent]
        dtype = torch.promote_types(first.dtype, second.dtype)  # those of a parameter may be reduced in other dtypes
        same = first.stride == second.stride and dtype == first.dtype
        form = first if same else Form.contiguous(first.shape, dtype)
        total = f"{cotangent}+{before}"
        if total in self.forms:  # another value has the same two cotangents: the values were added, the sum used twice
            total = f"{total}:{value}"
        self.forms[total] = form
        self.cotangents[value] = total
        # A cotangent that another value has too, or that an operator without kernels hands on, keeps its name.
        is_only = first == second and cotangent not in self.cotangents.values()
        last = into[-1] if into and is_only else None
        if (
            isinstance(last, Compute)
            and last.target is aten.mm.default
            and last.results == (cotangent,)
            and last.origin.op == origin.op
        ):
            into[-1] = replace(last, target=aten.addmm.default, args=(Ref(before), *last.args), results=(total,))
            return  # the product adds it up
        args = (Ref(before), Ref(cotangent))
        into.append(Compute(aten.add.Tensor, args, (), (total,), ((),), (form,), (None,), origin))
