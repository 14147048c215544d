"""Copies of the state on other machines: a machine is lost with its memory, and training goes on bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.errors import PlanWarning, ShardwiseError
from shardwise.train.checkpoints import assign_writers
from shardwise.train.parts import random_part, state_of
from shardwise.train.peers import Mirrored, Peers, assign_keepers
from shardwise.train.sharing import Writers
from train.elastic_run import data
from train.runs import batch, make

HOW: dict[str, dict[str, Any]] = {"zero": {"zero": 1}, "zero3": {"zero": 3}}
STEPS = 10


def planned(num_ranks: int, **how: Any) -> sw.Plan | None:
    """Rank 0's plan."""
    if dist.get_rank():
        return None
    return sw.plan(make(), batch(0), num_ranks, search="sharding_propagation", mesh=sw.Mesh(dp=num_ranks), **how)


def trained(folder: str, kind: str, every: int, kill: tuple[int, int]) -> None:
    """A run of a rank that is a machine of its own. ``kill``: ahead of which step which rank is. Every rank writes its
    state down at the end."""
    rank = dist.get_rank()
    with warnings.catch_warnings(action="ignore"):  # batch norm in parts of a batch: not what is tested here
        par = sw.parallelize(make(), planned(3, **HOW[kind]), seed=7)
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.01)
    loader = sw.DataLoader(data(), par, 12, seed=5)
    memory = Path(folder, f"machine-{rank}")
    recovery = sw.Recovery(par, optimizer, data=loader, peer_copy=sw.PeerCopy(memory, every))
    step = recovery.resume()
    if rank == 0:
        with Path(folder, "begun").open("a") as file:
            file.write(f"{step} {recovery.extra}\n")
    while step < STEPS:
        for own in loader:
            if (step + 1, rank) == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            par.step(*own)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            recovery.keep(step, extra={"at": step})
            if step == STEPS:
                break
    states = {name: optimizer.state[p] for name, p in par.named_parameters()}
    torch.save([dict(par.state_dict()), states, loader.state_dict()], Path(folder, f"state-rank{rank}"))


def check_equal(folder: Path, whole: Path) -> None:
    """Bit for bit: parameters, buffers, optimizer states and place in the data, on every rank."""
    for rank in range(3):
        (own, states, place), (wanted, others, there) = (
            torch.load(where / f"state-rank{rank}", weights_only=True) for where in (folder, whole)
        )
        assert place == there
        assert all(torch.equal(own[name], wanted[name]) for name in wanted)
        assert states.keys() == others.keys()
        assert all(torch.equal(v, others[name][key]) for name, kept in states.items() for key, v in kept.items())


@pytest.mark.parametrize(("kind", "every", "back"), [("zero", 1, 6), ("zero3", 3, 3)])
@pytest.mark.sampled(1)
def test_a_machine_is_lost_with_its_memory(
    run_ranks: RunRanks, tmp_path: Path, kind: str, every: int, back: int
) -> None:
    """Rank 1 is killed ahead of step 8. The copies of step 7 were under way, or not due: those before count."""
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    whole.mkdir()
    lost.mkdir()
    run_ranks(trained, 3, str(whole), kind, every, (0, 0))
    with raises(RuntimeError, "rank 1 died"):
        run_ranks(trained, 3, str(lost), kind, every, (8, 1))
    shutil.rmtree(lost / "machine-1")
    run_ranks(trained, 3, str(lost), kind, every, (0, 0))
    begun = [line.split(" ", 1) for line in (lost / "begun").read_text().splitlines()]
    assert begun[0] == ["0", "None"]
    assert int(begun[1][0]) in (back, back + every)
    assert begun[1][1] == f"{{'at': {begun[1][0]}}}"
    check_equal(lost, whole)


def _mirrors(writers: Writers, machine_of: list[int]) -> list[Mirrored]:
    """Return the files of all writers, which their keepers know as well."""
    of_ranks = [assign_keepers(writers, machine_of, rank) for rank in range(len(machine_of))]
    written = [mirror for rank, of in enumerate(of_ranks) for mirror in of if mirror.writer == rank]
    kept = [mirror for rank, of in enumerate(of_ranks) for mirror in of if mirror.keeper == rank]
    assert sorted(written, key=str) == sorted(kept, key=str)
    return written


def shares(folder: str) -> list[list[tuple[int, int, bool, int]]]:
    """(writer, keeper, whether it is sent, bytes) of every file, with copies everywhere and with parts."""
    found = []
    for how in ({}, {"zero": 1}):
        with warnings.catch_warnings(action="ignore"):
            par = sw.parallelize(make(), planned(3, **how), seed=7)
        optimizer = torch.optim.AdamW(par.parameters())
        par.step(*batch(0))
        optimizer.step()
        every = assign_writers(state_of(par, [optimizer], dist.get_rank()))
        files = _mirrors(every.writers, [0, 1, 2])
        found.append([(one.writer, one.keeper, one.is_sent, one.file.num_bytes) for one in files])
        together = _mirrors(every.writers, [0, 0, 2])
        assert all({0: 0, 1: 0, 2: 2}[one.writer] != {0: 0, 1: 0, 2: 2}[one.keeper] for one in together)
        assert sum(one.file.num_bytes for one in together) == sum(one.file.num_bytes for one in files)
    return found


def test_what_others_hold_is_not_sent(run_ranks: RunRanks, tmp_path: Path) -> None:
    for copies, parts in run_ranks(shares, 3, str(tmp_path)):
        sent = [sum(size for *_, is_sent, size in files if is_sent) for files in (copies, parts)]
        whole = [sum(size for *_, size in files) for files in (copies, parts)]
        assert sent[0] == 3 * random_part().tensor.nbytes, "states of generators alone: every rank has its own"
        assert sent[1] > 0.4 * whole[1], "two of three parts of what is stored are states of the optimizer"
        assert all(writer != keeper for writer, keeper, *_ in (*copies, *parts))
        assert all(keeper == (writer + 1) % 3 for writer, keeper, is_sent, _ in parts if is_sent)


