"""Memory and work of optimizers: their states between steps, and the temporaries and kernels of an update.

``torch.optim`` has up to three variants of an update:

* *foreach*, the default on GPUs, runs each operator on all parameters at once. A temporary is as large as all of them.
* *single*, the default on CPUs, loops over the parameters. Python keeps the temporaries of the last parameter until
  those of the next one replace them.
* *fused* is one kernel without temporaries.

``clip_grad_norm_`` scales gradients in place, and holds one number per parameter in each variant.

A text describes an optimizer: its name, its variant if that is not torch's default, and ``on host`` if its states stay
in host memory between steps. Examples are ``"adamw"``, ``"adamw fused"`` and ``"adamw fused on host"``. LBFGS has its
history size in the place of a variant (``"lbfgs 10"``). An optimizer object is counted under the name of its class.

Sources of those that look at whole matrices, beside ``torch.optim``:

* Shampoo (Gupta et al. 2018): for each dim of size d a sum ``[d, d]`` of products of the gradient with itself, and its
  root, here computed in every step. An eigendecomposition takes about ``9 d**3`` FLOPs, the root ``2 d**3`` more.
* SOAP (Vyas et al. 2024): the moments of Adam, and for each dim such a sum and its eigenvectors. The gradient and its
  mean are rotated, the update is rotated back. One product and one QR decomposition in 10 steps renew the eigenvectors:
  ``(2 + 8 / 3) / 10 d**3`` FLOPs a step.
* 8-bit Adam (Dettmers et al. 2022): two states of one byte per element, with a float32 scale per 2,048 elements; one
  kernel reads and writes them. bitsandbytes keeps states of small parameters in 32 bits, which is not counted.
* LBFGS (two-loop recursion, Nocedal 1980): two vectors of all parameters per entry of its history, the direction and
  the last gradient. The price is that of one iteration and one closure call; a step of torch takes up to ``max_iter``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardwise.errors import ShardwiseError

VARIANTS = ("foreach", "single", "fused")
ON_HOST = " on host"
Whole = tuple[int, Sequence[int]]  # bytes and shape of a whole parameter

# Larger dims, as those of vocabularies, have no square matrices. It is the default of public implementations of SOAP
# (``max_precond_dim``); those of Shampoo split larger dims into blocks, or leave them out, at limits of their own.
MAX_FACTOR = 10_000
_BLOCK = 2048  # elements that share a scale
_HISTORY = 100  # the default of torch.optim.LBFGS
_SQUARES_OF_DECOMPOSITION = 4  # its operand, result, workspace and the matrix made of it


@dataclass(frozen=True, slots=True)
class Factors:
    """Square matrices ``[d, d]`` that an optimizer has for each dim of a parameter, in float32 or a wider dtype of it.

    Attributes:
        states: Those that stay between steps.
        products: Products of ``2 d numel`` FLOPs in a step: of the gradient with itself, of a matrix with the gradient.
        cubes: FLOPs of decompositions in a step, in ``d**3``.
        least_dims: Dims of the smallest parameters that have them.
    """

    states: int
    products: int
    cubes: float
    least_dims: int = 1

    def dims_of(self, shape: Sequence[int]) -> list[int]:
        """Return the dims of a parameter that have such matrices."""
        return [size for size in shape if size <= MAX_FACTOR] if len(shape) >= self.least_dims else []

    def flops_of(self, shape: Sequence[int]) -> float:
        """Return the FLOPs of the update of a parameter."""
        numel = prod(shape)
        return sum(2 * self.products * size * numel + self.cubes * size**3 for size in self.dims_of(shape))


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
        whole: Whether it looks at whole matrices. Each of those that are split is then updated by one device, which
            gathers parameter and gradient for it and keeps its states (``runtime.guards.matrix_optimizers``).
        products: Newton-Schulz steps of an update, in bf16. A step of a matrix of m x n, m <= n, is three products of
            ``4 m m n + 2 m m m`` FLOPs together.
        factors: Square matrices for each dim of a parameter.
        quantised: States of one byte per element, with a scale of four bytes per block.
        history: Tensors that stay per entry of a history of steps.
        together: Whether it looks at all parameters together. Every device then gathers all, and has all states.
    """

    states: int
    foreach: int = 0
    single: tuple[tuple[int, int], ...] = ()
    passes: int = 0
    whole: bool = False
    products: int = 0
    factors: Factors | None = None
    quantised: int = 0
    history: int = 0
    together: bool = False


