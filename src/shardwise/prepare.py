"""``sw.prepare``: the model, optimizer and loader of a script for one device, as this rank trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from shardwise.api import plan as make_plan
from shardwise.costs.cluster import Cluster
from shardwise.costs.optimizers import text_of_optimizer
from shardwise.errors import PlanWarning, ShardwiseError, warn_user
from shardwise.launch.ranks import init_ranks, rank, world_size
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.cpu_optimizer import with_states_on_host
from shardwise.runtime.guards.elementwise_optimizers import is_elementwise, is_matrixwise
from shardwise.runtime.local_shards import shard
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.parallelize import agree_on_plan, parallelize
from shardwise.train.data import DataLoader, arguments_of, same_random_numbers
from shardwise.train.recovery import planned

# What sw.DataLoader passes on to torch's, with the value that means "not given".
_OPTIONS: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}


_AFTERWARDS = "create the optimizer from par.parameters(), after sw.parallelize"


class Prepared(NamedTuple):
    """What ``sw.prepare`` returns: train with ``par.step(*batch)`` for every batch of the loader."""

    par: Parallel
    optimizer: Optimizer
    loader: DataLoader


def prepare(
    model: torch.nn.Module,
    optimizer: Optimizer,
    loader: TorchLoader[Any],
    *,
    cluster: Cluster | str | int | None = None,
    plan: Plan | PlanningResult | str | Path | None = None,
    loss: Callable[..., Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Prepared:
    """Plan, split the model, and give this rank its part of every batch. Every rank calls it with the same arguments.

    It joins the ranks (``sw.init_ranks``), plans on rank 0 for the first batch of the loader, and moves the optimizer
    to this rank's shards: learning rate schedulers that were made for it stay valid. All ranks build the model with the
    same weights (``torch.manual_seed``, ``sw.deferred``).

    Args:
        model: The model for one device. Its arguments are the batches of the loader (a dict: by name).
        optimizer: An optimizer of the model's parameters that has not stepped yet. States that the constructor of an
            element-wise one makes (``Adagrad``) are split as their parameters.
        loader: A ``torch.utils.data.DataLoader`` with the batches of one device: ``batch_size`` counts samples over all
            ranks. The order of a shuffled one is that of ``sw.DataLoader``, the same for every number of ranks.
        cluster: The cluster, its name or a number of devices; by default one device of this machine per rank.
        plan: A plan, or the path of one, in place of planning; then ``cluster`` and ``settings`` are not given.
        loss: ``loss(output, *targets)``, for a model that does not return its loss.
        seed: Seed of the order of samples, and of dropout.
        settings: Other arguments of ``sw.plan`` (``memory_bytes=``, ``precision=``, ``mesh=``, ...).

    Returns:
        The parallel module, the same optimizer, and the loader of this rank's parts of batches; where the plan splits
        no input, of whole batches.

    Raises:
        ShardwiseError: If the optimizer has stepped or has other parameters than the model's, or the loader has a
            sampler of its own; and as ``sw.plan`` and ``sw.parallelize`` do.
    """
    names = _names_of(model, optimizer)
    states = {name: state for name, p in model.named_parameters() if (state := optimizer.state.get(p))}
    options = _options_of(loader)
    if plan is not None and (settings or cluster is not None):
        given = sorted({*settings, *(["cluster"] if cluster is not None else [])})
        raise ShardwiseError(f"plan= is given beside {', '.join(given)}", fix="give either plan= or how to plan")
    init_ranks()

    def search() -> PlanningResult:
        args, kwargs = arguments_of(_first_batch(loader))
        where = Cluster.local(world_size()) if cluster is None else cluster
        priced = _priced_optimizer(optimizer)
        return make_plan(model, args, where, kwargs=kwargs, loss=loss, optimizer=priced, **settings)

    if plan is None:
        plan = from_rank_zero(lambda: plan_of(planned(search)))
    elif rank():
        plan = None
    agreed = agree_on_plan(plan_of(plan))
    is_split = any(layout.positions for layout in agreed.input_layouts.values())
    par = parallelize(model, agreed, loss=loss, inputs="local" if is_split else "global", seed=seed)
    shards = dict(par.named_parameters(remove_duplicate=False))
    for group, in_group in zip(optimizer.param_groups, names, strict=True):
        group["params"][:] = [shards[name] for name in in_group if name in shards]  # of the stages of this rank
    optimizer.state.clear()
    for group, in_group in zip(optimizer.param_groups, names, strict=True):
        for name in in_group:
            if name in shards and name in states:
                optimizer.state[shards[name]] = _local(states[name], par, name, shards[name], group)
    return Prepared(par, optimizer, DataLoader(loader.dataset, par, seed=seed, **options))


def _names_of(model: torch.nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in every group of an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise ShardwiseError(f"prepare takes (model, optimizer, loader); the second is {type(optimizer).__name__}")
    states = [state for state in optimizer.state.values() if state]
    if states and (is_matrixwise(type(optimizer)) or not is_elementwise(type(optimizer))):
        what = f"this {type(optimizer).__name__} has states of whole parameters already, and they cannot be split"
        raise ShardwiseError(what, fix="let its step make the states, and prepare before it")
    if any(isinstance(value, torch.Tensor) and value.is_meta for state in states for value in state.values()):
        what = f"this {type(optimizer).__name__} made states of parameters without values"
        raise ShardwiseError(what, fix=_AFTERWARDS)
    if any(state.get("step", 1) != 0 for state in states):
        raise ShardwiseError(
            f"this {type(optimizer).__name__} has stepped already, or its states count no steps: they are of whole "
            "parameters",
            fix="prepare first, and then sw.load_checkpoint(path, par, optimizer)",
        )
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if any(id(parameter) not in name_of for parameters in groups for parameter in parameters):
        what = f"this {type(optimizer).__name__} has parameters that are not the model's"
        raise ShardwiseError(what, fix="create it from model.parameters() of the model that is prepared")
    return [[name_of[id(parameter)] for parameter in parameters] for parameters in groups]


def _local(
    state: Mapping[str, Any], par: Parallel, name: str, parameter: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of the states that an optimizer's constructor made for a whole parameter."""
    layout = par.layouts.get(name)
    whole = parameter.shape if layout is None else torch.Size(layout.shape)
    on_host = id(parameter) in with_states_on_host()
    local = dict(state)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == whole:
            part = value if layout is None else shard(value, layout, par.coordinates)
            local[key] = torch.empty_like(part, device="cpu" if on_host else parameter.device).copy_(part)
        elif value.ndim:
            what = f"the state {key} of {name} has shape {list(value.shape)}: it cannot be split as {list(whole)} is"
            raise ShardwiseError(what, fix=_AFTERWARDS)
        elif group.get("fused") or group.get("capturable"):
            local[key] = value.to(parameter.device)
    return local