def torn(folder: str) -> list[int]:
    """The steps that are found: none, all, with torn notes of one machine, and with another one lost besides."""
    rank, model = dist.get_rank(), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    where = Path(folder, f"machine-{rank}")

    def recovery() -> sw.Recovery:
        return sw.Recovery(model, optimizer, peer_copy=sw.PeerCopy(where))

    def keep(own: sw.Recovery, steps: range) -> None:
        for step in steps:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            own.keep(step)

    own = recovery()
    found = [own.resume()]
    keep(own, range(1, 4))
    with mock.patch.object(Peers, "_transfer"):
        keep(own, range(4, 5))
    dist.barrier()
    found.append(recovery().resume())  # its copies were still under way, and no machine is lost
    dist.barrier()
    if rank == 0:
        for note in where.glob("*/*.note"):
            note.write_text('{"step": 3')
    dist.barrier()
    found.append(recovery().resume())  # others have what this machine cannot say; copies of step 4 never came
    dist.barrier()
    shutil.rmtree(where) if rank == 1 else None
    dist.barrier()
    found.append(recovery().resume())
    own = recovery()
    own.resume()
    with warnings.catch_warnings(record=True, action="always") as caught, mock.patch("os.posix_fallocate") as allocate:
        allocate.side_effect = OSError(28, "No space left on device") if rank == 1 else None
        keep(own, range(1, 4))
    said = [str(one.message) for one in caught if one.category is PlanWarning]
    assert len(said) == (rank == 0)
    assert all("no other machine keeps copies of the state any more ([Errno 28] No space" in text for text in said)
    return found


def test_torn_copies_count_for_nothing_and_a_full_memory_is_announced(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(torn, 3, str(tmp_path)) == [[0, 4, 3, 0]] * 3


def with_a_trainer(folder: str) -> tuple[list[int], bool]:
    """How many steps Trainers make until 3 and 5 are done, and until 5 at once; whether these end in the same bits."""
    made, ends = [], []
    for num_steps, where in ((3, "one"), (5, "one"), (5, "other")):
        with warnings.catch_warnings(action="ignore"):
            par = sw.parallelize(make(), planned(2, zero=1), seed=7)
        optimizer, loader = torch.optim.AdamW(par.parameters()), sw.DataLoader(data(), par, 12, seed=5)
        copies = sw.PeerCopy(Path(folder, f"{where}-{dist.get_rank()}"))
        trainer = sw.Trainer(par, optimizer, loader, peer_copy=copies, progress=False)
        with mock.patch.object(sw.Parallel, "step", autospec=True, side_effect=sw.Parallel.step) as step:
            trainer.fit(num_steps)
        made.append(step.call_count)
        ends.append([*par.state_dict().values()])
    return made, all(torch.equal(a, b) for a, b in zip(ends[1], ends[2], strict=True))


def test_a_trainer_goes_on_from_copies(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(with_a_trainer, 2, str(tmp_path)) == [([3, 2, 5], True)] * 2


def in_folder(folder: str) -> str:
    """What all ranks say where one is given a folder that others may have made, or write to."""
    said = []
    for name in ("link", "open", "fifo"):
        where = Path(folder, f"{name if dist.get_rank() == 1 else 'mine'}-{dist.get_rank()}")
        try:
            Peers(sw.PeerCopy(where))
        except ShardwiseError as error:
            said.append(str(error))
    return "\n".join(said)


def test_copies_are_kept_in_a_folder_of_the_user_only(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    os.symlink(tmp_path / "elsewhere", tmp_path / "link-1")
    (tmp_path / "open-1").mkdir()
    (tmp_path / "open-1").chmod(0o777)
    os.mkfifo(tmp_path / "fifo-1")
    for said in run_ranks(in_folder, 2, str(tmp_path)):
        assert said.count("not a folder that only this user writes to") == 2
        assert "File exists" in said
        assert said.count("copies of the state cannot be kept in") == 3
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "mine-0").stat().st_mode & 0o777 == 0o700


def test_one_rank_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with raises(ShardwiseError, "peer_copy="):
        Peers(sw.PeerCopy(tmp_path))
    with raises(ShardwiseError, "every", "1 or more", "0"):
        sw.PeerCopy(tmp_path, every=0)


def test_a_note_that_cannot_be_deleted_stops_no_run(tmp_path: Path) -> None:
    store = Peers(sw.PeerCopy(tmp_path), is_local=True)
    for number, step in enumerate((3, 5, 6)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a-0.note").write_text(f'{{"step": {step}}}')
    unlink = Path.unlink

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "1":
            raise PermissionError(path)
        unlink(path, missing_ok)

    with mock.patch.object(Path, "unlink", unlink_some):
        store.forget_after(4)
    assert sorted(path.parent.name for path in tmp_path.glob("*/*.note")) == ["0", "1"]


def test_a_damaged_description_is_named_and_its_file_left_out(tmp_path: Path) -> None:
    peers, kept = object.__new__(Peers), mock.Mock(step=3, number=0, slot=1)
    peers.memory = tmp_path
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "shard.json").write_text("{")
    with (
        mock.patch.object(Peers, "_notes", return_value=[(0, 1, "shard", 3)]),
        pytest.warns(PlanWarning, match=r"shard\.json describes is not taken from here: "),
    ):
        assert peers.parts(kept) == {}
