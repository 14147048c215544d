"""Times training steps of mixtures of experts on gloo ranks: expert parallelism by hand, and plans of ours.

Every run has its own ranks, as in ``step_time``: all contenders train the same model from the same weights, must agree
on the losses, and take turns. The first is expert parallelism as a careful engineer writes it: a rank has its share of
the experts; rows sorted by expert go to the ranks of their experts (``all_to_all_single``), where the blocks that
arrive are put into the order of the experts; results return the same way. What is no expert is data parallel. Ours is
that plan (``K@ep``), the plan that gathers all tokens and adds up the results, and data parallelism, where every rank
has all experts. ``sent / by hand``: the elements of rows that a step sends to other ranks, over the least: the first
contender sends every row that leaves its rank, times the width, there and back, in forward and in backward.

One rank is one process without a plan's exchanges. Its baseline is the module itself, which computes as transformers'
mixtures do.

Run ``python benchmarks/experts.py [--ranks 1 2 4] [--experts 8 32] [--width 512] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every rank

import torch
import torch.distributed as dist
from hand_written import Buckets
from rich.console import Console
from rich.table import Table
from step_time import LOSS_STEPS, TIMEOUT, check_losses, commit, quartiles, ratios, result_of_ranks, slowest, take_turns
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.launch.ranks import keep_freed_memory

TOP = 2  # experts of a token
VOCAB = 1024
TARGET = 1.05

TrainStep = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    num_ranks: int
    experts: int
    width: int
    layers: int
    batch: int
    time: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a run measured, by contender. ``sent``: elements of rows sent to other ranks in a step, on all ranks."""

    job: Job
    losses: Mapping[str, list[float]]
    seconds: Mapping[str, list[float]]
    cpu_seconds: Mapping[str, list[float]]
    sent: Mapping[str, int]