def _options_of(loader: TorchLoader[Any]) -> dict[str, Any]:
    """Return the arguments of ``sw.DataLoader`` for the same batches."""
    if not isinstance(loader, TorchLoader):
        what = f"prepare takes a torch.utils.data.DataLoader, not {type(loader).__name__}"
        raise ShardwiseError(what, fix="make a sw.DataLoader(dataset, par, batch_size) after sw.parallelize")
    if loader.batch_size is None or not (
        isinstance(loader.dataset, IterableDataset) or type(loader.sampler) in (RandomSampler, SequentialSampler)
    ):
        what = "the loader has a batch_sampler, a sampler or no batch_size: the order of samples is its own"
        raise ShardwiseError(what, fix="give batch_size= and shuffle=, and order the data set as you need it")
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        what = "the loader's sampler draws with replacement, or not all samples"
        raise ShardwiseError(what, fix="give shuffle=True in place of the sampler")
    options = {name: getattr(loader, name) for name in _OPTIONS}
    return {
        "batch_size": loader.batch_size,
        "shuffle": isinstance(sampler, RandomSampler),
        "drop_last": loader.drop_last,
        "collate_fn": loader.collate_fn,
        **{name: value for name, value in options.items() if value != _OPTIONS[name]},
    }


def _first_batch(loader: TorchLoader[Any]) -> Any:
    """Return a batch for planning, without workers and without drawing from the generators of the script."""
    assert loader.batch_size is not None, "checked by _options_of"
    dataset: Any = loader.dataset
    with same_random_numbers():
        if isinstance(dataset, IterableDataset):
            with _unmoved(dataset) as stream:
                samples = list(islice(stream, loader.batch_size))
        else:
            samples = [dataset[i] for i in range(min(loader.batch_size, len(dataset)))]
    if not samples:
        raise ShardwiseError("the data set has no samples")
    return loader.collate_fn(samples)


@contextmanager
def _unmoved(dataset: Any) -> Iterator[Any]:
    """Give a data set to read, which may keep its position in itself: it is where it was after the block."""
    if all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict")):
        position = copy.deepcopy(dataset.state_dict())
        try:
            yield dataset
        finally:
            dataset.load_state_dict(position)
        return
    try:
        stream = copy.deepcopy(dataset)
    except Exception as error:  # of any class: the data set's own
        what = f"reading the first batch for planning could move {type(dataset).__name__}, which cannot be copied"
        fix = "give it state_dict and load_state_dict, or pass plan="
        raise ShardwiseError(f"{what}: {type(error).__name__}: {error}", fix=fix) from error
    yield stream


def _priced_optimizer(optimizer: Optimizer) -> str:
    """Return the text under which the plan counts the optimizer. One that is not known counts as AdamW, with a
    warning."""
    if text := text_of_optimizer(optimizer):
        return text
    what = f"the states and updates of {type(optimizer).__name__} are not known: the plan counts those of AdamW"
    warn_user(f"{what}. For another one, pass plan=sw.plan(..., optimizer=...)", PlanWarning)
    return "adamw"
