"""Check in every training call that ranks which each pass the whole batch pass the same one.

A program takes its part of the inputs from its own rank. Ranks with different batches would train on a mixture of them
without any collective differing. Every rank therefore sends the others a digest of all elements of its inputs. The
message overlaps with the call and is read at the start of the next one. For inputs on a GPU the digest is computed and
copied to the host behind the kernels of the call. It is sent at the start of the next call. A difference is then found
one call later, and the host never waits for the kernels of the current call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, name_ranks
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.runtime.agree import gather_objects
from shardwise.runtime.communicator import Communicator, GatheredRows
from shardwise.runtime.host_copies import CopyInFlight, host_memory, start_copy
from shardwise.runtime.replicas import fingerprint_on

SAME_INPUTS_FIX = (
    "pass the same samples on every rank (no DistributedSampler, the same seed; sw.DataLoader does this), or "
    'one part of the batch on each: sw.parallelize(..., inputs="local")'
)


@dataclass
class _Passed:
    """The inputs of a call. ``leaves``: which arguments are tensors, and their tree; ``prints``: a fingerprint of each
    tensor, on its way to the host."""

    call: int
    leaves: tuple[list[bool], Any]
    prints: Tensor
    copy: CopyInFlight
    flight: GatheredRows | None = None


class SameInputs:
    """The comparison for one module. ``everyone``: all ranks; ``numbers``: a separate communicator on the host for the
    digests."""

    def __init__(self, everyone: Communicator, numbers: Communicator, device: torch.device) -> None:
        self.everyone, self.numbers, self.device = everyone, numbers, device
        self._passed: list[_Passed] = []  # not compared yet, oldest first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passed": []}

    def begin(self, flat: Sequence[Any], spec: Any) -> None:
        """Begin a training call on these leaves. Raises ShardwiseError on all ranks if the inputs of an earlier call
        differed."""
        if self._passed and self._passed[0].flight is not None:
            self._compare(self._passed.pop(0))
        for passed in self._passed:
            self._send(passed)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        on = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
        prints = [fingerprint_on(x.device)(x).to(on) for x in tensors]
        stacked = torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64)
        target = host_memory(stacked)
        copy = start_copy(stacked, target)
        passed = _Passed(self.everyone.calls, ([isinstance(x, Tensor) for x in flat], spec), target, copy)
        self._passed.append(passed)
        if copy.landed is None:
            self._send(passed)

    def _send(self, passed: _Passed) -> None:
        passed.copy.finish()
        digest = hashlib.blake2b(passed.prints.numpy().tobytes(), digest_size=8).digest()
        row = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        self.numbers.create_groups([self.numbers.mesh.sub_axes])  # once, and again after unpickling
        passed.flight = self.numbers.start_gather(row, "the digests of the ranks' inputs")

    def _compare(self, passed: _Passed) -> None:
        assert passed.flight is not None
        if len({*passed.flight.wait().flatten().tolist()}) == 1:
            return
        paths = flatten_with_path(unflatten(*passed.leaves))[0]
        names = [leaf_name(path) for path, is_tensor in paths if is_tensor]
        mine = dict(zip(names, passed.prints.tolist(), strict=True))
        everywhere = gather_objects(mine, self.everyone, self.device, f"which inputs of call {passed.call} differ")
        for name in mine:
            ranks_of: dict[object, list[int]] = {}
            for rank, prints in enumerate(everywhere):
                ranks_of.setdefault(prints.get(name), []).append(rank)
            if len(ranks_of) > 1:
                first, *others = (name_ranks(ranks) for ranks in ranks_of.values())
                what = (
                    f"in call {passed.call} {first} passed another {name} than {' and '.join(others)}; every rank "
                    "must pass the whole batch, so that call trained on a mixture"
                )
                fix = f"{SAME_INPUTS_FIX}; resume from before that call"
                raise ShardwiseError(what, fix=fix, section="different-calls")