# -- the model ---------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Gated experts, computed as transformers does: rows sorted by expert, grouped products, back."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.count = experts
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        keys, order = chosen.flatten().sort(stable=True)
        ends = torch.histc(keys.float(), self.count, 0, self.count - 1).cumsum(0).int()
        return self.add_up(self.products(rows[order // TOP], ends), order, weights)

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows sorted by expert; those of expert i end before ``ends[i]``."""
        gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)

    def add_up(self, results: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        weighted = results * weights.flatten()[order].unsqueeze(-1)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return weighted[inverse].view(len(weights), TOP, -1).sum(1)


class Mixture(nn.Module):
    """A layer: a dense product, a router, and experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.mix, self.router = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, experts)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.mix(self.norm(x)).flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        return x + self.experts(rows, weights / weights.sum(-1, keepdim=True), chosen).view_as(x)


class Model(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, job.width), nn.Linear(job.width, VOCAB)
        self.layers = nn.ModuleList(Mixture(job.width, job.experts) for _ in range(job.layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# -- by hand -----------------------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, ``sent[i]`` to rank i; their cotangents come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.counts = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows, received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad.contiguous(), *ctx.counts), None, None


class _SplitExperts(Experts):
    """Experts of which a rank has an equal part."""

    def forward(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        size, flat = dist.get_world_size(), chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.count)
        of_senders = torch.empty_like(counts)
        dist.all_to_all_single(of_senders, counts)
        both = torch.cat((counts, of_senders)).view(2, size, -1)
        (sent, received), blocks = both.sum(-1).tolist(), both[1].tolist()
        arrived = _Exchange.apply(rows[order // TOP], sent, received)
        local = range(self.count // size)
        parts = arrived.split([n for row in blocks for n in row])  # by sender, then by expert
        by_expert = torch.cat([parts[s * len(local) + e] for e in local for s in range(size)])
        results = self.products(by_expert, both[1].sum(0).cumsum(0).int())
        parts = results.split([row[e] for e in local for row in blocks])
        by_sender = torch.cat([parts[e * size + s] for s in range(size) for e in local])
        return self.add_up(_Exchange.apply(by_sender, received, sent), order, weights)


def by_hand(model: Model, job: Job, batch: tuple[Tensor, Tensor]) -> TrainStep:
    rank, size = dist.get_rank(), job.num_ranks
    split = [module for module in model.modules() if isinstance(module, Experts)]
    for experts in split:
        experts.__class__ = _SplitExperts
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
    of_experts = {id(parameter) for experts in split for parameter in experts.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in of_experts]
    buckets, share = Buckets(dense, dist.group.WORLD), torch.tensor(1 / size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids.chunk(size)[rank], labels.chunk(size)[rank])
        mean = loss.detach() * share
        work = dist.all_reduce(mean, async_op=True)
        loss.backward(share)
        buckets.wait()
        work.wait()
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


# -- the others --------------------------------------------------------------------------------------------------------


def plain(model: Model, job: Job, batch: tuple[Tensor, Tensor]) -> TrainStep:
    return _train(model, model)


def _train(module: Any, of: nn.Module) -> TrainStep:
    optimizer = torch.optim.AdamW(of.parameters(), lr=1e-4)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        if isinstance(module, sw.Parallel):
            loss = module.step(ids, labels)
        else:
            loss = module(ids, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def planned(strategy: str, *, gathers: bool = False) -> Callable[[Model, Job, tuple[Tensor, Tensor]], TrainStep]:
    """A plan whose experts have a strategy; without one, data parallelism."""

    def build(model: Model, job: Job, batch: tuple[Tensor, Tensor]) -> TrainStep:
        plan = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            settings: dict[str, Any] = {"mode": "stand_alone" if job.num_ranks == 1 else "data_parallel"}
            if strategy:
                settings = {"strategies": {"layers.*.experts": strategy}, "search": "sharding_propagation"}
            with _no_keyed_rows() if gathers else nullcontext():
                plan = sw.plan(model, batch, job.num_ranks, mesh=sw.Mesh(ep=job.num_ranks), **settings)
            kinds = {collective.kind for collective in plan.collectives()}
            assert ("row_exchange" in kinds) == bool(strategy and not gathers), kinds
        par = sw.parallelize(model, plan)
        return _train(par, par)

    return build


@contextmanager
def _no_keyed_rows() -> Iterator[None]:
    """Plan as if no rows could follow keys: tokens are gathered."""

    def without(graph: Any, rules: Mapping[str, Any], imbalance: float) -> dict[str, Any]:
        return {name: replace(rule, keyed=None) for name, rule in rules.items()}

    with patch("shardwise.search.user_choices.with_keyed_rows", without):
        yield


ON_RANKS = {
    "by hand": by_hand,
    "by hand, again": by_hand,
    "ours, rows travel": planned("K@ep"),
    "ours, rows are gathered": planned("e@ep", gathers=True),
    "ours, data parallel": planned(""),
}
ALONE = {"plain": plain, "plain, again": plain, "ours": planned("")}


# -- in a rank ---------------------------------------------------------------------------------------------------------


def rank_main(rank: int, job: Job, folder: str) -> None:
    """What every rank does; rank 0 leaves the result in ``folder``."""
    torch.set_num_threads(1)
    keep_freed_memory(os.environ)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=job.num_ranks, timeout=TIMEOUT
    )
    torch.manual_seed(0)
    whole = Model(job)
    batch = torch.randint(VOCAB, (job.batch, job.time)), torch.randint(VOCAB, (job.batch, job.time))
    contenders = ALONE if job.num_ranks == 1 else ON_RANKS
    steps = {name: build(copy.deepcopy(whole), job, batch) for name, build in contenders.items()}
    losses = {name: [step(*batch).item() for _ in range(LOSS_STEPS)] for name, step in steps.items()}
    check_losses(losses)
    sent = {name: _rows_sent(step, batch) for name, step in steps.items()}
    gc.collect()
    gc.freeze()
    seconds, cpu_seconds = (slowest(own) for own in take_turns(steps, batch, job.rounds))
    if rank == 0:
        torch.save(Result(job, losses, seconds, cpu_seconds, sent), f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def _rows_sent(step: TrainStep, batch: tuple[Tensor, Tensor]) -> int:
    """The elements of float rows that all ranks send to others by all-to-all in a step."""
    sent, send, rank = 0, dist.all_to_all_single, dist.get_rank()

    def counted(output: Tensor, input: Tensor, received: Any = None, sends: Any = None, **options: Any) -> Any:
        nonlocal sent
        if input.dim() == 2 and sends is not None and output.is_floating_point():
            sent += (sum(sends) - sends[rank]) * input.shape[1]
        return send(output, input, received, sends, **options)

    with patch.object(dist, "all_to_all_single", counted):
        step(*batch)
    total = torch.tensor(sent)
    dist.all_reduce(total)
    return int(total)


# -- in the script -----------------------------------------------------------------------------------------------------


def title(job: Job) -> str:
    return f"{job.num_ranks} rank{'s' * (job.num_ranks > 1)}, {job.experts} experts"


def time_table(results: Sequence[Result]) -> Table:
    """One line per contender of every run."""
    table = Table(title="a training step, and its ratio to the first contender's, round by round")
    for heading in ("run", "contender", "median ms", "ratio", "quartiles", "target", "CPU ratio", "sent / by hand"):
        table.add_column(heading, justify="left" if heading in ("run", "contender") else "right", no_wrap=True)
    for result in results:
        least = next(iter(result.sent.values()))
        for index, name in enumerate(result.seconds):
            low, ratio, high = quartiles(ratios(result.seconds, name))
            is_ours = name in ("ours", "ours, rows travel")
            table.add_row(
                title(result.job) if index == 0 else "",
                name,
                f"{1000 * median(result.seconds[name]):.1f}",
                f"{ratio:.3f}",
                f"{low:.3f} - {high:.3f}",
                f"{TARGET} {'met' if ratio <= TARGET else 'missed'}" if is_ours else "",
                f"{median(ratios(result.cpu_seconds, name)):.3f}",
                f"{result.sent[name] / least:.3f}" if result.sent[name] else "",
            )
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples in the whole batch")
    parser.add_argument("--time", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=15, help="steps of every contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep everything measured")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: list[Result] = []
    for num_ranks in options.ranks:
        for experts in options.experts:
            start = time.perf_counter()
            job = Job(num_ranks, experts, options.width, options.layers, options.batch, options.time, options.rounds)
            results.append(result_of_ranks(rank_main, job, num_ranks))
            print(f"{title(job)}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
            if options.json:
                runs = [asdict(result) for result in results]
                options.json.write_text(json.dumps({"torch": torch.__version__, "commit": commit(), "runs": runs}))
    console.print(time_table(results))


if __name__ == "__main__":
    main()
