"""Every exhibit is caught, and the finding names operator and rank; without the mistake the same plan is equal."""

from __future__ import annotations

import re
import time

import pytest

import shardwise as sw
from museum.exhibits import EXHIBITS, Exhibit, NotCaught, finding
from museum.faults import NothingToBreak, exchange, gradient, kernel, loaded
from museum.models import Case, data_parallel
from museum.page import PAGE, with_list
from proving import prove

CASES = {exhibit.case.__name__: exhibit.case for exhibit in EXHIBITS}


def test_there_are_fifteen_at_least_and_each_says_where_it_was_published() -> None:
    assert len(EXHIBITS) >= 15
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS)
    for exhibit in EXHIBITS:
        assert exhibit.published
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source) for source in exhibit.published), exhibit.published


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.sampled(2)
def test_without_a_mistake_the_plan_is_equal_and_really_splits(case) -> None:
    made: Case = case()
    assert any(entry.forward or entry.backward for entry in made.plan.conversions)
    report = prove(made.model, made.inputs, made.plan, steps=1)
    assert report.forward or report.backward
    assert report.first_wrong == ""


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=[exhibit.name for exhibit in EXHIBITS])
def test_a_published_mistake_is_caught_and_named(exhibit: Exhibit) -> None:
    exhibit.case()
    before = time.process_time()
    found = finding(exhibit)
    assert time.process_time() - before < 30
    assert exhibit.named in found, found
    if exhibit.has_rank:
        assert re.search(r"on rank \d", found), found


def test_a_mistake_that_meets_nothing_is_not_taken_for_one_that_is_caught() -> None:
    case = data_parallel()
    for fault in (
        exchange("nothing", "*", backward=True),
        gradient("nothing", 2.0),
        kernel("nothing", lambda *_: NotImplemented),
        loaded("nothing", lambda _, own, __: own),
    ):
        with pytest.raises(NothingToBreak), fault:
            sw.verify(case.model, case.inputs, case.plan, steps=1)
    harmless = Exhibit("none", "", (), "", data_parallel, "", lambda: gradient("*", 1.0))
    with pytest.raises(NotCaught):
        finding(harmless)


def test_the_page_lists_the_exhibits() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_list(page) == page, "run make museum-page"
