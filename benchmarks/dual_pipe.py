"""A step of DeepSeek-V3 as its software runs it, for ``known_answers.py``.

A plan of the same layers says how long the kernels of one take, operator by operator as the model is written. The rest
is closed form, as DeepSeek-AI 2024 (arXiv:2412.19437) describes it:

* Tokens go to at most four nodes, over the network once to each, and from there inside of the node (section 3.2.2):
  forward and the cotangents back in float8 with a scale of four bytes for 128 numbers, results in bfloat16 (3.3.3).
* DualPipe (3.2.1) runs forward of a micro-batch beside backward of another, and exchanges beside both: such a pair
  takes what kernels take or what exchanges take, whichever is longer. 20 of 132 multiprocessors exchange (3.2.2). Its
  bubble is ``(places / 2 - 1) (FB + B - 3W)``, of the pair FB, a whole backward B, gradients of weights W (table 2).
* Backward computes norms, the up-projections of latent attention and the SwiGLU again (3.2.3, 3.3.3).
* Products in float8 read and write their operands and results once more, to be scaled and cast.

Assumed: W are the products of forward once more; the fullest place has as many layers as all have on average, rounded
up, each a mixture of experts, and none has more work with embedding, head and the second prediction, which are left
out. Kernels that DeepSeek fused (norms, rotary embeddings, SwiGLU) are priced one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.kernels import KernelWork
from shardwise.costs.memory import busiest_program
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import Event, simulate_program
from shardwise.layouts.mesh import Mesh
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache

# Of forward, what backward computes again (of a norm and a SwiGLU one kernel, as if it were one), and what is a product
# of weights; by the names of operators.
AGAIN = re.compile(r"(q_b|kv_b)_proj/linear|norm/mul_1$|experts/mul$")
OF_WEIGHTS = re.compile(r"proj/linear|/grouped_mm")
COMPUTING = (132 - 20) / 132
SCALE_BYTES = 4 / 128


class Float8Prices(Prices):
    """Prices of products whose operands and results are moved once more. A subclass without fields of its own."""

    def kernel(self, work: KernelWork) -> float:
        cast = self.moved(work.num_bytes) if work.flops and not work.kind and work.dtype == "bf16" else 0.0
        return super().kernel(work) + cast


def events_of(spmd: SpmdProgram, cluster: Cluster, mesh: Mesh, passes: int) -> tuple[Event, ...]:
    """Return the kernels and messages of a pass of the busiest rank, of many passes that add their gradients up."""
    prices = Float8Prices(Links(cluster, mesh), "adamw fused", passes)
    return simulate_program(busiest_program(spmd, VjpCache()), prices).events


@dataclass(frozen=True, slots=True)
class Layer:
    """Seconds of a layer and a micro-batch: its kernels of forward and backward, what of forward is computed again, the
    gradients of weights; and those of its messages of parameters, which a step has once."""

    forward: float
    backward: float
    again: float
    weights: float
    once: float

    @staticmethod
    def of(events: Sequence[Event], scope: str, num_layers: int) -> Layer:
        """Return the layer of a scope. ``num_layers``: of the model, which share its messages of parameters."""

        def seconds(part: str, pattern: re.Pattern[str] = re.compile("")) -> float:
            own = (e for e in events if e.part == part and not e.stream and scope in e.name and pattern.search(e.name))
            return sum(event.seconds for event in own)

        once = sum(event.seconds for event in events if event.stream and event.name != "row_exchange") / num_layers
        forward, backward = seconds("forward"), seconds("backward")
        return Layer(forward, backward, seconds("forward", AGAIN), seconds("forward", OF_WEIGHTS), once)


@dataclass(frozen=True, slots=True)
class DualPipe:
    """``tokens``: of a device and micro-batch; ``nodes``: that have experts; ``reached``: to how many of them a token
    goes at most."""

    places: int
    layers: int
    micro_batches: int
    tokens: int
    width: int
    nodes: int
    reached: int

    def exchange(self, cluster: Cluster, itemsize: float) -> float:
        """Return the seconds in which all tokens go to, or come from, the nodes of their experts."""
        others = self.reached * (1 - 1 / self.nodes)
        network = cluster.levels[-1]
        return network.latency + self.tokens * others * self.width * itemsize / network.bandwidth

    def seconds(self, layer: Layer, cluster: Cluster) -> float:
        """Return the seconds of a step."""
        exchanges = self.exchange(cluster, 1 + SCALE_BYTES) + self.exchange(cluster, 2)  # in either direction
        backward = layer.again + layer.backward
        pair = max((layer.forward + backward) / COMPUTING, 2 * exchanges)
        bubble = (self.places // 2 - 1) * (pair + backward + exchanges - 3 * layer.weights)
        layers = -(-self.layers // self.places)
        return layers * (self.micro_batches * pair + bubble + layer.once)
