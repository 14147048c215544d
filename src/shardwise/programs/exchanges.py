"""Writes the conversions of a step as instructions: blocking, or split into departure and arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_dtype
from shardwise.programs.casts import cast
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Arrive, Compute, Convert, Depart, Origin, Part, in_flight
from shardwise.programs.moves import converted_form
from shardwise.programs.spmd_steps import Conversion, legs_of


@dataclass
class ExchangeWriter:
    """Writes the exchanges of the rank at ``coordinates``, and adds the forms of their results to ``forms``."""

    graph: Graph
    coordinates: Mapping[str, int]
    forms: dict[str, Form]
    _flights: int = field(default=0)

    def convert(
        self,
        conversions: tuple[Conversion, ...],
        operands: tuple[str, ...],
        results: tuple[str, ...],
        *,
        backward: bool,
        of_parameters: bool = False,
    ) -> Convert:
        """Return conversions that share their messages as one blocking instruction. ``operands``: one of each, and the
        ways of keyed rows."""
        forms, shares = self.forms_and_shares(conversions, operands[: len(conversions)], results, backward=backward)
        origin = self.origin(conversions[0], backward)
        return Convert(conversions, backward, operands, results, forms, shares, origin, of_parameters)

    def on_its_way(self, whole: Convert) -> list[tuple[Depart | Arrive, ...]]:
        """Return the legs of an exchange (``programs.comm_schedule``); every message is a flight of its own."""
        legs: list[tuple[Depart | Arrive, ...]] = [()]
        parts = legs_of(whole.conversions, backward=whole.backward)
        operands = whole.operands
        for number, conversions in enumerate(parts, 1):
            is_last = number == len(parts)
            results = whole.results if is_last else tuple(f"{name}+{number}" for name in whole.results)
            part = self.convert(
                conversions, operands, results, backward=whole.backward, of_parameters=whole.of_parameters
            )
            departure, arrival = in_flight(part, f"flight {self._flights}")
            self._flights += 1
            legs[-1] += (departure,)
            legs.append((arrival,))
            operands = results
        assert len(parts) == 1 or not whole.conversions[0].ways, "keyed rows take one message"
        return legs

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

    def forms_and_shares(
        self,
        conversions: Sequence[Conversion],
        operands: Sequence[str],
        results: Sequence[str],
        *,
        backward: bool,
    ) -> tuple[tuple[Form, ...], tuple[str | None, ...]]:
        """Return the form of each result, and the operand whose memory it shares, or None."""
        forms, shares = [], []
        for conversion, operand, result in zip(conversions, operands, results, strict=True):
            moves, form = conversion.moves, self.forms[operand]
            form, shared, _ = converted_form(moves, self.coordinates, form, backward=backward)
            before = self.forms.get(result)
            form = self.forms[result] = form.with_gradient(before is not None and before.requires_grad)
            forms.append(form)
            shares.append(operand if shared else None)
        return tuple(forms), tuple(shares)
