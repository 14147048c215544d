"""What the dialect computes is what the reference computed: results with their dtypes, gradients, states of optimizers,
names and order of parameters, printed text. What differs is listed in ``reference_differences`` with a reason.

The reference's side is ``reference_values.tsv``, which ``make dialect-reference`` measures.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from mindspore import reference_differences
from mindspore.reference_differences import VALUES
from mindspore.reference_run import FILE, record, recorded
from mindspore.test_reference_defaults import CONTENT
from shardwise.mindspore import nn
from shardwise.mindspore.named import signature_of

PACKAGE = "shardwise.mindspore"
RECORDED = recorded()
LISTED = tuple(start for starts in VALUES.values() for start in starts)
NEAR = 1e-4  # of the largest value: the reference's kernels approximate exp and tanh


def _number(text: str) -> complex | None:
    try:
        return complex(text)
    except ValueError:
        return None


def near(text: str, other: str) -> bool:
    """Return whether two texts agree but for the last digits of their numbers."""
    words, others = text.split(" "), other.split(" ")
    if text == other or len(words) != len(others):
        return text == other
    numbers = [(_number(word), _number(own)) for word, own in zip(words, others, strict=True)]
    far = NEAR * max((abs(n) for n, _ in numbers if n is not None and abs(n) < float("inf")), default=0) + 2e-6
    return all(
        word == own or (n is not None and m is not None and abs(n - m) <= far)
        for (n, m), word, own in zip(numbers, words, others, strict=True)
    )


def same(found: Any, want: Any) -> bool:
    if isinstance(found, list) and isinstance(want, list):
        return len(found) == len(want) and all(map(same, found, want))
    return near(found, want) if isinstance(found, str) and isinstance(want, str) else bool(found == want)


def differing(call: str) -> str:
    """Return in words how a call differs from the reference's; empty: it does not."""
    want, found = RECORDED[call], record(PACKAGE, call)
    if "error" in found:
        return str(found["error"])
    if want.get("grad") and isinstance(found.get("grad"), list):  # one text per gradient: its size is the tensor's
        want, found = ({**one, "grad": [" ".join(g) for g in one["grad"]]} for one in (want, found))
    parts = [part for part in want if want[part] is not None and not same(found.get(part), want[part])]
    return "; ".join(f"{part}: {found.get(part)}, the reference's {want[part]}" for part in parts)


@pytest.fixture(scope="module")
def found_differences() -> dict[str, str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {call: text for call in RECORDED if (text := differing(call))}
    finally:
        torch.set_num_threads(threads)


def test_calls_return_what_the_reference_returned_or_are_listed_with_a_reason(
    found_differences: dict[str, str],
) -> None:
    assert len(RECORDED) > 2400
    assert {call: text for call, text in found_differences.items() if not call.startswith(LISTED)} == {}
    assert [start for start in LISTED if not any(call.startswith(start) for call in found_differences)] == []


def test_a_changed_default_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = "steps(nn.Adam, learning_rate=0.1, weight_decay=0.1)"
    assert differing(call) == ""
    monkeypatch.setattr(nn.Adam, "_signature", signature_of({**nn.Adam.settings, "beta1": 0.8}))
    assert differing(call).startswith("out: ")


def test_the_page_lists_the_differences() -> None:
    page = reference_differences.PAGE
    assert page.read_text(encoding="utf-8") == reference_differences.page(page.read_text(encoding="utf-8"))


def test_most_names_that_both_have_are_measured() -> None:
    text = FILE.read_text(encoding="utf-8")
    names = [name for module in ("nn", "ops") for name in CONTENT["modules"][module]]
    assert sum(f".{name}(" in text or f".{name}," in text for name in names) > 600
