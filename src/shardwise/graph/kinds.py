"""Rejection of module kinds that cannot be captured as they are, with the module to pass instead.

They are identified by class name, because graph/ does not know the runtime.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.errors import CaptureError

_INSIDE = "pass the wrapped model (model.module): the plan replaces the wrapper"
_SPLIT = "pass the original model: a parallel module holds the shards of one rank"
_SCRIPT = "pass the module from which the script was made: shardwise captures its Python code"
_KINDS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": _INSIDE,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _INSIDE,
    "torch.distributed.fsdp.FSDPModule": "pass the model without fully_shard; the plan shards parameters",
    "torch.jit._script.ScriptModule": _SCRIPT,
    "shardwise.runtime.parallel.Parallel": _SPLIT,
}


def check_kinds(module: Any) -> None:
    """Raise CaptureError for an object that is no module, or that is or contains a module of another tool."""
    if not isinstance(module, nn.Module):
        what = f"the model is a {type(module).__name__}, not a torch.nn.Module"
        raise CaptureError(what, fix="pass the module itself; wrap a function as the forward of a module")
    for path, submodule in module.named_modules():
        for kind in type(submodule).__mro__:
            if fix := _KINDS.get(f"{kind.__module__}.{kind.__qualname__}"):
                what = f"{f'{path} is' if path else 'the model is'} a {kind.__name__}, which cannot be captured"
                raise CaptureError(what, fix=fix)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            what = f"{name} is a sparse tensor ({layout}), which cannot be split"
            raise CaptureError(what, fix=f"register {name}.to_dense() and multiply with torch.matmul")
