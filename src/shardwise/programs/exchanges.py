"""Writes the conversions of a step as instructions: blocking, or split into departure and arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_dtype
from shardwise.programs.casts import cast
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Arrive, Compute, Convert, Depart, Origin, Part
from shardwise.programs.moves import converted_form
from shardwise.programs.spmd_steps import Conversion, legs_of


@dataclass(frozen=True)
class FusedConversions:
    """Conversions that share messages in one direction, with the names of their operands and results."""

    conversions: tuple[Conversion, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    backward: bool
    of_parameters: bool = False


@dataclass
class ExchangeWriter:
    """Writes the exchanges of the rank at ``coordinates``, and adds the forms of their results to ``forms``."""

    graph: Graph
    coordinates: Mapping[str, int]
    forms: dict[str, Form]
    _flights: int = field(default=0)

    def on_the_spot(self, travellers: FusedConversions) -> Convert:
        forms, shares = self.forms_and_shares(travellers)
        return Convert(
            travellers.conversions,
            travellers.backward,
            travellers.operands,
            travellers.results,
            forms,
            shares,
            self.origin(travellers.conversions[0], travellers.backward),
            travellers.of_parameters,
        )

    def on_its_way(self, travellers: FusedConversions) -> list[tuple[Depart | Arrive, ...]]:
        """Return the legs of an exchange (``programs.comm_schedule``); every message is a flight of its own."""
        legs: list[tuple[Depart | Arrive, ...]] = [()]
        parts = legs_of(travellers.conversions, backward=travellers.backward)
        operands = travellers.operands
        for number, conversions in enumerate(parts, 1):
            is_last = number == len(parts)
            results = travellers.results if is_last else tuple(f"{name}+{number}" for name in travellers.results)
            part = replace(travellers, conversions=conversions, operands=operands, results=results)
            departure, arrival = self._flight(part)
            legs[-1] += (departure,)
            legs.append((arrival,))
            operands = results
        return legs

    def _flight(self, travellers: FusedConversions) -> tuple[Depart, Arrive]:
        flight = f"flight {self._flights}"
        self._flights += 1
        forms, shares = self.forms_and_shares(travellers)
        conversions, backward = travellers.conversions, travellers.backward
        origin, of_parameters = self.origin(conversions[0], backward), travellers.of_parameters
        departure = Depart(flight, conversions, backward, travellers.operands, origin, of_parameters)
        arrival = Arrive(flight, conversions, backward, travellers.results, forms, shares, origin, of_parameters)
        return departure, arrival

    def cast(self, name: str, dtype: torch.dtype, conversion: Conversion) -> Compute:
        """Return the cast of a conversion's cotangent to another dtype, before or after its reduction."""
        result = self.cast_name(name, dtype)
        form = self.forms[result] = Form.contiguous(self.forms[name].shape, dtype)
        return cast(name, result, form, self.origin(conversion, True))

    def cast_name(self, name: str, dtype: torch.dtype) -> str:
        return f"{name}~{format_dtype(dtype)}"

    def origin(self, conversion: Conversion, backward: bool) -> Origin:
        """Return the operator that needs the converted value, or for an output of the model the one that made it."""
        op = self.graph.op_by_name.get(conversion.op) or self.graph.producer.get(conversion.origin)
        part: Part = "input" if backward else "forward"
        return Origin(op.name if op else conversion.op, op.source if op else "", part)

    def forms_and_shares(self, travellers: FusedConversions) -> tuple[tuple[Form, ...], tuple[str | None, ...]]:
        """Return the form of each result, and the operand whose memory it shares, or None."""
        forms, shares = [], []
        named = zip(travellers.conversions, travellers.operands, travellers.results, strict=True)
        for conversion, operand, result in named:
            form, shared, _ = converted_form(
                conversion.moves, self.coordinates, self.forms[operand], backward=travellers.backward
            )
            before = self.forms.get(result)
            form = self.forms[result] = form.with_gradient(before is not None and before.requires_grad)
            forms.append(form)
            shares.append(operand if shared else None)
        return tuple(forms), tuple(shares)
