"""The state of training leaves emulated GPUs and comes back."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from emulated_gpu.cases import Case, batch, build, make_plan, small_models
from launch.gloo_ranks import RunRanks
from shardwise.runtime import host_copies, program_cache
from shardwise.runtime.agree import gather_values
from shardwise.runtime.generation import Generation, current
from shardwise.train.peers import PeerCopy, Peers

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def made(case: Case, plan: str) -> tuple[sw.Parallel, torch.optim.Optimizer]:
    given = sw.Plan.from_json(plan) if dist.get_rank() == 0 else None
    model = sw.parallelize(build(case.model), given, inputs="local", compile=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state(model: sw.Parallel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [t for p in model.parameters() for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers(), *kept)]


def part_of_batch(case: Case, number: int) -> dict[str, torch.Tensor]:
    return {name: x.chunk(2)[dist.get_rank()].cuda() for name, x in batch(case.model, number).items()}


def step_of(case: Case, number: int, model: sw.Parallel, optimizer: torch.optim.Optimizer) -> None:
    take_step(part_of_batch(case, number), model, optimizer)


def take_step(part: dict[str, torch.Tensor], model: sw.Parallel, optimizer: torch.optim.Optimizer) -> None:
    model.step(**part)
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(case: Case, plan: str, folder: str) -> tuple[list[str], bool, set[str]]:
    from emulated_gpu.device import record

    with small_models(program_cache):
        model, optimizer = made(case, plan)
        record.clear()
        for step in range(2):
            step_of(case, step, model, optimizer)
        saving = sw.save_checkpoint(Path(folder, "a"), model, optimizer, step=2, blocking=False)
        saved = state(model, optimizer)
        step_of(case, 2, model, optimizer)  # while the files are written
        saving.wait()
        sw.load_checkpoint(Path(folder, "a"), model, optimizer)
        devices = {v.device.type for p in model.parameters() for v in (p, optimizer.state[p]["exp_avg"])}
        pairs = zip(state(model, optimizer), saved, strict=True)
        return list(record.races), all(torch.equal(one, two) for one, two in pairs), devices


def test_a_checkpoint_is_saved_beside_a_step_and_loaded(run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    case = Case("llama", {"dp": 2}, {"zero": 3})
    for found in run_gpu_ranks(save_and_load, 2, case, make_plan(case).to_json(), str(tmp_path)):
        assert found == ([], True, {"cuda"})


# ------------------------------------------------------------------------------------------------ states kept in memory


def wait_for_step(step: int, memory: Path, is_local: bool) -> None:
    """Return once every rank has noted a step in ``memory``, which needs no further step."""
    store, until = Peers(PeerCopy(memory), is_local=is_local), time.monotonic() + 60
    while gather_values([state.step for state in store.whole_states()])[0][:1] != [step]:  # rank 0 finds them
        assert time.monotonic() < until, f"step {step} is not noted"


def keep(case: Case, plan: str, folder: str, between_machines: bool) -> Counter[str]:
    """Keep three steps, lose all ranks beside the fourth, and go on. Returns the waits of the host in the third."""
    from emulated_gpu.device import record

    memory = Path(folder, str(dist.get_rank()) if between_machines else "")
    peer_copy = PeerCopy(memory) if between_machines else None
    current.generation = None if between_machines else Generation(0, folder)
    with small_models(program_cache):
        model, optimizer = made(case, plan)
        recovery = sw.Recovery(model, optimizer, peer_copy=peer_copy)
        recovery.resume()
        record.clear()
        for step in range(1, 4):
            part, before = part_of_batch(case, step), record.waits.copy()
            take_step(part, model, optimizer)
            recovery.keep(step)
            waits = record.waits - before
        step_of(case, 4, model, optimizer)  # a rank is lost
        races = list(record.races)
        wait_for_step(3, memory if between_machines else memory / "steps", not between_machines)
        assert races == list(record.races) == []

        other, its_optimizer = made(case, plan)
        current.generation = None if between_machines else Generation(1, folder)
        again = sw.Recovery(other, its_optimizer, peer_copy=peer_copy)
        assert again.resume() == 3
        step_of(case, 4, other, its_optimizer)
        pairs = zip(state(other, its_optimizer), state(model, optimizer), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    return waits


@pytest.mark.parametrize("between_machines", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_state_is_kept_beside_the_next_step(between_machines: bool, run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    case = Case("llama", {"dp": 2}, {"zero": 1})
    for waits in run_gpu_ranks(keep, 2, case, make_plan(case).to_json(), str(tmp_path), between_machines):
        assert waits == Counter()


def keep_in_pageable_memory(case: Case, plan: str, folder: str) -> tuple[list[str], bool]:
    from emulated_gpu import device

    current.generation = Generation(0, folder)
    device.max_registered_bytes[0] = 0
    runtime = SimpleNamespace(cudaGetLastError=lambda: device.gpu.set_last_error(""))
    with (
        small_models(program_cache),
        mock.patch.object(host_copies, "gpu_runtime", return_value=runtime),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        model, optimizer = made(case, plan)
        recovery = sw.Recovery(model, optimizer)
        for step in range(1, 3):
            step_of(case, step, model, optimizer)
            recovery.keep(step)
        wait_for_step(2, Path(folder, "steps"), True)
        saved = state(model, optimizer)
        assert recovery.resume() == 2
        pairs = zip(state(model, optimizer), saved, strict=True)
        return [str(one.message) for one in said if "pinned" in str(one.message)], all(
            torch.equal(*pair) for pair in pairs
        )


@pytest.mark.long
def test_memory_that_cannot_be_pinned_is_announced_once(run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    case = Case("llama", {"dp": 2}, {"zero": 1})
    first, second = run_gpu_ranks(keep_in_pageable_memory, 2, case, make_plan(case).to_json(), str(tmp_path))
    (said,), is_equal = first
    assert "cannot be pinned (cudaHostRegister of" in said
    assert is_equal
    assert second == ([], True)


def run_out_of_memory(case: Case, plan: str) -> tuple[list[str], list[str]]:
    """The notes of an out-of-memory error without and with a history of the memory."""
    notes = []
    for is_recorded in (False, True):
        with (
            small_models(program_cache),
            mock.patch.object(torch._C, "_cuda_isHistoryEnabled", return_value=is_recorded, create=True),
            mock.patch.object(torch.cuda.memory, "_dump_snapshot") as dump,
        ):
            model, optimizer = made(case, plan)
            broken = mock.patch.object(
                program_cache.CallableStep, "__call__", side_effect=torch.OutOfMemoryError("full")
            )
            with broken, pytest.raises(torch.OutOfMemoryError) as raised:
                step_of(case, 1, model, optimizer)
            assert dump.called == is_recorded
            notes.append([*raised.value.__notes__])
    return notes[0], notes[1]


@pytest.mark.long
def test_an_error_without_memory_says_what_the_allocator_holds(run_gpu_ranks: RunRanks) -> None:
    case = Case("llama", {"dp": 1})
    ((without, recorded),) = run_gpu_ranks(run_out_of_memory, 1, case, make_plan(case).to_json())
    for first, _ in (without, recorded):
        assert "tensors take" in first
        assert "expandable_segments:True" in first
    assert "_record_memory_history" in without[1]
    assert "memory-of-rank-0.pickle" in recorded[1]
