"""Errors carry the parts of their message as attributes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import shardwise as sw
from shardwise.errors import problem


@pytest.mark.parametrize("through", [lambda e: e, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_has_the_parts_of_its_message(through: Callable[[sw.CollectiveError], sw.CollectiveError]) -> None:
    text = problem("cannot shard dim 1", op="mlp.up", source="model.py:41", fix="pad it", facts=[("size", "30")])
    error = through(sw.CollectiveError(pickle.loads(pickle.dumps(text)), blames=[3]))
    assert (error.what, error.op, error.source, error.fix) == ("cannot shard dim 1", "mlp.up", "model.py:41", "pad it")
    assert error.facts == (("size", "30"),)
    assert error.blames == (3,)
    assert str(error) == str(text)


def test_an_error_of_a_plain_text_says_what_only() -> None:
    error = sw.ShardwiseError("no such cluster")
    assert (error.what, error.op, error.source, error.fix, error.facts) == ("no such cluster", "", "", "", ())
