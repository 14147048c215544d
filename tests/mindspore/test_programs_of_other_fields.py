"""Programs from other fields than language models, as their authors write them: segmentation with a loss and a metric
of their own, translation with a scaled loss, and learning from rewards. On ranks they are those of one process.

They compute in float32: sums in another order differ in the seventh digit, which three steps of Adam carry to the
fifth.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest

import shardwise.mindspore as ms
from mindspore.test_programs_that_people_bring import RunRanks, alone
from mindspore.test_tutorials import program

MODES = {"unet_dice": "semi", "seq2seq_attention": "data_parallel", "dqn_actor_critic": "data_parallel"}


def _run(mode: str | None, *names: str) -> list[Any]:
    """What the programs return: losses, or losses and something else."""
    found = []
    for name in names:
        ms.reset_auto_parallel_context()
        with redirect_stdout(io.StringIO()):
            found.append(program(name).main(mode))
    return found


def _same(name: str, ranks: int, run_ranks: RunRanks) -> None:
    [(want, rest)] = alone(_run, None, name)
    assert len(set(want)) == len(want) >= 3  # every step changes the loss
    found = [own for (own,) in run_ranks(_run, ranks, MODES[name], name, time_limit_seconds=240)]
    np.testing.assert_allclose(np.mean([losses for losses, _ in found], 0), want, rtol=1e-4, err_msg=name)
    if name != "unet_dice":  # its parameters lie on the ranks in parts; the others return their sums
        for _, own in found:
            np.testing.assert_allclose(own, rest, rtol=1e-4, err_msg=name)


def test_translation_on_two_ranks_is_that_of_one_process(run_ranks: RunRanks) -> None:
    _same("seq2seq_attention", 2, run_ranks)


@pytest.mark.long
@pytest.mark.parametrize("name", MODES)
def test_programs_on_four_ranks_are_those_of_one_process(name: str, run_ranks: RunRanks) -> None:
    _same(name, 4, run_ranks)


SPLIT = (
    "lstm_crf", "ssd_head", "double_dqn", "bert_classifier", "speech_ctc", "super_resolution", "graph_attention",
)  # fmt: skip


@pytest.mark.long
def test_split_programs_on_two_ranks_are_those_of_one_process(run_ranks: RunRanks) -> None:
    want = _run(None, *SPLIT)
    for rank in run_ranks(_run, 2, "semi_auto_parallel", *SPLIT, time_limit_seconds=300):
        for name, own, other in zip(SPLIT, rank, want, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, err_msg=name)
