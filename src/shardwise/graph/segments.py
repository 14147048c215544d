"""Parts of a model whose values are not kept on the device for backward: those marked by ``recompute`` and ``offload``,
and the model's own calls of ``torch.utils.checkpoint``.

While a model is captured, a call of such a part opens a *segment*: every operator traced inside carries its mark. Of
nested segments the outermost counts, unless the inner one is treated differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch import nn

from shardwise.errors import CaptureWarning, PlanWarning, ShardwiseError, warn_user
from shardwise.graph.ir import Op

Recompute = Literal["full", "all", "cheap", "gathers", "cheap+gathers", "none"]
How = Recompute | Literal["offload"]
WAYS: tuple[Recompute, ...] = get_args(Recompute)
Messages = Literal["none", "values", "parameters"]
MESSAGES: tuple[Messages, ...] = ("none", "values", "parameters")
SEGMENT = "shardwise_segment"
_ATTRIBUTE = "_shardwise_recompute"
SELECTIVE = "checkpoint with context_fn"
_GENERATOR = "_checkpoint_without_reentrant_generator"  # what torch's checkpoint runs around the function
_Target = TypeVar("_Target", bound=Callable[..., Any])
_Module = TypeVar("_Module", bound=nn.Module)
_Opened = Callable[[str, How, Messages], AbstractContextManager[None]]
_OPENED: ContextVar[_Opened | None] = ContextVar("shardwise_opened", default=None)  # while a model is captured


@dataclass(frozen=True, slots=True)
class Segment:
    """One call of a part of the model. ``name``: module path, or ``checkpoint``. ``how``: ``"full"``: recompute all
    inner values from the inputs; ``"all"``: also the outputs; ``"cheap"``: cheap operators; ``"gathers"``: results of
    collectives; ``"none"``: keep all, even inside others; ``"offload"``: wait on the host. ``operators``: by name.
    ``messages``: the collectives repeated by ``"full"`` and ``"all"``."""

    name: str
    how: How
    operators: frozenset[str]
    messages: Messages = "values"


def recompute(target: _Target, how: Recompute = "full", *, messages: Messages = "values") -> _Target:
    """Recompute the values inside of ``target`` in backward instead of keeping them (activation checkpointing).

    The results do not change; a plan reports what is recomputed.

    Args:
        target: a module (of a ModuleList every member is marked), or a function.
        how: ``"full"``: keep only the inputs and outputs of every call (Chen et al. 2016, arXiv:1604.06174). ``"all"``:
            recompute the outputs, too. ``"cheap"``: recompute element-wise operators, norms and similar; keep results
            of products and attention. ``"gathers"``: recompute nothing, but keep what was sent instead of what a
            collective returned (a sequence gathered by tensor parallelism) if that takes fewer bytes; the collective is
            repeated, overlapped with the backward that needs it (Korthikanti et al. 2022, arXiv:2205.05198, section
            4.2.2). ``"cheap+gathers"``: both. ``"none"``: keep everything, even under
            ``sw.plan(..., recompute="full")``.
        messages: for ``"full"`` and ``"all"``. ``"values"``: repeat collectives inside. ``"none"``: keep their results.
            ``"parameters"``: also gather sharded parameters again.

    Returns:
        The module, marked; for a function, a function to call inside ``forward``.

    Raises:
        ShardwiseError: ``target`` cannot be called, or another value of ``how`` or ``messages``.
    """
    if not callable(target):
        raise ShardwiseError(f"recompute takes a module, not {type(target).__name__}", fix="recompute(model.layers[3])")
    check_how(how, "recompute")
    if messages not in MESSAGES:
        raise ShardwiseError(f"recompute: unknown messages {messages!r}", fix=f"one of {', '.join(MESSAGES)}")
    if isinstance(target, nn.Module):
        _mark(target, how, messages)
        return target

    def opened() -> AbstractContextManager[None]:
        segment, name = _OPENED.get(), getattr(target, "__name__", type(target).__name__)
        return segment(name, how, messages) if segment is not None else nullcontext()

    return cast(_Target, _inside(target, opened))


def offload(module: _Module) -> _Module:
    """Keep what backward needs of the inside of ``module`` in pinned host memory, and prefetch it for backward.

    Only tensors of at least 64 KiB per device are offloaded (Rajbhandari et al. 2021, arXiv:2104.07857, on
    activations).

    Args:
        module: the module to mark.

    Returns:
        The module; its results do not change.

    Raises:
        ShardwiseError: ``module`` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise ShardwiseError(f"offload takes a module, not {type(module).__name__}", fix="offload(model.layers[3])")
    _mark(module, "offload", "values")
    return module


