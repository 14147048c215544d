"""The start of a job of any size, from the launchers to the first step: what ranks agree on, groups, the manifest.

The ranks do what ``init_ranks``, ``parallelize`` and ``load_checkpoint`` let them do together, with the real code of
the tree of ranks, of rank 0's results, of groups and of a manifest in parts. Communicators are NCCL's: one split for
each set of axes. What a rank computes by itself, and the bytes of its state, take no time here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from shardwise.layouts.boxes import Box
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.runtime import agree, communicator
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.rank_tree import RankValues
from shardwise.train import manifest
from shardwise.train.files import CheckpointReader
from shardwise.train.manifest import Chunk, DataFile, Manifest, StoredTensor
from shardwise.train.names import FILE
from shardwise.train.saving import _FANOUT, _ranks_below
from shardwise.train.values import DTYPES
from simulated_job.simulated_machines import RankHere
from simulated_job.simulated_ranks import guarded, take_faults, tracker_of
from simulated_job.simulated_training import RankState, SimulatedTraining, Training

_SPLIT_SECONDS = 0.5  # of NCCL, on top of its messages


@dataclass(frozen=True)
class Start:
    """What is done at the start. ``capture_seconds``, ``program_bytes``: of rank 0, and of what it sends to all; of a
    model of 32 blocks the two are about 20 s and 10 MB. ``file_seconds``, ``folder_bytes_per_second``: for each request
    of the metadata server that all share (100,000 a second), and from all its servers together. ``look_seconds``:
    between looks of launchers at their ranks, which nothing in a start depends on: 0.05 takes a third more time."""

    mesh: Mesh
    training: Training
    num_tensors: int = 4
    capture_seconds: float = 20.0
    program_bytes: float = 1e7
    file_seconds: float = 1e-5
    folder_bytes_per_second: float = 5e10
    look_seconds: float = 0.5


class SimulatedStart(SimulatedTraining):
    """``began``: by what was done, when the last rank had finished it, in simulated seconds."""

    def __init__(self, worlds: Any, start: Start) -> None:
        super().__init__(worlds, start.training)
        self.start, self.began = start, dict[str, float]()
        self.cluster.look_seconds = start.look_seconds
        self.place = Placement.whole(start.mesh)
        self.texts = manifest_of(self.place, start.num_tensors)
        self._served = 0.0

    def _train(self, process: RankHere) -> None:
        simulation, start = self.simulation, self.start
        simulation.sleep(1.0)
        world = self.worlds.join(process)
        state = RankState(process, world, None, tracker_of(process))  # type: ignore[arg-type]
        state.world_group.bound_device_id = "cuda"
        self.states[process] = state
        self._done("met")
        assert agree.gather_values("digest of the plan")[0] == "digest of the plan"
        agree.from_rank_zero(lambda: "what is checked, and what stays on the host")
        agree.gather_values(("fingerprints of initial values", None, 0))
        agree.from_rank_zero(lambda: _compute(simulation, start.capture_seconds))
        self._done("programs")
        ranks = Communicator(self.place)
        ranks.create_groups([start.mesh.expand(axis) for axis, _ in start.mesh.axes])
        self._done("groups")
        agree.from_rank_zero(lambda: ["step-8"])  # the checkpoint to load
        folder: Any = _Folder(self)
        reader = CheckpointReader(folder, manifest.read_manifest(folder))
        box = Box((process.rank, 0), (1, 1024), (0, 0))  # its part of tensors that all ranks divide
        reader._read_parts([(name, [box]) for name in reader.manifest.tensors if name.startswith("w")])
        reader.random_of(process.rank)
        found = sum(
            common.numel for chunk in reader.manifest.tensors["w0"].chunks
            if (common := box.common(chunk.offsets, chunk.sizes)) is not None
        )  # fmt: skip
        assert found == box.numel, "the parts that were read have all of it"
        for value in (None, None, ([], [])):  # faults of a rank, and what no rank has
            agree.gather_values(value)
        self._done("manifest")
        for step in range(1, self.training.num_steps + 1):
            simulation.sleep(self.training.step_seconds)
            take_faults(process)
            world.meet(process)
            state.tracker.step_done(step)
            self.worlds.step = max(self.worlds.step, step)
            self._done("first step")

    def _done(self, what: str) -> None:
        if what != "first step" or what not in self.began:
            self.began[what] = self.simulation.now

    def read(self, name: str) -> str:
        """Return a file, once the servers have answered."""
        simulation, start = self.simulation, self.start
        simulation.count("file operations")
        simulation.count("bytes read", len(self.texts[name]))
        seconds = start.file_seconds + len(self.texts[name]) / start.folder_bytes_per_second
        self._served = max(self._served, simulation.clock()) + seconds
        simulation.sleep(self._served + self.training.store_seconds - simulation.clock())
        return self.texts[name]

    def check_saves(self) -> int:
        return 0

    def script(self, process: RankHere) -> None:
        guarded(process, lambda: self._train(process))

    def _distributed(self) -> SimpleNamespace:
        whole, here, simulation = super()._distributed(), lambda: self.here, self.simulation
        network = self.cluster.wire.network

        def split_group(split_ranks: Any, timeout: Any, pg_options: Any) -> Any:
            simulation.count("splits")
            world = here().world
            world.meet(here().process, None, (), 2 * math.log2(world.size), "world")
            simulation.sleep(_SPLIT_SECONDS)
            return split_ranks[0]

        def broadcast_object_list(box: list[Any], src: int = 0, group: Any = None) -> None:
            world, hops = here().world, math.log2(here().world.size)
            num_bytes = self.start.program_bytes if len(box[0] or b"") > _LARGE else 1e3
            simulation.count("rank messages", round(2 * hops))
            seconds = hops * (2 * network.latency_seconds + num_bytes / network.bytes_per_second)
            values = world.meet(here().process, box, (), seconds / network.latency_seconds, "world")
            box[:] = values[src]

        whole.split_group, whole.broadcast_object_list = split_group, broadcast_object_list
        whole.get_backend = lambda group=None: "nccl"
        whole.distributed_c10d._world = SimpleNamespace(group_count=0)
        return whole

    def replaced(self) -> list[tuple[Any, str, Any]]:
        both = super().replaced()
        dist = next(new for module, name, new in both if module is agree and name == "dist")
        timeout = next(new for module, name, new in both if module is agree and name == "group_timeout")
        # Ranks read the same texts and receive the same bytes. Each would compute from them what others have computed.
        parse, unpacked = (lru_cache(4096)(of) for of in (manifest.parse_manifest, RankValues.unpacked))
        return [
            *both, (communicator, "dist", dist), (communicator, "group_timeout", timeout),
            (manifest, "parse_manifest", parse), (RankValues, "unpacked", staticmethod(unpacked)),
        ]  # fmt: skip


_LARGE = 10_000


def _compute(simulation: Any, seconds: float) -> str:
    simulation.sleep(seconds)
    return "a program" * _LARGE


class _Folder:
    """What ``read_manifest`` sees of a checkpoint."""

    renames = True

    def __init__(self, simulated: SimulatedStart) -> None:
        self.read = simulated.read

    def __truediv__(self, name: str) -> str:
        return name


def manifest_of(place: Placement, num_tensors: int) -> Mapping[str, str]:
    """Return the manifest of a checkpoint of tensors that all ranks divide, and its parts, by file."""
    num_ranks, texts = len(place.ranks), dict[str, str]()
    names = [f"w{number}" for number in range(num_tensors)]
    shape = (num_ranks, 1024)

    def of_rank(rank: int) -> Manifest:
        file, note = f"shard-{rank:05}.safetensors", Manifest(num_ranks=num_ranks, tensors={})
        tensors = {
            name: StoredTensor(DTYPES["float32"], shape, (Chunk(file, 4096 * at, (rank, 0), (1, 1024)),))
            for at, name in enumerate(names)
        }
        random = StoredTensor(DTYPES["uint8"], (64,), (Chunk(file, 4096 * num_tensors, (0,), (64,)),))
        size = 4096 * num_tensors + 64
        data = DataFile(64, size, "00000000" * -(-size // note.block_bytes))
        own = Manifest(num_ranks=num_ranks, files={file: data}, tensors={**tensors, f"random.{rank}": random})
        parts = {}
        for below in _ranks_below(rank, num_ranks):
            whole = of_rank(below)
            if below % _FANOUT:
                own = own.with_parts({"": whole})
            else:
                texts[f"part-{below}-0.json"] = whole.to_text()
                parts[f"part-{below}-0.json"] = whole.covers()
        return Manifest(num_ranks=num_ranks, files=own.files, tensors=own.tensors, parts=parts)

    root = of_rank(0)
    root.check_whole()
    return {**texts, FILE: root.to_text()}
