"""Training on emulated GPUs: every number is that of one device, nothing races, and the host blocks as often as stated.

The races are those between streams, the allocator and pinned memory (``gpu.cpp``). The waits of a step are those of the
optimizer too, and there are none but where stated: replicas are compared on the host (two texts per rank), and the host
looks rows of its own table up by indices that the device has. A kernel between devices is refused by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from emulated_gpu.cases import BATCH, TOLERANCE, Case, make_plan, train_all, train_alone, waits_of, worst_error
from launch.gloo_ranks import RunRanks

READ, WRITE = "copy device to host (pageable)", "copy host to device (pageable)"


def staged(model: str, schedule: str, stages: int, axes: Mapping[str, int], **plan: Any) -> Case:
    """A pipeline of four micro-batches over two or four ranks; ``axes``: of a stage."""
    choices = {"stages": stages, "schedule": schedule, "micro_batch": 2, "search": "sharding_propagation", **plan}
    ranks = sw.Mesh(**axes).num_devices * (stages if schedule in ("GPipe", "1F1B") else stages // 2)
    return Case(model, {"pp": ranks}, {"mesh": sw.Mesh(**axes), **choices}, split=axes.get("tp", 1) > 1)


CORE: dict[str, Case] = {
    "llama, zero 3": Case("llama", {"dp": 2}, {"zero": 3}),
    "gpt2, offload": Case("gpt2", {"dp": 1, "tp": 2}, {"offload": "all"}, split=True),
    "llama, rows in chunks": Case("llama of one layer", {"dp": 1, "tp": 2}, {"row_chunks": 2}, split=True),
    "gpt2, 1F1B": staged("gpt2", "1F1B", 2, {"dp": 1}),
}
MICRO_BATCHES = {"global_batch": BATCH, "micro_batch": 2}
TABLE = ("model.transformer.wpe.weight",)
ON_TWO: dict[str, Case] = {
    "gpt2, tp": Case("gpt2", {"dp": 1, "tp": 2}, split=True),
    "vit, zero 1, clipped": Case("vit", {"dp": 2}, {"zero": 1}, clip=0.1),
    "gpt2, states on the host": Case("gpt2", {"dp": 2}, {"zero": 2}, optimizer="adamw on host"),
    "llama, zero 3, recomputed": Case("llama", {"dp": 2}, {"zero": 3, "recompute": "full"}),
    "llama, local inputs": Case("llama", {"dp": 2}, {"zero": 2}, {"inputs": "local"}),
    "llama, compiled where it can be": Case("llama", {"dp": 2}, {}, {"compile": "auto"}),
    "gpt2, micro-batches": Case("gpt2", {"dp": 2}, MICRO_BATCHES),
    "llama, replicas compared": Case("llama", {"dp": 2}, {}, {"check_replicas": 1}, waits={READ: 2}),
    "gpt2, inputs on the host": Case("gpt2", {"dp": 2}, {"zero": 3}, host_inputs=True),
    "gpt2, a table on the host": Case("gpt2", {"dp": 2}, {}, {"host": TABLE}, waits={READ: 3, WRITE: 1}),
}
EXPERTS = {"model.model.layers.*.mlp.experts": "e@ep"}
# What the host must know of the router's choice in each of two layers: how many rows travel and, since grouped products
# in float64 are a product per expert, where the rows of each end, forward and twice backward.
BY_ROUTER = {"event": 2, "aten::repeat_interleave.Tensor": 2, READ: 12}
ON_FOUR: dict[str, Case] = {
    "llama, tp, zero 3": Case("llama", {"dp": 2, "tp": 2}, {"zero": 3}, split=True),
    "mixtral, exchanged experts": Case("mixtral", {"dp": 2, "ep": 2}, {"strategies": EXPERTS}, waits=BY_ROUTER),
    "mixtral, experts in chunks": Case(
        "mixtral",
        {"dp": 2, "ep": 2},
        {"strategies": EXPERTS, "row_chunks": 2},
        waits={kind: 2 * count for kind, count in BY_ROUTER.items()},  # of each half
    ),
    "ring": Case("ring", {"dp": 2, "cp": 2}, {"search": "sharding_propagation"}),
    "llama, compiled": Case("llama", {"dp": 2, "tp": 2}, {"zero": 3}, {"compile": True}, split=True),
}

PIPELINES: dict[str, Case] = {
    "GPipe": staged("llama", "GPipe", 2, {"dp": 1}),
    "interleaved": staged("llama", "Interleaved1F1B", 4, {"dp": 1}),
    "ZBV": staged("llama", "ZBVZeroBubble", 4, {"dp": 1}),
    "DualPipeV": staged("gpt2", "DualPipeV", 4, {"dp": 1}),
    "1F1B of four": staged("gpt2", "1F1B", 4, {"dp": 1}),
    "interleaved over four": staged("llama", "Interleaved1F1B", 8, {"dp": 1}),
    "ZBV over four": staged("llama", "ZBVZeroBubble", 8, {"dp": 1}),
    "1F1B, zero 3": staged("llama", "1F1B", 2, {"dp": 2}, zero=3),
    "interleaved, zero 1": staged("llama", "Interleaved1F1B", 4, {"dp": 2}, zero=1),
    "ZBV, tp": staged("llama", "ZBVZeroBubble", 4, {"tp": 2}),
    "1F1B, tp, recomputed": staged("gpt2", "1F1B", 2, {"tp": 2}, recompute="full"),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def planned(cases: Mapping[str, Case]) -> dict[str, tuple[Case, str]]:
    return {name: (case, make_plan(case).to_json()) for name, case in cases.items()}


def check(cases: Mapping[str, Case], results: list[dict[str, Any]]) -> None:
    for name, case in cases.items():
        alone = train_alone(case.model, case.optimizer.split()[0], case.clip)
        for rank, of_rank in enumerate(results):
            trained, where = of_rank[name], f"{name}, rank {rank}"
            assert trained.races == [], where
            assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE), where
            assert worst_error(trained, alone) < TOLERANCE, where
            assert waits_of(trained) == [dict(case.waits)] * 2, f"{where}: {trained.waits}"


def test_training_is_that_of_one_device_without_races(run_gpu_ranks: RunRanks) -> None:
    check(CORE, run_gpu_ranks(train_all, 2, planned(CORE)))


@pytest.mark.long
@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR, *PIPELINES])
def test_so_is_every_other_plan(name: str, run_gpu_ranks: RunRanks) -> None:
    case = (ON_TWO | ON_FOUR | PIPELINES)[name]
    check({name: case}, run_gpu_ranks(train_all, case.ranks, planned({name: case})))


def train_wrongly(cases: dict[str, tuple[Case, str]]) -> dict[str, list[str]]:
    """The races that each mutant of the runtime makes."""
    from emulated_gpu.device import Event, Stream, record
    from shardwise.runtime import host_copies, messages

    def on_the_wrong_stream(stream: Stream) -> Event:
        event = Event()
        event.record(Stream(number=0))
        return event

    # (what is replaced, its name, by what, the case)
    mutants: dict[str, tuple[Any, str, Any, str]] = {
        "a wait": (messages.CollectiveMessage, "finish", lambda *_: None, "llama, zero 3"),
        "an event": (torch.cuda.Stream, "record_event", on_the_wrong_stream, "gpt2, offload"),
        "a buffer": (host_copies.WaitForCopy, "forward", lambda *_: None, "gpt2, offload"),
    }
    found = {}
    for name, (owner, attribute, by, case) in mutants.items():
        with mock.patch.object(owner, attribute, by):
            train_all({case: cases[case]})
        found[name] = list(record.races)
    return found


def test_mutants_of_the_runtime_are_found(run_gpu_ranks: RunRanks) -> None:
    for found in run_gpu_ranks(train_wrongly, 2, planned(CORE)):
        assert any("wrote, without waiting for it" in race for race in found["a wait"]), found
        assert any("copy host to device" in race and "wrote" in race for race in found["an event"]), found
        assert any("is freed while copy device to host" in race for race in found["a buffer"]), found