def _mark(module: nn.Module, how: How, messages: Messages) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # it is never called itself
        for part in module.children():
            _mark(part, how, messages)
    else:
        setattr(module, _ATTRIBUTE, (how, messages))


def check_how(how: object, where: str, *others: str) -> None:
    """Raise ShardwiseError unless ``how`` is a way to recompute. ``others``: further accepted values."""
    if how not in WAYS:
        choices = (*others, *WAYS)
        raise ShardwiseError(
            f"{where}: unknown way to recompute {how!r}", fix=f"one of {', '.join(map(repr, choices))}"
        )


@contextmanager
def open_segments(module: nn.Module) -> Iterator[None]:
    """Let calls of marked parts open segments while ``module`` (a copy made for capture) is traced."""
    opened: list[int] = [0]
    around: list[tuple[How, Messages]] = []

    @contextmanager
    def segment(name: str, how: How, messages: Messages) -> Iterator[None]:
        if around and around[-1] == (how, messages):
            yield
            return
        mark = f"{opened[0]} {how} {messages} {name}"
        opened[0] += 1
        around.append((how, messages))
        try:
            with torch.fx.traceback.annotate({SEGMENT: mark}):
                yield
        finally:
            around.pop()

    def checkpointed(
        function: Callable[..., Any], preserve: bool, context_fn: Callable[[], Any], *others: Any, **kwargs: Any
    ) -> Iterator[None]:
        selective = context_fn is not torch.utils.checkpoint.noop_context_fn
        with segment(SELECTIVE if selective else "checkpoint", "full", "values"):
            yield

    for path, part in module.named_modules():
        policy = vars(part).get(_ATTRIBUTE)
        if policy is not None:
            part.forward = _inside(part.forward, partial(segment, path, *policy))
    token = _OPENED.set(segment)
    try:
        with _checkpoints_run(checkpointed):
            yield
    finally:
        _OPENED.reset(token)


@contextmanager
def keep_checkpointed_values() -> Iterator[None]:
    """Make checkpoints keep what backward needs, as if they were not there."""

    def kept(*_: Any, **__: Any) -> Iterator[None]:
        yield

    with _checkpoints_run(kept):
        yield


@contextmanager
def _checkpoints_run(around: Callable[..., Iterator[None]]) -> Iterator[None]:
    """Run a context manager around the function of torch's non-reentrant checkpoints."""
    before = getattr(torch.utils.checkpoint, _GENERATOR)
    setattr(torch.utils.checkpoint, _GENERATOR, around)
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, _GENERATOR, before)


def announce_selective(segments: Iterable[Segment]) -> None:
    """Warn about checkpoints that choose by themselves what they keep."""
    if any(segment.name == SELECTIVE for segment in segments):
        warn_user(
            "a checkpoint of the model uses context_fn (selective checkpointing): under a plan all of it is "
            'recomputed; to keep more, mark its modules: sw.recompute(module, "cheap")',
            CaptureWarning,
        )


def announce_kept(segments: Iterable[Segment], operators: Collection[str], recomputed: Collection[str]) -> None:
    """Warn if a model wants operators of a program recomputed in backward, and its plan recomputes none of them (it may
    be older than the mark)."""
    marked = {op for s in segments if s.how in ("full", "all") for op in s.operators}.intersection(operators)
    if marked and marked.isdisjoint(recomputed):
        warn_user(
            f"the model asks to recompute {len(marked)} operators in backward (activation checkpointing), but the "
            "plan keeps all of them, so no memory is saved; call sw.plan after enabling checkpointing",
            PlanWarning,
        )


def _inside(target: Callable[..., Any], opened: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @wraps(target)
    def covered(*args: Any, **kwargs: Any) -> Any:
        with opened():
            return target(*args, **kwargs)

    return covered


@lru_cache(maxsize=2**16)  # every memory policy, stage and short program asks for all operators
def block_of(op: str) -> str:
    """Return the repeated block of an operator, by its name: the path up to its first number (``layers.3``), or ""."""
    parts = op.partition("/")[0].split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def segments_of(marked: Iterable[tuple[Op, str]]) -> tuple[Segment, ...]:
    """Return the segments of operators with their marks ("": in none), in the order in which they were opened."""
    members: dict[str, set[str]] = {}
    for op, mark in marked:
        if mark:
            members.setdefault(mark, set()).add(op.name)
    segments = []
    for mark in sorted(members, key=lambda mark: int(mark.partition(" ")[0])):
        _, how, messages, name = mark.split(" ", 3)
        segments.append(Segment(name, cast(How, how), frozenset(members[mark]), cast(Messages, messages)))
    return tuple(segments)
