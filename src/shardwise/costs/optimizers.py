"""What optimizers hold: states from step to step, and tensors of their own while they update.

``torch.optim`` has up to three ways to update. *foreach* goes through all parameters at once, operator by operator, so
that a temporary is as large as all of them: the default on GPUs. *single* goes from parameter to parameter, the default
on CPUs; Python's loop keeps the last one's temporaries until those of the next replace them. *fused* is one kernel and
has none. Clipping by ``clip_grad_norm_`` scales gradients in place, and holds a number per parameter in any of them.

An optimizer is described by its name, its way to update where that is not torch's default, and ``on host`` where its
states wait in the memory of the host from step to step: ``"adamw"``, ``"adamw fused"``, ``"adamw fused on host"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import ShardwiseError, problem

VARIANTS = ("foreach", "single", "fused")
ON_HOST = " on host"


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Copies of a parameter, in its dtype: ``states`` that stay; temporaries of foreach (of all parameters);
    ``single``: of the last parameter and of the one that is updated, at the moments when there are most of them.
    ``passes``: how often elements are read or written where an update goes operator by operator."""

    states: int
    foreach: int = 0
    single: tuple[tuple[int, int], ...] = ()
    passes: int = 0


# From the source of torch.optim 2.13; tests/costs/test_optimizers.py measures what is held. Passes are the reads and
# writes of mul, lerp, addcmul, sqrt, div, add and addcdiv; where none stand here, three times those of one kernel.
# Defaults of all arguments, but for SGD's momentum. torch has no Lion: as it is usually written, with one temporary, in
# any variant.
HELD: Mapping[str, OptimizerMemory] = {
    "adamw": OptimizerMemory(2, 1, ((1, 2),), 20),
    "adam": OptimizerMemory(2, 1, ((1, 2),), 18),
    "nadam": OptimizerMemory(2, 1, ((1, 2),)),
    "radam": OptimizerMemory(2, 1, ((0, 2),)),
    "adamax": OptimizerMemory(2, 1, ((0, 1),)),
    "adadelta": OptimizerMemory(2, 2, ((2, 1), (1, 2))),
    "adagrad": OptimizerMemory(1, 2, ((1, 1),)),
    "rmsprop": OptimizerMemory(1, 1, ((1, 1),)),
    "momentum": OptimizerMemory(1, passes=8),
    "lion": OptimizerMemory(1, 1, ((0, 1),)),
    "sgd": OptimizerMemory(0, passes=3),
    "none": OptimizerMemory(0),
}


def is_on_host(optimizer: str) -> bool:
    """Return whether the states are on the host from step to step."""
    return isinstance(optimizer, str) and optimizer.endswith(ON_HOST)


def parse_optimizer(optimizer: str) -> tuple[str, str]:
    """Return the name and the variant of ``"adamw"`` or ``"adamw fused"``, wherever its states are; an empty variant is
    torch's default on the device. Raises ShardwiseError."""
    if not isinstance(optimizer, str):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        name = "momentum" if getattr(optimizer, "defaults", {}).get("momentum") else kind.__name__.lower()
        fix = f"optimizer={name!r}" if name in HELD else f"pass a name such as 'adamw': {', '.join(HELD)}"
        what = f"optimizer is the name of an optimizer, not an object of {kind.__name__}"
        raise ShardwiseError(problem(what, fix=fix))
    name, _, variant = optimizer.removesuffix(ON_HOST).partition(" ")
    if name not in HELD:
        what = f"the memory of optimizer {optimizer!r} is not known"
        raise ShardwiseError(problem(what, fix=f"one of {', '.join(HELD)}"))
    if (variant and variant not in VARIANTS) or optimizer.endswith(" "):
        what = f"{variant!r} of optimizer {optimizer!r} is not an update variant"
        fix = (
            f"one of {', '.join(VARIANTS)}, as in '{name} fused', or only the name; add ' on host' for offloaded states"
        )
        raise ShardwiseError(problem(what, fix=fix))
    if is_on_host(optimizer) and not HELD[name].states:
        raise ShardwiseError(problem(f"{name} has no states to offload to the host", fix=f"optimizer={name!r}"))
    return name, variant


def states_of(optimizer: str) -> int:
    """Return the number of states an optimizer keeps per parameter element."""
    return HELD[parse_optimizer(optimizer)[0]].states


def temporary_bytes(optimizer: str, num_bytes: Sequence[int], *, foreach: bool) -> int:
    """Return the most that an update holds besides parameters, gradients and states. ``num_bytes``: of the parameters,
    in their order; ``foreach``: whether that is the device's default."""
    name, variant = parse_optimizer(optimizer)
    need, variant = HELD[name], variant or ("foreach" if foreach else "single")
    if variant == "foreach":
        return need.foreach * sum(num_bytes)
    if variant == "fused":
        return 0
    pairs = pairwise((0, *num_bytes))
    return max((last * size + this * next_size for size, next_size in pairs for last, this in need.single), default=0)


@dataclass(frozen=True, slots=True)
class Update:
    """``passes``: reads and writes of every element; ``scalars``: elements per element that go one by one, where one
    kernel does it all; ``kernels``: started for every parameter by itself; ``fresh``: temporaries of its size.
    """

    passes: int
    scalars: float
    kernels: float = 0.0
    fresh: int = 0


# Elements per state that the fused kernel takes one by one: fitted to AdamW in bf16 on an H100, 268 million elements in
# 2.35 ms at 350 G/s. In float32 its traffic is slower than that.
_SCALARS_OF_STATE = 1.5
# Reads and writes of one operator of an update: SGD 3 in 1, with momentum 8 in 3, AdamW 20 in 8. On a CPU they take
# 1.6, 5.1 and 17.7 us per tensor of 1,000 elements (2-core AMD EPYC 9005, torch 2.13), fused AdamW 3.4.
_PASSES_OF_KERNEL = 2.5


def update_of(optimizer: str, *, foreach: bool) -> Update:
    """Return the work of an update per element. ``foreach``: whether that is the device's default."""
    name, variant = parse_optimizer(optimizer)
    need, variant = HELD[name], variant or ("foreach" if foreach else "single")
    once = 3 + 2 * need.states  # parameter, gradient and states are read, parameter and states written
    together = foreach and variant != "single"  # foreach, and fused as well, loop over the parameters on CPUs
    if variant == "fused":
        return Update(once, _SCALARS_OF_STATE * need.states, kernels=0.0 if together else 1.0)
    passes = need.passes or 3 * once
    fresh = need.foreach if variant == "foreach" else max((this for _, this in need.single), default=0)
    return Update(passes, 0.0, 0.0 if together else passes / _PASSES_OF_KERNEL, fresh)
