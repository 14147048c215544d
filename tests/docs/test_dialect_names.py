"""docs/from-mindspore.md lists the names that there are."""

from __future__ import annotations

from docs.dialect_names import PAGE, page


def test_the_names_of_the_dialect_are_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(written), "run: make names"
    assert "`SoftmaxCrossEntropyWithLogits`" in written
