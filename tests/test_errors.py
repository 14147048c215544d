"""Errors carry the parts of their message as attributes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import shardwise as sw
from docs.blocks import blocks_of
from raising import raises
from shardwise.errors import Section, problem

PAGE = Path(__file__).parents[1] / "docs/errors.md"


@pytest.mark.parametrize("through", [lambda e: e, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_has_the_parts_of_its_message(
    through: Callable[[sw.errors.CollectiveError], sw.errors.CollectiveError],
) -> None:
    facts = [("size", "30")]
    text = problem("cannot shard 1", op="mlp.up", source="model.py:41", fix="pad it", facts=facts, section="mesh-size")
    error = through(sw.errors.CollectiveError(pickle.loads(pickle.dumps(text)), blames=[3]))
    assert (error.what, error.op, error.source, error.fix) == ("cannot shard 1", "mlp.up", "model.py:41", "pad it")
    assert error.facts == (("size", "30"),)
    assert error.section == "mesh-size"
    assert error.blames == (3,)
    assert str(error) == str(text)
    assert str(error).endswith("\n  see:    docs/errors.md#mesh-size")


def test_an_error_of_a_plain_text_says_what_only() -> None:
    error = sw.ShardwiseError("no such cluster")
    assert (error.what, error.op, error.source, error.fix, error.facts) == ("no such cluster", "", "", "", ())
    assert error.section is None


def sections_of_the_page() -> dict[str, str]:
    """Anchor -> text of the section, in the order of the page."""
    _, *parts = re.split(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    anchors = [heading.lower().replace(" ", "-") for heading in parts[::2]]
    return dict(zip(anchors, parts[1::2], strict=True))


def test_the_page_has_the_sections_that_errors_name() -> None:
    assert tuple(sections_of_the_page()) == get_args(Section)


@pytest.mark.parametrize("section", get_args(Section))
def test_a_section_has_a_program_that_raises_its_error_and_one_that_runs(section: str) -> None:
    """The programs run in tests/docs/test_code_blocks.py, which compares the class and the text of the error."""
    bad, good = blocks_of(sections_of_the_page()[section])
    assert issubclass(getattr(sw.errors, bad.raises), sw.ShardwiseError)
    assert (bad.prints or "").endswith(f"\n  see:    docs/errors.md#{section}\n")
    assert not good.raises


class _ReadsANumber(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.abs().max().item()


class _CountsRows(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / len(x[x.sum(1) > 0])


@pytest.mark.parametrize(
    ("model", "strategies", "section"),
    [
        (_ReadsANumber(16, 4), {}, "tensor-values"),
        (_CountsRows(16, 4), {}, "tensor-values"),
        (nn.Linear(16, 4), {"": "n@model"}, "strategy-names"),
        (nn.Linear(16, 4), {"": "columns@tp"}, "strategy-names"),
    ],
)
def test_related_errors_name_the_same_section(model: nn.Module, strategies: dict[str, str], section: str) -> None:
    with raises(sw.ShardwiseError, section=section):
        sw.plan(model, torch.randn(8, 16), 4, mesh=sw.Mesh(tp=4), strategies=strategies)


@pytest.mark.parametrize("kind", [sw.PlanError, lambda text: ValueError(text)])
def test_an_assertion_about_an_error_fails_where_a_part_of_it_is_another(kind: Callable[[str], Exception]) -> None:
    said = "cannot split 16 in 6 parts"
    text = problem(
        said, op="mlp.up", source="model.py:41", fix="pad 16 to 18", facts=[("needed", "3")], section="mesh-size"
    )

    def expect(*values: object, error: type[Exception] = ValueError, **fields: Any) -> None:
        with raises(error, *values, **fields):
            raise kind(text)

    expect(16, ("6", "mlp.up"), op="mlp.up", source="model.py", facts=["needed"], section="mesh-size")
    expect(fix="18")
    expect(fix=("pad", 18))
    for value in (1, 41.5, "mlp.u", "part", "model.py:4", ("6", 7)):
        with pytest.raises(AssertionError):
            expect(value)
    for field in (
        {"op": "mlp"},
        {"op": ""},
        {"source": "model.py:4"},
        {"facts": ["size"]},
        {"section": "nothing-fits"},
        {"fix": "6"},  # in the message, but not in the fix
        {"fix": ("pad", 1)},
    ):
        with pytest.raises(AssertionError):
            expect(**field)
    with pytest.raises(ValueError, match=said):
        expect(16, error=KeyError)
    with pytest.raises(pytest.fail.Exception), raises(ValueError):
        pass
