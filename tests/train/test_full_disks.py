"""A disk that is full: a save fails on all ranks, training goes on, and the older checkpoint stays."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from train.runs import split, tools, train


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the model of these tests (80 KiB), and not for two."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fills(folder: str) -> dict[str, Any]:
    where = Path(folder)
    par = split("dp2")
    optimizer, scheduler = tools(par)

    def save(step: int, **how: Any) -> Any:
        return sw.save_checkpoint(where / f"step-{step}", par, optimizer, step=step, schedulers=scheduler, **how)

    def state() -> list[torch.Tensor]:
        kept = [t for p in par.parameters() for _, t in sorted(optimizer.state.get(p, {}).items())]
        return [t.detach().clone() for t in (*par.parameters(), *par.buffers(), *kept)]

    losses = train(par, optimizer, scheduler, 0, 2)
    save(2)
    held, found = state(), dict[str, Any]()
    with pytest.raises(sw.errors.CheckpointError) as error:
        save(3)
    found["waiting"] = str(error.value)
    losses += train(par, optimizer, scheduler, 2, 3)
    beside = save(4, blocking=False)
    losses += train(par, optimizer, scheduler, 3, 4)
    with pytest.raises(sw.errors.CheckpointError) as error:
        beside.wait()
    found["beside"] = str(error.value)
    with warnings.catch_warnings(record=True, action="always") as said:
        found["loaded"] = sw.load_checkpoint(where, par, optimizer, schedulers=scheduler).path.name
    found["said"] = [str(one.message) for one in said]
    assert all(map(torch.equal, held, state()))
    assert train(par, optimizer, scheduler, 2, 4) == losses[2:]
    dist.barrier()
    if dist.get_rank() == 0:
        for file in (where / "step-2").iterdir():
            file.unlink()
    dist.barrier()
    save(5)  # there is room again
    assert sw.load_checkpoint(where / "step-5", par, optimizer).step == 5
    found["left"] = sorted(path.name for path in where.glob("*/*.safetensors"))
    return found


def test_a_full_disk_costs_the_save_and_nothing_else(run_ranks: RunRanks, small_disk: Path) -> None:
    for rank, found in enumerate(run_ranks(fills, 2, str(small_disk))):
        for kind in ("waiting", "beside"):
            assert "was not saved: rank " in found[kind]
            assert "no space" in found[kind].lower()
            assert "earlier checkpoints are unchanged, and training can go on" in found[kind]
        assert found["loaded"] == "step-2"
        assert any("the previous save failed" in text for text in found["said"]) == (rank == 0)
        assert any("step-4.incomplete is skipped" in text for text in found["said"]) == (rank == 0)
        assert len(found["left"]) == 2  # of step 5, one of each rank: what failed gave its room back
