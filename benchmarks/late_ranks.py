"""Trains on four ranks of one GPU whose messages are late, beside one process: a part of ``gpu_run.py``.

NCCL refuses two ranks on one GPU. ``LateGroup`` stands in for it: its messages read what is sent, and write what
arrives, on a stream of their own and long after the call, and gloo carries them through the host. Whatever reads a
result without waiting for it, or frees or overwrites what is still sent, changes the losses.

``rank_lines`` is what each rank runs; ``python benchmarks/late_ranks.py --rank R --size N --store FILE`` is one rank.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import shardwise as sw

LATE_CYCLES = 5_000_000  # of the GPU, ahead of what a message reads and writes: milliseconds, longer than these steps
STEPS, LOSS_TOLERANCE = 3, 2e-4  # in float32: sums of other orders
TIMEOUT = timedelta(seconds=90)
SPLIT = {  # tensor parallelism of a Llama
    "model.layers.*.self_attn.[qkv]_proj": "n@tp",
    "model.layers.*.mlp.gate_proj": "n@tp",
    "model.layers.*.mlp.up_proj": "n@tp",
    "lm_head": "n@tp",
}
COMBINED: Mapping[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
}
Exchange = Callable[[list[Tensor]], Sequence[Tensor]]  # what ranks do with copies on the host


class LateWork(torch._C._distributed_c10d.Work):
    """A message under way. ``wait`` lets the current stream wait for it."""

    def __init__(self, end: Future[torch.cuda.Event]) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream().wait_event(self.end.result(TIMEOUT.total_seconds()))
        return True

    def is_completed(self) -> bool:
        return self.end.done() and self.end.result().query()


class LateGroup(dist.ProcessGroup):
    """A process group of GPU tensors under NCCL's name, one message after another, each of them late."""

    class Options:
        """As of NCCL's groups."""

        is_high_priority_stream = False
        _timeout = TIMEOUT

    supports_splitting = supports_coalescing = False
    _device_types = (torch.device("cuda"),)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.place, self.members, self.options = rank, size, options
        self.gloo = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        # Messages among all ranks follow one another, as do those to a rank and those from it.
        self.threads: dict[object, ThreadPoolExecutor] = defaultdict(partial(ThreadPoolExecutor, 1))
        self.named = ""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing is numbered."""

    def _get_backend(self, device: torch.device) -> LateGroup:
        return self

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.members

    def _set_group_name(self, name: str) -> None:
        self.named = name

    @property
    def group_name(self) -> str:
        return self.named

    def abort(self) -> None:
        """Nothing is running without its host."""

    shutdown = abort

    def _issue(
        self, sent: list[Tensor], received: list[Tensor], exchange: Exchange, options: Any, after: object = None
    ) -> LateWork:
        for tensor in (*sent, *received):
            assert tensor.is_cuda, f"NCCL sends no tensor on {tensor.device}"
            assert tensor.is_contiguous(), f"NCCL sends no tensor with the strides {tensor.stride()}"
        began = torch.cuda.current_stream().record_event()
        work = LateWork(self.threads[after].submit(self._carry, began, sent, received, exchange))
        if not getattr(options, "asyncOp", True):
            work.wait()
        return work

    def _carry(
        self, began: torch.cuda.Event, sent: list[Tensor], received: list[Tensor], exchange: Exchange
    ) -> torch.cuda.Event:
        with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(began)
            torch.cuda._sleep(LATE_CYCLES)
            arrived = exchange([tensor.cpu() for tensor in sent])
            torch.cuda._sleep(LATE_CYCLES)
            for place, tensor in zip(received, arrived, strict=True):
                place.view(-1).copy_(tensor.reshape(-1))
            return self.stream.record_event()

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        flat = tensor.reshape(-1).view(torch.uint8)
        rows = [torch.empty_like(flat) for _ in range(self.members)]
        if flat.numel():
            self.gloo.allgather([rows], [flat]).wait()
        return torch.stack(rows).view(tensor.dtype).view(self.members, *tensor.shape)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        combine = COMBINED[options.reduceOp.op if hasattr(options.reduceOp, "op") else options.reduceOp]
        return self._issue(tensors, tensors, lambda x: [combine(self._rows(x[0]))], options)

    def _allgather_base(self, out: Tensor, tensor: Tensor, options: Any = None) -> LateWork:
        return self._issue([tensor], [out], lambda x: [self._rows(x[0])], options)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> LateWork:
        return self._issue(tensors, outs[0], lambda x: self._rows(x[0]).unbind(0), options)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, options: Any = None) -> LateWork:
        combine = COMBINED[options.reduceOp.op if hasattr(options.reduceOp, "op") else options.reduceOp]

        def exchange(x: list[Tensor]) -> list[Tensor]:
            return [combine(self._rows(x[0]).view(self.members, self.members, -1)[:, self.place])]

        return self._issue([tensor], [out], exchange, options)

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, receives: list[int], sends: list[int], options: Any = None
    ) -> LateWork:
        def exchange(x: list[Tensor]) -> list[Tensor]:
            arrived = torch.empty(out.shape, dtype=out.dtype)
            self.gloo.alltoall_base(arrived, x[0], list(receives), list(sends)).wait()
            return [arrived]

        return self._issue([tensor], [out], exchange, options)

    # torch 2.13 has other names for these.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        return self._issue(tensors, tensors, lambda x: [self._rows(x[0])[options.rootRank]], options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> LateWork:
        def exchange(x: list[Tensor]) -> list[Tensor]:
            self.gloo.send([x[0].reshape(-1).view(torch.uint8)], to, tag).wait()
            return []

        return self._issue(tensors, [], exchange, None, ("to", to))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> LateWork:
        def exchange(x: list[Tensor]) -> list[Tensor]:
            arrived = torch.empty(tensors[0].nbytes, dtype=torch.uint8)
            self.gloo.recv([arrived], source, tag).wait()
            return [arrived.view(tensors[0].dtype)]

        return self._issue([], tensors, exchange, None, ("from", source))

    def barrier(self, opts: Any = None) -> LateWork:
        def exchange(x: list[Tensor]) -> list[Tensor]:
            self.gloo.barrier().wait()
            return []

        work = self._issue([], [], exchange, None)
        work.wait()
        return work


def join(rank: int, size: int, store: Path, device: str) -> None:
    """Create the group of all ranks: late on a GPU, gloo on a CPU."""
    if device == "cuda":
        torch.cuda.set_device(torch.cuda.current_device())
        for module in (distributed_c10d, dist):
            module.ProcessGroupNCCL = LateGroup
            module.is_nccl_available = lambda: True
        distributed_c10d._NCCL_AVAILABLE = True
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(store), size), rank=rank, world_size=size)


@dataclass(frozen=True)
class Late:
    """How a model is trained. ``axes``: of the mesh, but for dp, which takes what ranks are left."""

    model: Callable[[], nn.Module]
    plan: Mapping[str, Any]
    axes: Mapping[str, int] = field(default_factory=dict)
    parallelize: Mapping[str, Any] = field(default_factory=dict)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=64, num_local_experts=4, use_cache=False,
        )
    )  # fmt: skip


CASES: Mapping[str, Late] = {
    "tensor parallel, ZeRO 3": Late(llama, {"strategies": SPLIT, "zero": 3}, {"tp": 2}),
    "ZeRO 3, recompute": Late(llama, {"mode": "data_parallel", "zero": 3, "recompute": "full"}),
    "ZeRO 1, micro-batches": Late(llama, {"mode": "data_parallel", "zero": 1, "global_batch": 32, "micro_batch": 16}),
    "tensor parallel, offload": Late(llama, {"strategies": SPLIT, "offload": "all"}, {"tp": 2}),
    "states on the host": Late(llama, {"mode": "data_parallel", "optimizer": "adamw on host"}),
    "experts": Late(mixtral, {"strategies": {"model.layers.*.mlp.experts": "K@ep"}}, {"ep": 2}),
    "stages": Late(llama, {"stages": 2, "global_batch": 32, "micro_batch": 16}),
    "compiled": Late(llama, {"strategies": SPLIT, "zero": 3}, {"tp": 2}, {"compile": True}),
}


def rank_lines(names: Sequence[str], device: str) -> Iterator[Mapping[str, Any]]:
    """Train every case on this rank of a group, and whole on its CPU: yield the losses of both.

    ``device``: where the messages of the group are.
    """
    size = dist.get_world_size()
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        alone = case.model().train()
        ids = torch.randint(512, (32, 32))
        example = {"input_ids": ids, "labels": ids}
        layout: dict[str, Any] = {} if "stages" in case.plan else {"mesh": _mesh(size, case.axes)}
        plan = sw.plan(alone, example, size, **layout, **case.plan) if dist.get_rank() == 0 else None
        par = sw.parallelize(copy.deepcopy(alone), plan, **{"compile": False, **case.parallelize})
        batch = {key: value.to(par.device) for key, value in example.items()}
        own, whole = (torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (par, alone))
        losses = []
        for _ in range(STEPS):
            found = par.step(**batch)
            expected = alone(**example).loss
            expected.backward()
            for optimizer in (own, whole):
                optimizer.step()
                optimizer.zero_grad()
            losses.append((found.item(), expected.item()))
        ok = all(abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in losses)
        ok &= par.device.type == device
        yield {"case": name, "ranks": size, "device": str(par.device), "ok": ok, "losses": losses}


def _mesh(size: int, axes: Mapping[str, int]) -> sw.Mesh:
    rest = size
    for parts in axes.values():
        rest //= parts
    return sw.Mesh(dp=rest, **axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="a file that all ranks see")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    join(options.rank, options.size, options.store, options.device)
    write = partial(print, flush=True)
    for line in rank_lines(options.cases, options.device):
        if options.rank == 0:
            write(json.dumps(line))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
