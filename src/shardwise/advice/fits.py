"""``sw.fits``: whether a model fits a cluster, how fast it would train there, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from shardwise.api import plan as find_plan
from shardwise.api import step_memory
from shardwise.costs.cluster import Cluster
from shardwise.costs.flops import flops_of
from shardwise.costs.kernels import DTYPE_NAMES
from shardwise.costs.memory import Memory
from shardwise.errors import ShardwiseError, problem
from shardwise.graph.trees import flatten
from shardwise.plans.example import Example, planned_graph
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.report.options import NUM_SHOWN, Option, Question, changes, mends, tried

SECONDS = 30.0


@dataclass(frozen=True)
class Fits:
    """The answer. ``asked``: the plan as it was asked for, if there is one that fits (then ``memory`` is that of the
    fullest rank). ``options``: the cheapest mends where it does not fit, else the changes that save most, cheapest
    first; ``untried``: those for which there was no time. ``flops``: of the model, a step; ``peak_flops``: what all
    devices could do in the dtype of its products. ``tokens``: of a step, where inputs are token ids.
    ``price_per_hour``: of a device, in any currency."""

    asked: Option
    memory: Memory | None
    flops: float
    peak_flops: float
    tokens: int | None
    options: tuple[Option, ...]
    untried: tuple[str, ...]
    price_per_hour: float | None = None
    limit: float | None = None  # bytes that the tensors of a device may take; None: no limit is known

    @property
    def ok(self) -> bool:
        return self.asked.fits

    def __bool__(self) -> bool:
        return self.ok

    @property
    def step_seconds(self) -> float:
        return self.asked.step_seconds

    @property
    def utilisation(self) -> float:
        """The share of the devices' peak that the model's own FLOPs take (model FLOPs utilisation): what is made again
        does not count."""
        return self.flops / (self.step_seconds * self.peak_flops) if self.step_seconds and self.peak_flops else 0.0

    @property
    def rate(self) -> float:
        """Tokens (or samples, where inputs are no token ids) a second."""
        units = self.tokens or self.asked.samples or 0
        return units / self.step_seconds if self.step_seconds else 0.0

    @property
    def price(self) -> float | None:
        """Of 1e9 tokens (or samples); None: devices have no price."""
        if self.price_per_hour is None or not self.rate:
            return None
        return 1e9 / self.rate / 3600 * self.asked.cluster.num_devices * self.price_per_hour

    def __str__(self) -> str:
        asked, device = self.asked, self.asked.cluster.device
        where = f"{asked.cluster.num_devices} x {device.name}"
        if asked.plan is None or self.memory is None:
            lines = [f"does NOT fit {where}:", *(f"  {line}" for line in asked.refused.split("\n"))]
        else:
            peak, unit = self.memory.peak, "tokens" if self.tokens else "samples"
            limit = "" if self.limit is None else f" of {format_bytes(self.limit)}"
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.parts.items() if size)
            lines = [
                f"fits {where}, {asked.plan.mesh}",
                f"  step {format_seconds(self.step_seconds)}, {self.rate:,.0f} {unit}/s, {self.utilisation:.1%} of the "
                "devices' peak",
                f"  peak {format_bytes(peak.num_bytes)}{limit} a device, in {peak.where}: {parts}",
            ]
            if self.price is not None:
                lines.append(f"  1e9 {unit} cost {self.price:,.2f} at {self.price_per_hour:g} a device and hour")
        lines.append("  what would make it fit:" if not self.ok else "  what would change it:")
        lines += [f"    {line}" for line in map(self._option, self.options)] or ["    nothing that was tried"]
        lines += [f"  not tried, for want of time: {'; '.join(self.untried)}"] if self.untried else []
        return "\n".join(lines)

    def _option(self, option: Option) -> str:
        if option.plan is None:
            return f"{option.what}: does not fit"
        figures = f"step {format_seconds(option.step_seconds)}, peak {format_bytes(option.peak_bytes)}"
        if not self.ok:
            return f"{option.what}: {figures}"
        share = option.price / self.asked.price - 1
        return f"{option.what}: {abs(share):.1%} {'less' if share < 0 else 'more'} device time a sample, {figures}"

    def as_data(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        asked, peak = self.asked, None if self.memory is None else self.memory.peak
        return {
            "fits": self.ok,
            "refused": asked.refused or None,
            "devices": asked.cluster.num_devices,
            "mesh": None if asked.plan is None else dict(asked.plan.mesh.axes),
            "step_seconds": self.step_seconds or None,
            "tokens_per_second": self.rate if self.tokens else None,
            "samples_per_second": asked.samples / self.step_seconds if asked.samples and self.step_seconds else None,
            "model_flops_utilisation": self.utilisation or None,
            "price_of_1e9": self.price,
            "peak_bytes": None if peak is None else peak.num_bytes,
            "limit_bytes": self.limit,
            "peak_at": None if peak is None else peak.where,
            "peak_parts": None if peak is None else {k: v for k, v in peak.parts.items() if v},
            "options": [
                {
                    "what": option.what,
                    "fits": option.fits,
                    "step_seconds": option.step_seconds or None,
                    "peak_bytes": option.peak_bytes or None,
                    "device_seconds_per_sample": option.price or None,
                }
                for option in self.options
            ],
            "untried": list(self.untried),
        }


def fits(
    module: nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    seconds: float = SECONDS,
    price_per_hour: float | None = None,
    **settings: Any,
) -> Fits:
    """Whether ``module`` trains on ``cluster`` (a name, such as ``"h100-2x8"``, will do), how fast, in how much memory,
    and what would mend or improve it. Nothing is allocated where parameters and inputs are meta tensors.

    ``settings``: those of ``sw.plan`` (``global_batch``, ``precision``, ``optimizer``, ...). If it fits, the changes
    that save most device time per sample: another batch, computing in bfloat16, other recomputation, more devices,
    other meshes. If not, what makes it fit, the fewest device-seconds per sample first: the batch in passes, bfloat16,
    the optimizer's states on the host, more devices, a smaller batch. Each is planned in full; those that ``seconds``
    leave no time for are named. ``price_per_hour``: of a device, for the price of 1e9 tokens. Raises as ``sw.plan``
    does, but for a plan that does not fit.
    """
    local = isinstance(cluster, int)  # devices that nobody described have the memory it takes
    if isinstance(cluster, (str, int)):
        cluster = Cluster.load(cluster) if isinstance(cluster, str) else Cluster.local(cluster)
    if local:
        settings = {"memory_bytes": inf, **settings}
    question = Question.of(find_plan, module, example_inputs, kwargs, cluster, {**settings, "loss": loss})
    asked = question.planned("")
    if asked.plan is not None and asked.plan.predicted is None:
        raise ShardwiseError(
            problem(
                "sw.fits answers from prices, and a plan of these settings has none (stages, a mode, or strategies "
                "that are completed without a search)",
                fix='leave them out, or add search="dynamic_programming"; of stages print(sw.plan(...)) tells the same',
            )
        )
    flops = peak = 0.0
    memory = None
    if asked.plan is None:
        options, untried = tried(mends(question), seconds, lambda found: sum(o.fits for o in found) >= 2 * NUM_SHOWN)
        best = sorted((option for option in options if option.fits), key=lambda option: option.price)
    else:
        call = Example(module, (question.args, dict(question.kwargs)), loss, precision=asked.plan.precision)
        graph = planned_graph(call, asked.plan)
        for op in graph.ops:
            shapes = [tuple(graph.by_name[name].shape) for name in op.operands]
            needed = sum(
                graph.by_name[n].requires_grad and len(s) > 1 for n, s in zip(op.operands, shapes, strict=True)
            )
            own = flops_of(op, tuple(shapes), tuple(tuple(graph.by_name[name].shape) for name in op.results))
            flops += own * (1 + needed) * asked.plan.micro_batches
            if own:
                name = DTYPE_NAMES.get(graph.by_name[op.operands[0]].dtype, "f32")
                peak = max(peak, cluster.device.peak_flops(name) * cluster.num_devices)
        memory = step_memory(module, example_inputs, asked.plan, kwargs=kwargs, loss=loss)
        options, untried = tried(changes(question, asked.plan), seconds, lambda found: False)
        better = [option for option in options if option.fits and option.price < asked.price]
        best = sorted(better, key=lambda option: option.price)
    tokens = _tokens(question, asked)
    limit = question.settings.get("memory_bytes", inf if local else cluster.device.usable_bytes)
    limit = None if limit == inf else limit
    return Fits(asked, memory, flops, peak, tokens, tuple(best[:NUM_SHOWN]), tuple(untried), price_per_hour, limit)


def _tokens(question: Question, asked: Option) -> int | None:
    """The token ids of a step: integers with samples and positions in the first input that has both."""
    for leaf in flatten((question.args, dict(question.kwargs)))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return leaf.numel() // leaf.shape[0] * (asked.samples or leaf.shape[0])
    return None
