"""``ShardwiseStrategy``: Lightning's Trainer for modules that hold parallel modules.

The module parallelizes its network in ``configure_model``, and the Trainer runs on every rank as if on one device: each
rank gets the whole batch. Checkpoints hold whole tensors under the original names, so that any plan, any number of
ranks, and Lightning on one device read them.

Needs ``lightning`` (``pip install "shardwise[lightning]"``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from shardwise.errors import ShardwiseError, problem
from shardwise.launch.ranks import init_ranks, rank, world_size
from shardwise.runtime.agree import gather_values
from shardwise.runtime.communicator import rank_device
from shardwise.runtime.guards.elementwise_optimizers import is_matrixwise, parameters_of
from shardwise.runtime.guards.matrix_optimizers import has_states_here, owned_matrices
from shardwise.runtime.guards.registry import ShardRecord, records_of, tensors_of
from shardwise.train.parts import is_seed, splits_in

try:
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    raise ImportError(
        problem(f"shardwise.lightning needs lightning: {error}", fix='pip install "shardwise[lightning]"')
    ) from error

__all__ = ["ShardwiseStrategy"]

_REDUCTIONS = {
    "mean": lambda rows: rows.to(torch.promote_types(rows.dtype, torch.float32)).mean(0),
    "avg": lambda rows: rows.to(torch.promote_types(rows.dtype, torch.float32)).mean(0),
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}
T = TypeVar("T")
_SEEDS = "shardwise_seeds"  # of random numbers of parallel modules, in a file of Lightning's


class ShardwiseStrategy(Strategy):
    """Run Lightning's Trainer on all ranks: ``Trainer(strategy=ShardwiseStrategy(), devices=1)``.

    Start the script with ``shardwise run -n 8 train.py`` (or torchrun, mpirun, srun). ``configure_model`` of the module
    replaces its network: ``self.net = sw.parallelize(self.net, plan)``; ``training_step`` calls it as before. Every
    rank loads the whole batch. Gradient clipping, accumulation, schedulers, callbacks and checkpoints of the Trainer
    work.
    """

    strategy_name = "shardwise"

    def setup_environment(self) -> None:
        init_ranks()
        rank_zero_only.rank = rank()
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        self._check()
        super().setup(trainer)

    def _check(self) -> None:
        module = self.lightning_module
        assert module is not None, "the Trainer connects the module first"
        splits = splits_in(module)
        kind = type(module).__name__
        if not splits:
            raise ShardwiseError(
                f"{kind} holds no parallel module: every rank would train a copy of its own",
                fix="in configure_model: self.net = sw.parallelize(self.net, plan)",
            )
        staged = [path for path, par in splits.items() if par.plan.is_pipeline]
        if staged:
            what = f"{staged[0]} of {kind} has stages, whose backward Lightning cannot call"
            raise ShardwiseError(what, fix="plan without stages, or train with par.step in your own loop")

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        return rank_device()

    @property
    def is_global_zero(self) -> bool:
        return rank() == 0

    @property
    def global_rank(self) -> int:
        return rank()

    @property
    def local_rank(self) -> int:
        return rank() if self.root_device.index is None else self.root_device.index

    @property
    def world_size(self) -> int:
        return world_size()

    def model_to_device(self) -> None:
        """Move what is not parallel: shards are on this rank's device."""
        self.lightning_module.to(self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a number combined over all ranks: "mean", "sum", "min" or "max"."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op or "mean").rpartition(".")[2].lower()
        if name not in _REDUCTIONS:
            raise ShardwiseError(f"reduce_op must be one of {', '.join(_REDUCTIONS)}; got {reduce_op!r}")
        return _REDUCTIONS[name](self.all_gather(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return votes == world_size() if all else votes > 0

    def barrier(self, name: str | None = None) -> None:
        gather_values(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return gather_values(obj if rank() == src else None)[src]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather the equally large tensors of all ranks, stacked. Raises ShardwiseError with ``sync_grads``."""
        if sync_grads:
            raise ShardwiseError("all_gather of gradients is not supported", fix="the ranks have the whole batch")
        return torch.stack(gather_values(tensor.detach().cpu())).to(tensor.device)

    def teardown(self) -> None:
        """End the Trainer; shards stay where they are."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def _records_of(self, optimizer: Any) -> list[ShardRecord | None]:
        """Return where the shards in an optimizer are, None for whole parameters."""
        parameters = parameters_of(optimizer)
        if is_matrixwise(type(_own(optimizer))):  # its states are whole already, each with the owner of its matrix
            return [None] * len(parameters)
        return records_of(parameters)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state that the module would have on one device, on every rank in the host's memory. Collective."""
        tensors = dict(tensors_of(self.lightning_module))
        records = dict(zip(tensors, records_of(tensors.values()), strict=True))
        state = self.lightning_module.state_dict()
        return {name: _whole(value, records.get(name)) for name, value in state.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state that the optimizer would have on one device. Collective."""
        own = _own(optimizer)
        matrices = owned_matrices(own) if is_matrixwise(type(own)) else []
        owners = {id(matrix.parameter): matrix.owner for matrix in matrices}
        state = {}
        for index, (parameter, record) in enumerate(zip(parameters_of(own), self._records_of(own), strict=True)):
            kept = own.state.get(parameter, {})
            if id(parameter) in owners:
                kept = _copied(kept) if has_states_here(own, parameter) else None
                kept = kept if owners[id(parameter)] is None else _of_owner(kept)
            shape = parameter.shape if parameter.ndim else None  # a step count is no shard of a number
            state[index] = {
                key: _whole(x, record if getattr(x, "shape", None) == shape else None) for key, x in kept.items()
            }
        groups = own.state_dict()["param_groups"]
        return {"state": {index: kept for index, kept in state.items() if kept}, "param_groups": groups}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the file on rank 0, and wait for it on all ranks."""
        state = checkpoint.get("state_dict", {})
        checkpoint[_SEEDS] = {name: state.pop(name) for name in list(state) if is_seed(name)}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier(f"saving {Path(filepath).name}")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = {**checkpoint["state_dict"], **checkpoint.get(_SEEDS, {})}
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole states, of which this rank keeps its parts."""
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            records = self._records_of(optimizer)
            parameters = parameters_of(optimizer)
            parts = {
                index: {key: value if record is None else record.cut(value) for key, value in state.items()}
                for index, (parameter, record) in enumerate(zip(parameters, records, strict=True))
                if (state := stored["state"].get(index)) and has_states_here(_own(optimizer), parameter)
            }
            optimizer.load_state_dict({**stored, "state": parts})


def _own(optimizer: Any) -> Any:
    """Return the optimizer that one of Lightning's wraps, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def _copied(states: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in the host's memory. ``torch.save`` refuses the states themselves, which need not be whole."""
    copied: dict[str, Any] = tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), states)
    return copied


def _of_owner(states: T | None) -> T:
    """Return a parameter's states from the first rank that keeps them. Collective."""
    return next(found for found in gather_values(states) if found is not None)


def _whole(value: Any, record: ShardRecord | None) -> Any:
    if record is not None:
        value = record.gather(value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
