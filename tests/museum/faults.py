"""Ways to put a mistake into a program between its making and its proof. Each is a context manager; leaving it raises
``NothingToBreak`` where the mistake met nothing, so that no exhibit can be caught by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

from torch import Tensor

from shardwise.graph.naming import value_name
from shardwise.programs.instructions import Compute, Convert, Depart
from shardwise.programs.rank_program import RankProgram
from shardwise.proof import ranks
from shardwise.proof.virtual import Values, VirtualCluster

Send = Callable[[int, Tensor], Tensor]  # rank, what it would send -> what it sends
Receive = Callable[[int, Tensor, Tensor], Tensor]  # rank, what it sent, what it got -> what it takes
SEED_COTANGENTS = ranks.VirtualStep._seed_cotangents
Around = Callable[..., Any]  # rank, kernel, arguments -> what the kernel returns


class NothingToBreak(AssertionError):
    """The program has no such instruction."""


@contextmanager
def exchange(
    value: str, op: str, *, backward: bool, send: Send | None = None, receive: Receive | None = None
) -> Iterator[None]:
    """Conversions of a value (pattern) for an operator (pattern), in one direction, that send or take something
    else."""
    spmds: list[Any] = []
    hits: list[str] = []

    def localized(spmd: Any, rank: int, original: Any = ranks.localize) -> Any:
        spmds.append(spmd)
        return original(spmd, rank)

    def chosen(instruction: Convert | Depart) -> list[int]:
        found = [
            position
            for position, conversion in enumerate(instruction.conversions)
            if instruction.backward == backward
            and fnmatchcase(conversion.op, op)
            and fnmatchcase(value_name(conversion.origin, spmds[0].graph), value)
        ]
        hits.extend(instruction.conversions[position].op for position in found)
        return found

    class Faulty(VirtualCluster):
        def _alone(self, instruction: Any, rank: int, values: Values, flight: Any) -> None:
            positions = chosen(instruction) if isinstance(instruction, Convert) else []
            sent = {p: values[instruction.operands[p]].clone() for p in positions}
            super()._alone(instruction, rank, values, flight)
            for p, tensor in sent.items():
                name = instruction.results[p]
                values[name] = values[name] if receive is None else receive(rank, tensor, values[name])

        def _exchange(
            self, exchanges: Sequence[Convert | Depart], values: Sequence[Values], flights: Sequence[Any]
        ) -> None:
            positions = chosen(exchanges[0])
            sent: list[dict[int, Tensor]] = []
            for rank, instruction in enumerate(exchanges):
                sent.append({})
                for p in positions:
                    name = instruction.operands[p]
                    sent[rank][p] = values[rank][name].clone()
                    if send is not None:
                        values[rank][name] = send(rank, values[rank][name].clone())
            super()._exchange(exchanges, values, flights)
            for rank, instruction in enumerate(exchanges):
                if send is not None:  # only the message was wrong
                    values[rank].update({instruction.operands[p]: tensor for p, tensor in sent[rank].items()})
                for p in positions if receive is not None else ():
                    assert receive is not None
                    if isinstance(instruction, Depart):
                        arrived = flights[rank][instruction.flight]
                        arrived[p] = receive(rank, sent[rank][p], arrived[p])
                    else:
                        name = instruction.results[p]
                        values[rank][name] = receive(rank, sent[rank][p], values[rank][name])

    with mock.patch.object(ranks, "localize", localized), mock.patch.object(ranks, "VirtualCluster", Faulty):
        yield
    if not hits:
        raise NothingToBreak(f"no conversion of {value} for {op}")


@contextmanager
def kernel(op: str, around: Around, *, backward: bool = False) -> Iterator[None]:
    """Kernels of an operator (pattern) that compute something else. ``around`` may return ``NotImplemented``: this one
    is not meant."""
    hits: list[str] = []

    def changed(instruction: Any, rank: int) -> Any:
        if not isinstance(instruction, Compute) or not fnmatchcase(instruction.origin.op, op):
            return instruction

        def target(*args: Any, **kwargs: Any) -> Any:
            returned = around(rank, instruction.target, *args, **kwargs)
            if returned is NotImplemented:
                return instruction.target(*args, **kwargs)
            hits.append(instruction.origin.op)
            return returned

        return replace(instruction, target=target)

    def differentiated(local: Any, *args: Any, original: Any = ranks.differentiate, **kwargs: Any) -> RankProgram:
        program: RankProgram = original(local, *args, **kwargs)
        part = "backward" if backward else "forward"
        return replace(program, **{part: tuple(changed(one, local.rank) for one in getattr(program, part))})

    with mock.patch.object(ranks, "differentiate", differentiated):
        yield
    if not hits:
        raise NothingToBreak(f"no kernel of {op}")


@contextmanager
def gradient(name: str, factor: float) -> Iterator[None]:
    """Gradients of parameters (pattern) that are scaled when everything is done, as optimizers and hooks do."""
    hits: list[str] = []

    def scaled(cluster: Any, programs: Any, *rest: Any, original: Any = ranks.run_backward) -> Any:
        names = {source.value: source.names[0] for source in programs[0].spmd.graph.sources}
        gradients: list[Mapping[str, Tensor]] = original(cluster, programs, *rest)
        meant = {value for value in gradients[0] if fnmatchcase(names[value], name)}
        hits.extend(meant)
        return [{value: own * factor if value in meant else own for value, own in one.items()} for one in gradients]

    with mock.patch.object(ranks, "run_backward", scaled):
        yield
    if not hits:
        raise NothingToBreak(f"no gradient of {name}")


@contextmanager
def cotangent(factor: float) -> Iterator[None]:
    """A loss that backward takes for a multiple of itself."""

    def scaled(self: Any, stage: int, micro_batch: int, programs: Any, original: Any = SEED_COTANGENTS) -> None:
        original(self, stage, micro_batch, programs)
        for program, values in zip(programs, self.values[stage, micro_batch], strict=True):
            values.update({name: values[name] * factor for name in program.cotangents if name is not None})

    with mock.patch.object(ranks.VirtualStep, "_seed_cotangents", scaled):
        yield


@contextmanager
def loaded(name: str, load: Callable[[int, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """A parameter that is put on the ranks otherwise. ``load``: rank, its shard, the whole -> what the rank holds."""
    hits: list[str] = []

    def part(self: Any, parameter: str, whole: Tensor, original: Any = ranks._Rank.part) -> Tensor:
        own: Tensor = original(self, parameter, whole)
        if parameter != name:
            return own
        hits.append(name)
        return load(self.device, own.clone(), whole)

    with mock.patch.object(ranks._Rank, "part", part):
        yield
    if not hits:
        raise NothingToBreak(f"no parameter {name}")
