"""The virtual cluster: runs the programs of all ranks in lockstep in one process, with collectives as arithmetic.

It is the oracle of the tests and of ``shardwise.verify``. It executes the same instruction lists as real ranks; only
the transport differs. Every rank runs to its next exchange, which must be the same on all ranks; its results are then
computed from their operands. The cluster records its collectives, which must be exactly those that the plan lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.graph.schema import run_call
from shardwise.layouts.conversions import Collective, Move, collective_of
from shardwise.layouts.mesh import Mesh
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.instructions import Arrive, Compute, Convert, Copy, Depart, Instruction, Land, sent_by
from shardwise.programs.moves import LocalMove, local_move
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd_steps import Conversion

Values = dict[str, Any]  # name -> value on a rank: a tensor, or the tape of an untraceable call


class VirtualCluster:
    """Executes programs and moves for all ranks of a mesh at once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.coordinates = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
        self.record: list[Collective] = []  # performed, in order; bytes of the busiest rank
        self._local_moves: dict[tuple[Move, bool], list[LocalMove]] = {}

    # -- programs ------------------------------------------------------------------------------------------------------

    def execute(self, lists: Sequence[Sequence[Instruction]], values: Sequence[Values]) -> None:
        """Run one list per rank, in lockstep from exchange to exchange; results are added to each rank's ``values``.
        Raises ShardwiseError if ranks come to different exchanges."""
        positions = [0] * len(lists)
        flights: list[dict[str, list[Tensor]]] = [{} for _ in lists]
        while True:
            at: list[Convert | Depart | None] = []
            for rank, instructions in enumerate(lists):
                at.append(None)
                while positions[rank] < len(instructions):
                    instruction = instructions[positions[rank]]
                    positions[rank] += 1
                    if isinstance(instruction, (Convert, Depart)) and sent_by(instruction):
                        at[rank] = instruction
                        break
                    self._alone(instruction, rank, values[rank], flights[rank])
            exchanges = [instruction for instruction in at if instruction is not None]
            if not exchanges:
                return
            _check_same(at)
            self._exchange(exchanges, values, flights)

    def _alone(self, instruction: Instruction, rank: int, values: Values, flight: dict[str, list[Tensor]]) -> None:
        if isinstance(instruction, Compute):
            compute(instruction, values)
        elif isinstance(instruction, Arrive):
            values.update(zip(instruction.results, flight.pop(instruction.flight), strict=True))
        elif isinstance(instruction, Copy):
            values[instruction.result] = values[instruction.value].clone()
        elif isinstance(instruction, Land):
            pass  # the copy was synchronous; ``programs.invariants`` has checked that nothing reads it earlier
        elif isinstance(instruction, Convert):
            for conversion, operand, result in zip(
                instruction.conversions, instruction.operands, instruction.results, strict=True
            ):
                tensor = values[operand]
                for move in _in_order(conversion, instruction.backward):
                    tensor = self.local_moves(move, instruction.backward)[rank].unpack([tensor])
                values[result] = tensor
        else:
            raise AssertionError("a departure without a message")

    def _exchange(
        self,
        exchanges: Sequence[Convert | Depart],
        values: Sequence[Values],
        flights: Sequence[dict[str, list[Tensor]]],
    ) -> None:
        first = exchanges[0]
        if isinstance(first, FusedProduct):
            self._fused([one for one in exchanges if isinstance(one, FusedProduct)], values)
            return
        tensors = [
            values[rank][exchange.operands[position]]
            for position in range(len(first.conversions))
            for rank, exchange in enumerate(exchanges)
        ]
        ways = [
            [rank_values[name] for name in exchange.operands[len(first.conversions) :]]
            for rank_values, exchange in zip(values, exchanges, strict=True)
        ]
        for together in zip(*(_in_order(c, first.backward) for c in first.conversions), strict=True):
            if together[0].is_keyed:
                tensors = self.exchange_rows(together[0], tensors, ways, first.backward)
            else:
                tensors = self.perform_together(together, tensors, first.backward)
        ranks = self.mesh.num_devices
        for rank, instruction in enumerate(exchanges):
            arrived = tensors[rank::ranks]
            if isinstance(instruction, Depart):
                flights[rank][instruction.flight] = arrived
            else:
                values[rank].update(zip(instruction.results, arrived, strict=True))
            if instruction.overwrites:  # on real ranks the content is undefined now
                _spoil(values[rank][instruction.operands[0]])

    def _fused(self, products: Sequence[FusedProduct], values: Sequence[Values]) -> None:
        """Do what torch's fused operators do: parts of ``dim`` in the order of the ranks."""
        (collective,) = sent_by(products[0])
        self.record.append(collective)
        sides = [[own[name] for name in one.operands] for one, own in zip(products, values, strict=True)]
        partial = [sent[0] if one.gathers else one.scattered(sent) for one, sent in zip(products, sides, strict=True)]
        for rank, one in enumerate(products):
            group = sorted(self.mesh.group(collective.axes, rank))
            members = [partial[member] for member in group]
            if one.gathers:
                whole = torch.cat(members, one.dim)
                results = [whole, *one.products(whole, sides[rank])]
            else:
                results = [torch.stack(members).sum(0).chunk(len(group), one.dim)[group.index(rank)].contiguous()]
            values[rank].update(zip(one.results, results, strict=True))

    # -- moves ---------------------------------------------------------------------------------------------------------

    def local_moves(self, move: Move, backward: bool) -> list[LocalMove]:
        """Return every rank's part of one direction of a move."""
        moves = self._local_moves.get((move, backward))
        if moves is None:
            moves = [local_move(move, coordinates, backward=backward) for coordinates in self.coordinates]
            self._local_moves[move, backward] = moves
        return moves

    def perform(self, move: Move, tensors: Sequence[Tensor], backward: bool) -> list[Tensor]:
        """Perform one direction of a move on all ranks, in lockstep."""
        parts = self.local_moves(move, backward)
        kind = parts[0].kind
        if kind is None:
            return [part.unpack([tensor]) for part, tensor in zip(parts, tensors, strict=True)]
        packed = [part.pack(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        largest = max(num_bytes(part, tensors) for part, tensors in zip(parts, packed, strict=True))
        self.record.append(Collective(kind, parts[0].axes, largest))
        answers = exchange_all(self.mesh, parts, packed)
        return [
            part.unpack([*answer, tensor] if part.with_own else answer)
            for part, answer, tensor in zip(parts, answers, tensors, strict=True)
        ]

    def perform_together(self, moves: Sequence[Move], tensors: Sequence[Tensor], backward: bool) -> list[Tensor]:
        """Perform several moves that share messages, recorded as one. ``tensors``: all ranks' of the first move, then
        of the second."""
        before, ranks = len(self.record), self.mesh.num_devices
        results: list[Tensor] = []
        for i, move in enumerate(moves):
            results += self.perform(move, tensors[i * ranks : (i + 1) * ranks], backward)
        performed = self.record[before:]
        if performed:
            total = sum(collective.num_bytes for collective in performed)
            self.record[before:] = [Collective(performed[0].kind, performed[0].axes, total)]
        return results

    def exchange_rows(
        self, move: Move, tensors: Sequence[Tensor], ways: Sequence[Sequence[Tensor]], backward: bool
    ) -> list[Tensor]:
        """Send rows to the owners of their keys, or back. ``ways``: of every rank."""
        results = []
        parts = [part.rows for part in self.local_moves(move, backward)]
        assert all(parts), "a move of keyed rows"
        counts = [part.counts(way) for part, way in zip(parts, ways, strict=True) if part is not None]
        packed = [
            part.pack(tensor, way).split(sent)
            for part, tensor, way, (sent, _) in zip(parts, tensors, ways, counts, strict=True)
            if part is not None
        ]
        for rank, part in enumerate(parts):
            group = sorted(self.mesh.group(move.axes, rank))
            arrived = [packed[member][group.index(rank)] for member in group]
            assert [len(rows) for rows in arrived] == counts[rank][1], "every rank receives what others send"
            assert part is not None, "a move of keyed rows"
            results.append(part.unpack(torch.cat(arrived), ways[rank]))
        collective = collective_of(move, tensors[0].element_size(), backward=backward)
        assert collective is not None, "rows that travel"
        self.record.append(collective)
        return results


def run_forward(cluster: VirtualCluster, programs: Sequence[RankProgram], sources: Sequence[Values]) -> list[Values]:
    """Run forward and return every rank's values by name. ``sources``: per rank."""
    values = [dict(rank_sources) for rank_sources in sources]
    with torch.no_grad():
        cluster.execute([program.forward for program in programs], values)
    return values


def run_backward(
    cluster: VirtualCluster, programs: Sequence[RankProgram], values: Sequence[Values], cotangents: Sequence[Values]
) -> list[dict[str, Tensor]]:
    """Run backward and return every rank's gradients by source. ``values``: after forward; backward sees only saved
    ones; ``cotangents``: per rank by the names in ``program.cotangents``."""
    left = [
        {**{name: rank_values[name] for name in program.saved}, **rank_cotangents}
        for program, rank_values, rank_cotangents in zip(programs, values, cotangents, strict=True)
    ]
    with torch.no_grad():
        cluster.execute([program.backward for program in programs], left)
    return [
        {source: rank_values[name] for source, name in program.gradients.items()}
        for program, rank_values in zip(programs, left, strict=True)
    ]


def compute(instruction: Compute, values: Values) -> None:
    """Run a kernel on the values of a rank."""
    try:
        returned = run_call(instruction, values.__getitem__)
    except Exception as error:
        error.add_note(f"in {instruction.origin}")
        raise
    for name, place in zip(instruction.results, instruction.places, strict=True):
        result = returned
        for index in place:
            result = result[index]
        values[name] = result


def _in_order(conversion: Conversion, backward: bool) -> Sequence[Move]:
    return conversion.moves[::-1] if backward else conversion.moves


def _check_same(at: Sequence[Convert | Depart | None]) -> None:
    described = [
        "the end" if i is None else f"{'backward of ' * i.backward}{', '.join(c.result for c in i.conversions)}"
        for i in at
    ]
    if len(set(described)) > 1:
        other = next(rank for rank, text in enumerate(described) if text != described[0])
        what = f"ranks reach different exchanges: rank 0 {described[0]}, rank {other} {described[other]}"
        fix = "the programs of the ranks differ in more than sizes: this is a bug of shardwise, please report it"
        raise ShardwiseError(what, fix=fix)


def _spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype != torch.bool else False)


def num_bytes(part: LocalMove, packed: Sequence[Tensor]) -> int:
    """Return the bytes of the whole message on a rank: the result of an all_gather, the input of other collectives."""
    if part.kind == "all_gather":
        return sum(prod(shape) for shape in part.received) * packed[0].element_size()
    return sum(tensor.numel() for tensor in packed) * packed[0].element_size()


def exchange_all(mesh: Mesh, parts: Sequence[LocalMove], packed: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """Return what every rank receives. All ranks take part in the same collective over the same axes."""
    kinds = {(part.kind, part.axes, part.reduction) for part in parts}
    assert len(kinds) == 1, f"ranks call different collectives: {sorted(map(str, kinds))}"
    answers: list[list[Tensor]] = []
    for rank, part in enumerate(parts):
        group = sorted(mesh.group(part.axes, rank))
        index = group.index(rank)
        if part.kind == "all_gather":
            answer = [packed[member][0].clone(memory_format=torch.contiguous_format) for member in group]
        elif part.kind in ("all_to_all", "collective_permute", "halo_exchange"):
            answer = [packed[member][index].clone(memory_format=torch.contiguous_format) for member in group]
        else:
            position = index if part.kind == "reduce_scatter" else 0
            answer = [reduce_tensors([packed[member][position] for member in group], part.reduction)]
        for tensor, shape in zip(answer, part.received, strict=True):
            assert tuple(tensor.shape) == shape, f"{part.kind} over {part.axes}: {tuple(tensor.shape)}, not {shape}"
        answers.append(answer)
    return answers


def reduce_tensors(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        if reduction == "sum":
            total += tensor
        elif reduction == "max":
            total = torch.maximum(total, tensor)
        elif reduction == "min":
            total = torch.minimum(total, tensor)
        else:
            total = torch.logical_or(total, tensor).to(total.dtype)
    return total
