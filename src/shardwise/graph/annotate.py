"""User annotations inside a model: strategies of calls and submodules, layouts of values.

Outside capture the functions change nothing. While a model is captured, a call made through ``shard`` opens a *region*:
every operator traced inside carries the region's number, and the innermost region wins. ``constrain`` inserts a marker
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.fx.traceback
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.graph.custom_operators import mark
from shardwise.graph.origins import calling_line

Strategy = str | tuple[tuple[int, ...], ...]
Target = TypeVar("Target", bound=Callable[..., Any])

REGION = "shardwise_region"
SUMMED = "summed"  # the layout text that reduces partial sums at once
_ATTRIBUTE = "_shardwise_region"


@dataclass(frozen=True, slots=True)
class Annotation:
    """A strategy for the operators of ``scope`` (``Op.scope``). ``source`` is the line where the user wrote it."""

    scope: str
    strategy: Strategy
    out_strategy: Strategy | None
    source: str


@dataclass(frozen=True, slots=True)
class AnnotatedRegion:
    """An annotation before its scope is known.

    ``name``: the function's name, or "" for a module. ``path``: the module's path. ``strategy``: None if the region
    only groups operators.
    """

    name: str
    path: str
    strategy: Strategy | None
    out_strategy: Strategy | None
    source: str


@dataclass
class AnnotationRecorder:
    """The regions opened while a model is captured, in order of their numbers."""

    regions: list[AnnotatedRegion] = field(default_factory=list)

    def add(self, region: AnnotatedRegion) -> int:
        self.regions.append(region)
        return len(self.regions) - 1

    def cover(self, module: nn.Module, region: AnnotatedRegion) -> None:
        """Make every call of ``module`` (a copy made for capture) open the region."""
        number = self.add(region)
        forward = module.forward

        @wraps(forward)
        def covered(*args: Any, **kwargs: Any) -> Any:
            return _in_region(forward, region, number, args, kwargs)

        module.forward = covered


_RECORDER: ContextVar[AnnotationRecorder | None] = ContextVar("shardwise_recorder", default=None)


@contextmanager
def record_annotations() -> Iterator[AnnotationRecorder]:
    """Record the regions that annotated calls open while a model is captured."""
    recorder = AnnotationRecorder()
    token = _RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)


def shard(target: Target, in_strategy: Any, out_strategy: Any = None) -> Target:
    """Fix the strategy of a call or of a submodule.

    The strategy applies to the one operator inside that does the work; casts, views and a bias follow it.

    Args:
        target: a callable, or an ``nn.Module``.
        in_strategy: axes per factor, ``"m@dp n@tp"``, with the number of indices per device where the devices' shares
            differ, ``"v@tp{10,20,30,4}"``; or split counts, one tuple per tensor operand with one count per dim,
            ``((2, 4), (4, 1))``; or None if several operators do the work, which then follow the constraints inside.
        out_strategy: split counts per result, or a layout text as in ``constrain`` if there is one result.

    Returns:
        For a callable, a callable to use inside ``forward``; for a module, the module itself, annotated.

    Raises:
        ShardwiseError: at once, if a strategy is nested wrongly or a count is not a positive integer.
    """
    source = calling_line()
    name = getattr(target, "__name__", type(target).__name__)
    strategy, out = _checked_pair(in_strategy, out_strategy, name, source)
    if isinstance(target, nn.Module):
        setattr(target, _ATTRIBUTE, AnnotatedRegion("", "", strategy, out, source))
        return target

    @wraps(target)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        recorder = _RECORDER.get()
        if recorder is None:
            return target(*args, **kwargs)
        region = AnnotatedRegion(name, "", strategy, out, source)
        return _in_region(target, region, recorder.add(region), args, kwargs)

    return cast(Target, sharded)


def constrain(x: torch.Tensor, text: str) -> torch.Tensor:
    """Fix the layout of a value inside ``forward``.

    Args:
        x: the tensor.
        text: a layout such as ``"[32@dp, 512, 4096@tp]"``, or split counts of its dims, ``"((2, 1, 4),)"``.
            ``"summed"`` leaves the layout open, but reduces partial sums here by an all-reduce, and consumers that need
            a part slice the result. Cost-based searches ignore ``"summed"``.

    Returns:
        ``x``.

    Raises:
        ShardwiseError: ``text`` is not a string, or is empty.
    """
    if not isinstance(text, str) or not text.strip():
        raise ShardwiseError(
            f"constrain takes a layout as text, not {text!r}", source=calling_line(), fix='"[32@dp, 512]"'
        )
    if _RECORDER.get() is None:
        return x
    return cast(torch.Tensor, mark(x, text))


def _in_region(
    function: Callable[..., Any], region: AnnotatedRegion, number: int, args: Any, kwargs: dict[str, Any]
) -> Any:
    with torch.fx.traceback.annotate({REGION: number}):
        result = function(*args, **kwargs)
    out = region.out_strategy
    if out is None:
        return result
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    num_tags = 1 if isinstance(out, str) else len(out)
    if (
        not isinstance(tensors, (tuple, list))
        or len(tensors) != num_tags
        or not all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    ):
        count = f"{len(tensors)} results" if isinstance(tensors, (tuple, list)) else f"a {type(result).__name__}"
        raise ShardwiseError(
            f"out_strategy {out!r} is for {num_tags} result tensors, the call returned {count}",
            op=region.name or region.path,
            source=region.source,
            fix="pass one tuple of split counts per result, or use sw.constrain on them",
        )
    marked = [mark(t, out if isinstance(out, str) else repr((out[i],))) for i, t in enumerate(tensors)]
    return marked[0] if isinstance(result, torch.Tensor) else type(result)(marked)


def module_region(module: nn.Module) -> AnnotatedRegion | None:
    """Return the region that ``shard`` attached to a module, or None."""
    return cast("AnnotatedRegion | None", vars(module).get(_ATTRIBUTE))


def checked_strategy(strategy: Any, name: str, source: str = "") -> Strategy:
    """Return the strategy with lists converted to tuples. Raises ShardwiseError if its form is wrong."""
    checked, _ = _checked_pair("" if strategy is None else strategy, None, name, source)
    assert checked is not None
    return checked


def _checked_pair(strategy: Any, out_strategy: Any, name: str, source: str) -> tuple[Strategy | None, Strategy | None]:
    if _is_flat(strategy):
        pair = [strategy] + ([out_strategy] if _is_flat(out_strategy) else [])
        written, meant = _tuples(strategy), _tuples(pair)
        alone = "; its second argument would be the strategy of the results" if len(pair) == 2 else ""
        raise ShardwiseError(
            f"a strategy holds one tuple per tensor operand, but {written!r} is a single tuple of counts{alone}",
            op=name,
            source=source,
            fix=f"shard({name}, {meant!r})",
        )
    out = None if out_strategy is None else _checked(out_strategy, "out_strategy", name, source)
    return None if strategy is None else _checked(strategy, "in_strategy", name, source), out


def _is_flat(strategy: Any) -> bool:
    return (
        isinstance(strategy, (tuple, list))
        and len(strategy) > 0
        and all(isinstance(item, (int, float)) for item in strategy)
    )


def _tuples(strategy: Any) -> Any:
    return tuple(map(_tuples, strategy)) if isinstance(strategy, (tuple, list)) else strategy


def _checked(strategy: Any, role: str, name: str, source: str) -> Strategy:
    def fail(what: str, fix: str) -> ShardwiseError:
        return ShardwiseError(f"{role} {what}", op=name, source=source, fix=fix)

    if isinstance(strategy, str):
        if not strategy.strip():
            raise fail("is empty", 'name axes per factor, as in "m@dp n@tp"')
        return strategy
    if _is_flat(strategy):
        raise fail(
            f"{_tuples(strategy)!r} is a single tuple of counts",
            f"write {(_tuples(strategy),)!r}: one tuple per tensor",
        )
    if not isinstance(strategy, (tuple, list)):
        raise fail(f"is {strategy!r}", 'pass a text such as "m@dp n@tp" or split counts such as ((2, 4), (4, 1))')
    for position, counts in enumerate(strategy):
        if not isinstance(counts, (tuple, list)):
            raise fail(
                f"has {counts!r} for tensor {position}", "pass one tuple of split counts per tensor, () for a scalar"
            )
        for dim, count in enumerate(counts):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                what = f"has split count {count!r} for dim {dim} of tensor {position}"
                raise fail(what, "use whole numbers, 1 for a dim that is not split")
    return cast(Strategy, _tuples(strategy))
