"""Memory and work of optimizers: their states between steps, and the temporaries and kernels of an update.

``torch.optim`` has up to three variants of an update:

* *foreach*, the default on GPUs, runs each operator on all parameters at once. A temporary is as large as all of them.
* *single*, the default on CPUs, loops over the parameters. Python keeps the temporaries of the last parameter until
  those of the next one replace them.
* *fused* is one kernel without temporaries.

``clip_grad_norm_`` scales gradients in place, and holds one number per parameter in each variant.

A text describes an optimizer: its name, its variant if that is not torch's default, and ``on host`` if its states stay
in host memory between steps. Examples are ``"adamw"``, ``"adamw fused"`` and ``"adamw fused on host"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import ShardwiseError

VARIANTS = ("foreach", "single", "fused")
ON_HOST = " on host"


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Memory of an optimizer, in tensors of a parameter's shape and dtype.

    Attributes:
        states: States per parameter that stay between steps.
        foreach: Temporaries per parameter of the variant foreach, held for all parameters at once.
        single: Temporaries of the variant single, as pairs (of the last parameter, of the current one). There is one
            pair for each moment that may be the peak.
        passes: Reads and writes of every element in an update of several operators. 0: unknown, ``update_of`` assumes
            three times those of one kernel.
    """

    states: int
    foreach: int = 0
    single: tuple[tuple[int, int], ...] = ()
    passes: int = 0


# From the source of torch.optim 2.13, with the default of every argument except SGD's momentum.
# tests/costs/test_optimizers.py measures the memory. Passes count the reads and writes of mul, lerp, addcmul, sqrt,
# div, add and addcdiv. torch has no Lion: the figures are those of its usual code, with one temporary in any variant.
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
    """Return whether the states stay in host memory between steps."""
    return isinstance(optimizer, str) and optimizer.endswith(ON_HOST)


def parse_optimizer(optimizer: str) -> tuple[str, str]:
    """Return the name and the variant of an optimizer's text: ``("adamw", "fused")`` for ``"adamw fused on host"``.

    An empty variant means torch's default on the device. Raises ShardwiseError if the text is not an optimizer.
    """
    if not isinstance(optimizer, str):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        name = "momentum" if getattr(optimizer, "defaults", {}).get("momentum") else kind.__name__.lower()
        fix = f"optimizer={name!r}" if name in HELD else f"pass a name such as 'adamw': {', '.join(HELD)}"
        what = f"optimizer is the name of an optimizer, not an object of {kind.__name__}"
        raise ShardwiseError(what, fix=fix)
    name, _, variant = optimizer.removesuffix(ON_HOST).partition(" ")
    if name not in HELD:
        what = f"the memory of optimizer {optimizer!r} is not known"
        raise ShardwiseError(what, fix=f"one of {', '.join(HELD)}")
    if (variant and variant not in VARIANTS) or optimizer.endswith(" "):
        what = f"{variant!r} of optimizer {optimizer!r} is not an update variant"
        fix = (
            f"one of {', '.join(VARIANTS)}, as in '{name} fused', or only the name; add ' on host' for offloaded states"
        )
        raise ShardwiseError(what, fix=fix)
    if is_on_host(optimizer) and not HELD[name].states:
        raise ShardwiseError(f"{name} has no states to offload to the host", fix=f"optimizer={name!r}")
    return name, variant


def states_of(optimizer: str) -> int:
    return HELD[parse_optimizer(optimizer)[0]].states


def temporary_bytes(optimizer: str, num_bytes: Sequence[int], *, foreach: bool) -> int:
    """Return the most bytes of temporaries that an update holds.

    Args:
        optimizer: The optimizer's text.
        num_bytes: Bytes of each parameter, in the order of the update.
        foreach: Whether foreach is the default variant on the device.
    """
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
    """Work of the update of one parameter.

    Attributes:
        passes: Reads and writes of every element, in the parameter's dtype.
        scalars: Elements that the fused kernel handles one by one, at ``Device.scalar_rate``, per element of the
            parameter.
        kernels: Kernels that are launched for this parameter alone. 0: a kernel updates all parameters.
        fresh: Temporaries of the parameter's size.
    """

    passes: int
    scalars: float
    kernels: float = 0.0
    fresh: int = 0


# ``Update.scalars`` of the fused kernel per state. Fitted to AdamW in bf16 on an H100: 268 million elements take
# 2.35 ms at 350 G/s. In float32 the kernel is bound by its traffic instead.
_SCALARS_OF_STATE = 1.5
# Reads and writes of one operator of an update: SGD 3 in 1, with momentum 8 in 3, AdamW 20 in 8. On a CPU they take
# 1.6, 5.1 and 17.7 us per tensor of 1,000 elements (2-core AMD EPYC 9005, torch 2.13), fused AdamW 3.4.
_PASSES_OF_KERNEL = 2.5


def update_of(optimizer: str, *, foreach: bool) -> Update:
    """Return the work of an update per parameter. ``foreach``: whether foreach is the device's default variant."""
    name, variant = parse_optimizer(optimizer)
    need, variant = HELD[name], variant or ("foreach" if foreach else "single")
    once = 3 + 2 * need.states  # parameter, gradient and states are read, parameter and states written
    together = foreach and variant != "single"  # foreach, and fused as well, loop over the parameters on CPUs
    if variant == "fused":
        return Update(once, _SCALARS_OF_STATE * need.states, kernels=0.0 if together else 1.0)
    passes = need.passes or 3 * once
    fresh = need.foreach if variant == "foreach" else max((this for _, this in need.single), default=0)
    return Update(passes, 0.0, 0.0 if together else passes / _PASSES_OF_KERNEL, fresh)
