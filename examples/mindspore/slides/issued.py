"""What a rank really sends: the collectives that torch is asked for, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "alltoall_base": "all_to_all",
    "reduce_scatter_base": "reduce_scatter",
}


class Issued(NamedTuple):
    """A collective, the ranks that take part and the bytes of the largest tensor in it."""

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} ({'-'.join(map(str, self.ranks))}) of {self.num_bytes} bytes"


class _Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Issued] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            name = operator.overloadpacket.__name__.strip("_")
            groups = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
            ranks = tuple(get_process_group_ranks(ProcessGroup.unbox(groups[0])))
            num_bytes = max((x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)), default=0)
            self.heard.append(Issued(KINDS.get(name, name), ranks, num_bytes))
        return operator(*args, **(kwargs or {}))


@contextmanager
def issued() -> Iterator[list[Issued]]:
    """The collectives that this rank's torch is asked for in the block, in their order; those of backward, too."""
    with _Listening() as mode:
        yield mode.heard