_ADAM_8BIT = OptimizerMemory(0, passes=5, whole=True, quantised=2)  # in bf16; the states' bytes are two of the passes

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
    "muon": OptimizerMemory(1, single=((0, 5),), passes=12, whole=True, products=5),  # 5 temporaries in bf16, 3 in f32
    "adafactor": OptimizerMemory(
        0, single=((1, 1),), passes=14, whole=True
    ),  # states of a row and a column, not counted
    "shampoo": OptimizerMemory(0, single=((0, 2),), passes=8, whole=True, factors=Factors(2, 2, 11.0)),
    "soap": OptimizerMemory(
        2, single=((0, 4),), passes=26, whole=True, factors=Factors(2, 4, (2 + 8 / 3) / 10, least_dims=2)
    ),
    "lbfgs": OptimizerMemory(2, foreach=4, passes=12, whole=True, history=2, together=True),
    "adam8bit": _ADAM_8BIT,
    "adamw8bit": _ADAM_8BIT,
    "sgd": OptimizerMemory(0, passes=3),
    "none": OptimizerMemory(0),
}


def is_on_host(optimizer: str) -> bool:
    """Return whether the states stay in host memory between steps."""
    return isinstance(optimizer, str) and optimizer.endswith(ON_HOST)


def text_of_optimizer(optimizer: object) -> str:
    """Return the text under which plans count an optimizer or its class (``"adamw fused"``); "" if it is not known."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    name, defaults = kind.__name__.lower(), getattr(optimizer, "defaults", {})
    if name == "sgd" and defaults.get("momentum"):
        name = "momentum"
    if name not in HELD:
        return ""
    variants = [variant for variant in ("fused", "foreach") if defaults.get(variant) and not HELD[name].whole]
    if HELD[name].history and (size := defaults.get("history_size", _HISTORY)) != _HISTORY:
        variants = [str(size)]
    return " ".join([name, *variants[:1]])


def parse_optimizer(optimizer: str) -> tuple[str, str]:
    """Return the name and the variant of an optimizer's text: ``("adamw", "fused")`` for ``"adamw fused on host"``.

    An empty variant means torch's default on the device; that of LBFGS is its history size. Raises ShardwiseError if
    the text is not an optimizer.
    """
    if not isinstance(optimizer, str):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        text = text_of_optimizer(optimizer)
        fix = f"optimizer={text!r}" if text else f"pass a name such as 'adamw': {', '.join(HELD)}"
        what = f"optimizer is the name of an optimizer, not an object of {kind.__name__}"
        raise ShardwiseError(what, fix=fix)
    name, _, variant = optimizer.removesuffix(ON_HOST).partition(" ")
    if name not in HELD:
        what = f"the memory of optimizer {optimizer!r} is not known"
        raise ShardwiseError(what, fix=f"one of {', '.join(HELD)}")
    is_history = bool(HELD[name].history) and variant.isdecimal()
    if (variant and variant not in VARIANTS and not is_history) or optimizer.endswith(" "):
        what = f"{variant!r} of optimizer {optimizer!r} is not an update variant"
        fix = (
            f"one of {', '.join(VARIANTS)}, as in '{name} fused', or only the name; add ' on host' for offloaded states"
        )
        raise ShardwiseError(what, fix=fix)
    if HELD[name].whole and ((variant and not is_history) or is_on_host(optimizer)):
        what = (
            f"{name} looks at whole matrices, whose states stay with the device that updates them, one after the other"
        )
        raise ShardwiseError(f"{optimizer!r}: {what}", fix=f"optimizer={name!r}")
    if is_on_host(optimizer) and not HELD[name].states:
        raise ShardwiseError(f"{name} has no states to offload to the host", fix=f"optimizer={name!r}")
    return name, variant


def may_wait_on_host(optimizer: str) -> bool:
    """Return whether an optimizer has states on the device that could stay in host memory between steps."""
    need = HELD[parse_optimizer(optimizer)[0]]
    return bool(need.states) and not need.whole and not is_on_host(optimizer)


def looks_at_matrices(optimizer: str) -> bool:
    """Return whether one device updates the whole of a parameter that is split."""
    return HELD[parse_optimizer(optimizer)[0]].whole


def looks_together(optimizer: str) -> bool:
    """Return whether every device updates the whole of all parameters."""
    return HELD[parse_optimizer(optimizer)[0]].together


def states_of(optimizer: str) -> int:
    """Return the number of states of a parameter's shape and dtype. ``state_bytes`` counts the others too."""
    name, variant = parse_optimizer(optimizer)
    need = HELD[name]
    return need.states + (need.history * int(variant or _HISTORY) if need.history else 0)


