"""The training step of one rank, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.graph.ir import refs
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Instruction
from shardwise.programs.spmd import SpmdProgram


@dataclass(frozen=True)
class RankProgram:
    """The training step of one rank.

    ``forward`` computes from the sources ``delivered`` (the loss and outputs, each value once), ``mutations`` (buffer,
    new value) and ``saved``, which ``backward`` reads. ``cotangents``: per delivered value the name under which
    backward gets its cotangent, or None; ``gradients``: source -> the name of its gradient. ``aliases``: name -> the
    name of the same value in the lists. ``forms``: of all names. ``given``: values that forward takes beside the
    sources, for example those computed before the first micro-batch (``programs.grad_accum_program``).
    """

    rank: int
    spmd: SpmdProgram
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    saved: tuple[str, ...]
    delivered: tuple[str, ...]
    mutations: tuple[tuple[str, str], ...]
    cotangents: tuple[str | None, ...]
    gradients: Mapping[str, str]
    aliases: Mapping[str, str]
    forms: Mapping[str, Form]
    untraceable: Mapping[str, str]
    given: tuple[str, ...] = ()

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the names that forward starts from: the sources and ``given``."""
        return (*self.spmd.graph.source_of, *self.given)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the names that forward delivers or writes to buffers."""
        return (*self.delivered, *(value for _, value in self.mutations))

    @property
    def handed(self) -> tuple[str, ...]:
        """Return the names that backward starts from: ``saved`` and the cotangents."""
        return (*self.saved, *(name for name in self.cotangents if name is not None))

    def resolve(self, name: str) -> str:
        """Return the name that a value of the Spmd program has in the lists."""
        return self.aliases.get(name, name)


def delivered_values(spmd: SpmdProgram, *, loss_only: bool) -> tuple[str, ...]:
    """Return the values that forward delivers, each once, the loss first."""
    names = [spmd.loss] if spmd.loss is not None else []
    if not loss_only or spmd.loss is None:
        names += refs(spmd.outputs)
    return tuple(dict.fromkeys(names))
