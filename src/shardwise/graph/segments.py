"""Parts of a model whose values are not kept on the device for backward: what ``recompute`` and ``offload`` name, and
the model's own calls of ``torch.utils.checkpoint``.

While a model is captured, a call of such a part opens a *segment*: every operator traced inside carries its mark. Of
segments inside each other the outermost counts, unless the inner one is treated in another way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch import nn

from shardwise.errors import CaptureWarning, PlanWarning, ShardwiseError, problem
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
    """One call of a part of the model. ``name``: the path of the module, or ``checkpoint``; ``how``: ``"full"``: all
    that is made inside is made again from what comes in; ``"all"``: what goes out, too; ``"cheap"``: what costs little;
    ``"gathers"``: what messages brought; ``"none"``: it is kept, also where everything else is not; ``"offload"``: it
    waits on the host; ``operators``: by name. ``messages``: which messages are sent again where everything is made
    again."""

    name: str
    how: How
    operators: frozenset[str]
    messages: Messages = "values"


def recompute(target: _Target, how: Recompute = "full", *, messages: Messages = "values") -> _Target:
    """Backward computes what is inside of ``target`` again, instead of keeping it.

    ``target``: a module, which is marked and returned (of a ModuleList every member); or a function, then the result is
    one to call inside ``forward``. ``how``: ``"full"``: of every call only what comes in and what goes out is kept
    (Chen et al. 2016, arXiv:1604.06174); ``"all"``: what goes out is made again, too; ``"cheap"``: results of
    element-wise operators, norms and the like are made again, results of products and attention are kept;
    ``"gathers"``: nothing is computed again, but of what a message brought (a sequence that tensor parallelism gathers)
    only what was sent is kept, where that takes fewer bytes: the message is sent again, beside the backward that needs
    it (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2); ``"cheap+gathers"``: both; ``"none"``: everything is
    kept, also where ``sw.plan(..., recompute="full")`` asks for the others. ``messages``, of the first two:
    ``"values"``: what ranks exchange inside is exchanged again; ``"none"``: what it brought is kept;
    ``"parameters"``: parameters that are stored in parts are gathered again, too. What is computed stays the same; a
    plan says what is made again. Raises ShardwiseError for what can not be called and for other words.
    """
    if not callable(target):
        raise ShardwiseError(
            problem(f"recompute takes a module, not {type(target).__name__}", fix="recompute(model.layers[3])")
        )
    check_how(how, "recompute")
    if messages not in MESSAGES:
        raise ShardwiseError(problem(f"recompute: unknown messages {messages!r}", fix=f"one of {', '.join(MESSAGES)}"))
    if isinstance(target, nn.Module):
        _mark(target, how, messages)
        return target

    @wraps(target)
    def covered(*args: Any, **kwargs: Any) -> Any:
        opened = _OPENED.get()
        if opened is None:
            return target(*args, **kwargs)
        with opened(getattr(target, "__name__", type(target).__name__), how, messages):
            return target(*args, **kwargs)

    return cast(_Target, covered)


def offload(module: _Module) -> _Module:
    """What backward needs of the inside of ``module`` waits for it in the memory of the host (pinned), and comes back
    ahead of it; only what is at least 64 KiB on a device (Rajbhandari et al. 2021, arXiv:2104.07857, on activations).
    Returns the module, which computes what it did. Raises ShardwiseError for what is no module."""
    if not isinstance(module, nn.Module):
        raise ShardwiseError(
            problem(f"offload takes a module, not {type(module).__name__}", fix="offload(model.layers[3])")
        )
    _mark(module, "offload", "values")
    return module


def _mark(module: nn.Module, how: How, messages: Messages) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # nobody calls it
        for part in module.children():
            _mark(part, how, messages)
    else:
        setattr(module, _ATTRIBUTE, (how, messages))


def check_how(how: object, where: str, *others: str) -> None:
    """Raise ShardwiseError unless it is a way to recompute. ``others``: what may be said there besides."""
    if how not in WAYS:
        known = (*others, *WAYS)
        raise ShardwiseError(
            problem(f"{where}: unknown way to recompute {how!r}", fix=f"one of {', '.join(map(repr, known))}")
        )


@contextmanager
def open_segments(module: nn.Module) -> Iterator[None]:
    """While ``module`` (a copy made for capture) is traced, calls of its parts open segments."""
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
        asked = vars(part).get(_ATTRIBUTE)
        if asked is not None:
            part.forward = _inside(part.forward, segment, path, *asked)
    token = _OPENED.set(segment)
    try:
        with _checkpoints_run(checkpointed):
            yield
    finally:
        _OPENED.reset(token)


@contextmanager
def keep_checkpointed_values() -> Iterator[None]:
    """While it lasts, checkpoints keep what backward needs, as if they were not there."""

    def kept(*_: Any, **__: Any) -> Iterator[None]:
        yield

    with _checkpoints_run(kept):
        yield


@contextmanager
def _checkpoints_run(around: Callable[..., Iterator[None]]) -> Iterator[None]:
    """While it lasts, torch's checkpoints (that are not re-entrant) run this around their function."""
    before = getattr(torch.utils.checkpoint, _GENERATOR)
    setattr(torch.utils.checkpoint, _GENERATOR, around)
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, _GENERATOR, before)


def announce_selective(segments: Iterable[Segment]) -> None:
    """Warns of checkpoints that choose by themselves what they keep."""
    if any(segment.name == SELECTIVE for segment in segments):
        warnings.warn(
            "a checkpoint of the model chooses by context_fn what it keeps: under a plan all of it is made again; name "
            'its parts for something else: sw.recompute(module, "cheap")',
            CaptureWarning,
            stacklevel=3,
        )


def announce_kept(segments: Iterable[Segment], operators: Collection[str], again: Collection[str]) -> None:
    """Warns where a model wants operators of a program made again in backward, and its plan makes none of them again
    (it may be older than the wish)."""
    asked = {op for s in segments if s.how in ("full", "all") for op in s.operators}.intersection(operators)
    if asked and asked.isdisjoint(again):
        warnings.warn(
            f"the model asks to make {len(asked)} operators again in backward (activation checkpointing), and the plan "
            "keeps them all: numbers are the same, memory is not saved; call sw.plan after the model was told so",
            PlanWarning,
            stacklevel=4,
        )


def _inside(
    forward: Callable[..., Any], segment: _Opened, path: str, how: How, messages: Messages
) -> Callable[..., Any]:
    @wraps(forward)
    def covered(*args: Any, **kwargs: Any) -> Any:
        with segment(path, how, messages):
            return forward(*args, **kwargs)

    return covered


def block_of(op: str) -> str:
    """The repeated block of an operator, by its name: the module whose path has a number for the first time
    (``layers.3``); empty in none."""
    parts = op.partition("/")[0].split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def segments_of(marked: Iterable[tuple[Op, str]]) -> tuple[Segment, ...]:
    """The segments of operators with their marks ("": in none), in the order in which they were opened."""
    members: dict[str, set[str]] = {}
    for op, mark in marked:
        if mark:
            members.setdefault(mark, set()).add(op.name)
    segments = []
    for mark in sorted(members, key=lambda mark: int(mark.partition(" ")[0])):
        _, how, messages, name = mark.split(" ", 3)
        segments.append(Segment(name, cast(How, how), frozenset(members[mark]), cast(Messages, messages)))
    return tuple(segments)
