"""Fifteen programs on the usual topics of tutorials, on several ranks: losses, scores and trained parameters are those
of one process. They compute in float32, as their authors wrote them: sums in another order differ in the seventh digit,
which a few steps of an adaptive optimizer carry to the fifth.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise.mindspore as ms
from mindspore.test_tutorials import cifar, digits, program

RunRanks = Callable[..., list[Any]]
# Those that feed every rank its rows return the losses of these; the others those of the whole batch.
BY_ROWS = ("lenet", "bert_loss_scale", "wide_deep", "training_cell", "functional_loop", "text_classifier",
           "lstm_sentences", "amp_o2", "finetune")  # fmt: skip
SHORT = ("wide_deep", "dlrm", "training_cell", "fit_callbacks", "text_classifier", "resnet_stages")
ALL = (
    *SHORT, "lenet", "resnet_cifar", "bert_loss_scale", "gpt_loss_scale", "transformer_pipeline", "finetune",
    "own_bprop", "amp_o2", "functional_loop", "lstm_sentences", "evaluate_export", "gpt_parallel",
)  # fmt: skip


def _run(name: str, folder: str) -> dict[str, Any]:
    """The losses of a program, and whatever else is the same on all ranks."""
    own = f"{folder}/of {ms.communication.get_group_size()}" if torch.distributed.is_initialized() else f"{folder}/of 1"
    if name == "transformer_pipeline":
        return {"losses": program(name).pretrain(own)}
    if name == "finetune":  # from the files that transformer_pipeline has left
        losses, parameters = program("transformer_pipeline").finetune(own)
        return {"losses": losses, "parameters": list(parameters.values())}
    if name == "resnet_stages":
        return {"losses": program("resnet_cifar").staged()}
    if name == "amp_o2":
        return {"losses": program("amp_resnet").train_rows(folder)}
    if name == "evaluate_export":
        return {"losses": [], "scores": list(program(name).train(folder).values())}
    if name == "lenet":
        history, net = program(name).main(folder)
        parameters = [p.asnumpy() for p in net.get_parameters()]
        return {"losses": [], "scores": history.history["eval_loss"], "parameters": parameters}
    module = program(name)
    takes_folder = name in ("resnet_cifar", "fit_callbacks", "functional_loop", "lstm_sentences")
    result = module.main(folder) if takes_folder else module.main()
    result = result if isinstance(result, tuple) else (result,)
    found: dict[str, Any] = {"losses": result[0]}
    if name in ("dlrm", "gpt_loss_scale"):
        found["scores"] = result[1]
    elif name in ("wide_deep", "training_cell"):
        found["parameters"] = result[1]
    elif name in ("fit_callbacks", "text_classifier"):
        found["scores"], found["parameters"] = result[1:]
    elif name == "functional_loop":
        found["scores"] = result[2]
    elif name == "lstm_sentences":
        found["scores"] = list(result[1].values())
    return found


def _programs(folder: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        ms.reset_auto_parallel_context()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # files of the program before
        with redirect_stdout(io.StringIO()):
            found[name] = _run(name, folder)
    return found


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """In this process, which talks to nobody afterwards, as before."""
    try:
        return function(*args)
    finally:
        ms.reset_auto_parallel_context()
        if torch.distributed.is_initialized():
            ms.communication.release()


def _compare(one: dict[str, dict[str, Any]], ranks: list[dict[str, dict[str, Any]]]) -> None:
    for name, want in one.items():
        losses = [rank[name]["losses"] for rank in ranks]
        if name in BY_ROWS:
            losses = [np.mean(losses, 0)]
        for own in losses:
            np.testing.assert_allclose(own, want["losses"], rtol=1e-4, err_msg=name)
        for rank in ranks:
            np.testing.assert_allclose(rank[name].get("scores", []), want.get("scores", []), rtol=1e-4, atol=1e-6,
                                       err_msg=name)  # fmt: skip
            for own, other in zip(rank[name].get("parameters", []), want.get("parameters", []), strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-3, atol=3e-5, err_msg=name)


def test_programs_on_two_ranks_are_those_of_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    one = alone(_programs, str(tmp_path), SHORT)
    assert len(one["fit_callbacks"]["losses"]) == 3
    assert one["dlrm"]["losses"][-1] < one["dlrm"]["losses"][0]
    assert one["resnet_stages"]["losses"][-1] != one["resnet_stages"]["losses"][0]
    _compare(one, run_ranks(_programs, 2, str(tmp_path), SHORT, time_limit_seconds=240))


@pytest.mark.long
def test_fifteen_programs_on_eight_ranks_are_those_of_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    digits(tmp_path)
    cifar(tmp_path)
    one = alone(_programs, str(tmp_path), ALL)
    assert len({*ALL} - {"gpt_parallel"}) >= 15
    assert one["resnet_cifar"]["losses"][-1] < one["resnet_cifar"]["losses"][0]
    assert one["gpt_loss_scale"]["scores"] == [4096, 4096, 4096, 8192]  # it grows after three good steps
    _compare(one, run_ranks(_programs, 8, str(tmp_path), ALL, time_limit_seconds=580))
    judge = program("evaluate_export").judge
    for whole, joined in zip(judge(str(tmp_path), 1), judge(str(tmp_path), 8), strict=True):
        np.testing.assert_allclose(joined, whole, rtol=1e-4, atol=1e-6)
