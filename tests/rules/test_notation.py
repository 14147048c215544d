"""The factor notation: parsing, printing, errors that point."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import raises
from shardwise.errors import NotationError
from shardwise.rules.notation import Pattern, format_dims, parse_rule

_NAMES = [f"{letter}{digit}" for letter in "abk" for digit in ("", "0", "_long")]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[str, ...], ...]:
    names = list(draw(st.permutations(_NAMES)))
    dims: list[tuple[str, ...]] = [("...",)] if draw(st.booleans()) else []
    for size in draw(st.lists(st.integers(0, 3), max_size=4)):
        dims.append(tuple(names.pop() for _ in range(min(size, len(names)))))
    return tuple(dims)


@settings(deadline=None, derandomize=True)
@given(st.lists(tensors(), max_size=3), st.lists(tensors(), min_size=1, max_size=3))
def test_every_pattern_prints_as_text_that_parses_back(operands: list, results: list) -> None:
    pattern = Pattern(tuple(operands), tuple(results))
    assert parse_rule(str(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("m k, n k -> m n", ((("m",), ("k",)), (("n",), ("k",))), ((("m",), ("n",)),)),
        ("... d -> ... d", ((("...",), ("d",)),), ((("...",), ("d",)),)),
        ("b (h d) 1 -> b h d", ((("b",), ("h", "d"), ()),), ((("b",), ("h",), ("d",)),)),
        ("k, k -> ()", ((("k",),), (("k",),)), ((),)),
        ("-> m n", (), ((("m",), ("n",)),)),
        ("m->m,m", ((("m",),),), ((("m",),), (("m",),))),
    ],
)
def test_the_notation_reads_as_its_page_says(text: str, operands: tuple, results: tuple) -> None:
    assert parse_rule(text) == Pattern(operands, results)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("m k, n k", "the arrow -> is missing", 8),
        ("m -> n -> k", "unexpected '->'", 7),
        ("m ? -> m", "unexpected '?'", 2),
        ("m, -> m", "an empty tensor", 3),
        ("m k -> m,", "an empty tensor", 9),
        ("m ->", "at least one result", 4),
        ("(m k -> m", "inside the parentheses", 5),
        ("((a b) c) -> a", "inside the parentheses", 1),
        ("(m) -> m", "two factors or more", 2),
        ("m) -> m", "unbalanced )", 1),
        ("m ... -> m", "... stands for leading dims", 2),
        ("m m -> m", "'m' appears twice", 0),
        ("() m -> m", "() is a scalar", 3),
        ("M -> m", "unexpected 'M'", 0),
    ],
)
def test_mistakes_are_pointed_at(text: str, message: object, column: int) -> None:
    with raises(NotationError, message) as caught:
        parse_rule(text)
    shown, pointer = str(caught.value).split("\n")[1:]
    assert shown == f"  {text}"
    assert pointer.index("^") - 2 == column


def test_a_scalar_and_a_broadcast_dim_print_differently() -> None:
    assert format_dims(()) == "()"
    assert format_dims(((),)) == "1"