def state_bytes(optimizer: str, num_bytes: int, shape: Sequence[int]) -> int:
    """Return the bytes of the states of a parameter, or of its shard if the optimizer updates shards.

    Args:
        optimizer: The optimizer's text.
        num_bytes: Bytes of the parameter or shard.
        shape: Its shape.
    """
    need, numel = HELD[parse_optimizer(optimizer)[0]], prod(shape)
    total = states_of(optimizer) * num_bytes + need.quantised * (numel + 4 * -(-numel // _BLOCK))
    if need.factors is not None and numel:
        squares = sum(size * size for size in need.factors.dims_of(shape))
        total += need.factors.states * squares * max(4, num_bytes // numel)
    return total


def temporary_bytes(optimizer: str, num_bytes: Sequence[int], *, foreach: bool) -> int:
    """Return the most bytes of temporaries that an update holds, beside those of ``decomposition_bytes``.

    Args:
        optimizer: The optimizer's text.
        num_bytes: Bytes of each parameter, in the order of the update.
        foreach: Whether foreach is the default variant on the device.
    """
    name, variant = parse_optimizer(optimizer)
    need = HELD[name]
    if need.together:
        return need.foreach * sum(num_bytes)
    variant = variant or ("foreach" if foreach and not need.whole else "single")
    if variant == "foreach":
        return need.foreach * sum(num_bytes)
    if variant == "fused":
        return 0
    pairs = pairwise((0, *num_bytes))
    return max((last * size + this * next_size for size, next_size in pairs for last, this in need.single), default=0)


def decomposition_bytes(optimizer: str, parameters: Iterable[Whole]) -> int:
    """Return the most bytes of temporaries while an update decomposes a square matrix of one of these parameters."""
    factors = HELD[parse_optimizer(optimizer)[0]].factors
    if factors is None:
        return 0
    squares = (
        max(4, num_bytes // prod(shape)) * max(factors.dims_of(shape), default=0) ** 2
        for num_bytes, shape in parameters
        if num_bytes
    )
    return _SQUARES_OF_DECOMPOSITION * max(squares, default=0)


def owners_of(matrices: Iterable[tuple[int, int | None]], num_devices: int) -> list[int]:
    """Return which device updates each matrix, given as (size, the device that has its states): that device, or else,
    in order, the one that has the least so far."""
    matrices = list(matrices)
    loads = [sum(size for size, kept in matrices if kept == device) for device in range(num_devices)]
    owners = []
    for size, kept in matrices:
        owners.append(loads.index(min(loads)) if kept is None else kept)
        loads[owners[-1]] += size if kept is None else 0
    return owners


def whole_matrix_bytes(optimizer: str, shards: int, matrices: Sequence[Whole], num_devices: int) -> tuple[int, int]:
    """Return the bytes of states and of temporaries of the device that owns most, for matrices that are split.

    Args:
        optimizer: The text of an optimizer of whole matrices.
        shards: Bytes of the device's shards of them.
        matrices: The whole matrices.
        num_devices: Devices among which the matrices are divided.
    """
    if looks_together(optimizer):
        load = sum(size for size, _ in matrices)
        update = temporary_bytes(optimizer, [size for size, _ in matrices], foreach=False)
        # Whole parameters and gradients stay while a closure computes. Its gradients are gathered in the middle of the
        # update: what is sent to each device, as parts and as one message, what is received, and the new whole ones.
        states = sum(state_bytes(optimizer, *matrix) for matrix in matrices)
        return states + 2 * load, update + 2 * load + 2 * num_devices * shards
    owned: list[list[Whole]] = [[] for _ in range(num_devices)]
    owners = owners_of(((size, None) for size, _ in matrices), num_devices)
    for matrix, owner in zip(matrices, owners, strict=True):
        owned[owner].append(matrix)
    most = [size for size, _ in max(owned, key=lambda of_device: sum(size for size, _ in of_device))]
    load, update = sum(most), temporary_bytes(optimizer, most, foreach=False)
    update += decomposition_bytes(optimizer, matrices)
    # Of gathering: the parameters, then sent (twice: in parts, and as one message), received and whole gradients; of
    # the step: whole tensors and temporaries; of scattering: whole tensors, those sent, and received shards.
    moments = (3 * load + 2 * shards, 2 * load + update, 4 * load + shards)
    return max(sum(state_bytes(optimizer, *matrix) for matrix in of_device) for of_device in owned), max(moments)


@dataclass(frozen=True, slots=True)
class Update:
    """Work of the update of one parameter.

    Attributes:
        passes: Reads and writes of every element, in the parameter's dtype.
        scalars: Elements that the fused kernel handles one by one, at ``Device.scalar_rate``, per element of the
            parameter.
        kernels: Kernels that are launched for this parameter alone. 0: a kernel updates all parameters.
        fresh: Temporaries of the parameter's size.
        whole: Whether one device updates the whole of a parameter that is split.
        products: Newton-Schulz steps (``OptimizerMemory.products``).
        factors: Square matrices of the optimizer.
        together: Whether every device updates the whole of all parameters.
    """

    passes: int
    scalars: float
    kernels: float = 0.0
    fresh: int = 0
    whole: bool = False
    products: int = 0
    factors: Factors | None = None
    together: bool = False

    @property
    def product_dtype(self) -> str:
        """Return the dtype of the products. Decompositions do not reach their rate: this is a lower bound."""
        return "bf16" if self.factors is None else "f32"

    def flops_of(self, shape: Sequence[int]) -> float:
        """Return the FLOPs of the products and decompositions of a parameter's update."""
        if self.factors is not None:
            return self.factors.flops_of(shape)
        if not self.products or len(shape) != 2:
            return 0.0
        m, n = sorted(shape)
        return float(self.products * (4 * m * m * n + 2 * m**3))


# ``Update.scalars`` of the fused kernel per state. Fitted to AdamW in bf16 on an H100: 268 million elements take
# 2.35 ms at 350 G/s. In float32 the kernel is bound by its traffic instead.
_SCALARS_OF_STATE = 1.5
# Reads and writes of one operator of an update: SGD 3 in 1, with momentum 8 in 3, AdamW 20 in 8. On a CPU they take
# 1.6, 5.1 and 17.7 us per tensor of 1,000 elements (2-core AMD EPYC 9005, torch 2.13), fused AdamW 3.4.
_PASSES_OF_KERNEL = 2.5


def update_of(optimizer: str, *, foreach: bool) -> Update:
    """Return the work of an update per parameter. ``foreach``: whether foreach is the device's default variant."""
    name, variant = parse_optimizer(optimizer)
    need = HELD[name]
    variant = variant or ("foreach" if foreach and not need.whole else "single")
    once = 3 + 2 * need.states  # parameter, gradient and states are read, parameter and states written
    # On CPUs foreach, and fused as well, loop over the parameters. LBFGS has all of them in one vector.
    at_once = (foreach and variant != "single" and not need.whole) or need.together
    if variant == "fused":
        return Update(once, _SCALARS_OF_STATE * need.states, kernels=0.0 if at_once else 1.0)
    passes = need.passes or 3 * once
    # LBFGS loops over its history twice, each with an inner product (two reads) and an addition (three) per entry.
    passes += 5 * (states_of(optimizer) - need.states)
    fresh = need.foreach if variant == "foreach" else max((this for _, this in need.single), default=0)
    products = 3 * need.products if need.factors is None else 2 * (need.factors.products + 1)  # of a matrix
    kernels = 0.0 if at_once else passes / _PASSES_OF_KERNEL + products
    return Update(passes, 0.0, kernels, fresh, need.whole, need.products, need.factors, need.together)
