"""Index arithmetic under random shapes: views, cuts, joins, lookups and scans, split in every factor and in atoms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rules.harness import grid_of, make_case, mismatch, pieces_of
from rules.samples import Sample, bits, call, ids, x
from shardwise.rules import rule_of

aten = torch.ops.aten
Draw = Callable[[st.SearchStrategy], object]
sizes = st.integers(1, 6)
shapes = st.lists(sizes, min_size=1, max_size=3)
flat = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


def _reshape(draw: st.DrawFn) -> Sample:
    before, after = draw(flat), []
    left = int(torch.tensor(before).prod())
    while left > 1 and len(after) < 4:
        after.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= after[-1]
    return call(aten.reshape.default, x(*before), [*after, left])


def _slice(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 12))
    bound = st.one_of(st.none(), st.integers(-13, 13))
    return call(aten.slice.Tensor, x(2, length), 1, draw(bound), draw(bound), draw(st.sampled_from([1, 1, 2, 3])))


def _cat(draw: st.DrawFn) -> Sample:
    unit = draw(st.integers(1, 3))
    parts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return call(aten.cat.default, [x(2, unit * part) for part in parts], -1)


def _split(draw: st.DrawFn) -> Sample:
    return call(aten.split.Tensor, x(2, draw(st.integers(1, 12))), draw(st.integers(1, 5)), 1)


def _triangle(draw: st.DrawFn) -> Sample:
    make = draw(st.sampled_from([x, bits]))
    target = draw(st.sampled_from([aten.tril.default, aten.triu.default]))
    return call(target, make(draw(st.integers(1, 12)), draw(st.integers(1, 12))), draw(st.integers(-3, 3)))


def _index(draw: st.DrawFn) -> Sample:
    shape, common = draw(shapes), draw(st.lists(st.integers(1, 3), max_size=2))
    indices = [
        ids(size, *[draw(st.sampled_from([1, n])) for n in common]) - draw(st.sampled_from([0, size]))
        if draw(st.booleans())
        else None
        for size in shape
    ]
    while indices and indices[-1] is None:
        indices.pop()
    assume(indices)
    return call(aten.index.Tensor, draw(st.sampled_from([x, bits]))(*shape), indices)


def _cumsum(draw: st.DrawFn) -> Sample:
    return call(aten.cumsum.default, draw(st.sampled_from([x, bits]))(2, draw(st.integers(1, 12))), 1)


def _range(draw: st.DrawFn) -> Sample:
    start, step = draw(st.integers(-4, 4)), draw(st.sampled_from([1, 2, -1, -3]))
    stop = start + step * draw(st.integers(1, 12))
    return call(aten.arange.start_step, start, stop, step, dtype=draw(st.sampled_from([None, torch.float64])))


def _repeat(draw: st.DrawFn) -> Sample:
    shape = draw(shapes)
    lead = draw(st.lists(st.integers(1, 3), max_size=1))
    return call(aten.repeat.default, x(*shape), [*lead, *(draw(st.integers(1, 3)) for _ in shape)])


def _convolution(draw: st.DrawFn) -> Sample:
    kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    groups = draw(st.integers(1, 2))
    length = kernel + draw(st.integers(0, 6))
    weight = x(groups * draw(st.integers(1, 3)), 2, kernel)
    return call(aten.conv1d.default, x(2, groups * 2, length), weight, None, [stride], [padding], [1], groups)


@pytest.mark.parametrize(
    "make",
    [_reshape, _slice, _cat, _split, _triangle, _index, _cumsum, _range, _repeat, _convolution],
    ids=lambda make: make.__name__[1:],
)
def test_parts_of_random_calls_equal_the_whole(make: Callable[[st.DrawFn], Sample]) -> None:
    @settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def property_of(data: st.DataObject) -> None:
        sample = make(data.draw)
        case = make_case(sample)
        rule = rule_of(case.op, case.graph)
        assert rule is not None
        seen_through = {window.factor for _, window in rule.windows}  # whose minor parts are whole
        for factor in rule.factors:
            if factor.kind in ("whole", "lowered") or factor.size < 2:
                continue
            trials = [pieces_of((factor.size,), 0, parts) for parts in (2, 3)]
            trials += [
                grid_of((major, factor.size // major), 2)
                for major in (2, 3)
                if factor.size % major == 0 and factor.size > major and factor.name not in seen_through
            ]
            for trial in trials:
                found = mismatch(case, rule, {factor.name: trial})
                assert not found, f"{sample}\n{rule}\n{factor}: {found}"

    property_of()
