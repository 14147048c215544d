"""Asks one GPU what only a GPU can say, in ten minutes at most: every answer is a line of JSON.

``make bench-gpu-run``. Each part is a process of its own with a limit of its own, in order of worth: one that fails or
hangs costs its limit, and says so. Lines go to the terminal and to ``--json``.

Run ``python benchmarks/gpu_run.py [--only equal copies] [--seconds 420]``. Without a GPU: ``--dry`` runs every part
with tiny sizes on the CPU, which shows that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines operators
from gpu_steps import MODELS, training_step
from late_ranks import SPLIT
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.graph.float8 import PRODUCTS
from shardwise.graph.head_loss import FEWEST_LOGITS
from shardwise.runtime.single_rank import run_alone

MARK = "@@"  # ahead of a line of a part
# Losses in float32 of the same arithmetic in another order; gradients of norms with few terms round most.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 1e-2
STEPS, TIMED_STEPS = 3, 10
Lines = Iterator[Mapping[str, Any]]


@dataclass(frozen=True)
class Here:
    """Where a part runs, with small sizes or not."""

    tiny: bool
    kind: str = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.is_gpu else None

    def seconds(self, act: Callable[[], object], times: int = TIMED_STEPS) -> float:
        """Return the seconds of a call, over several after one that warms up."""
        act()
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            act()
        self.wait()
        return (time.perf_counter() - start) / times


@dataclass(frozen=True)
class Setting:
    """A way to train. ``plan``, ``parallelize``: arguments of these functions."""

    name: str
    model: str = "llama"
    plan: Mapping[str, Any] = field(default_factory=dict)
    parallelize: Mapping[str, Any] = field(default_factory=dict)


SETTINGS = (
    *(Setting(model, model) for model in ("gpt2", "llama", "vit", "bert")),
    Setting("recompute all", plan={"recompute": "full"}),
    Setting("ZeRO 3", plan={"mode": "data_parallel", "zero": 3}),
    Setting("offload", plan={"offload": "all"}),
    Setting("states on the host", plan={"optimizer": "adamw on host"}),
    Setting("two micro-batches", plan={"global_batch": 2, "micro_batch": 1}),
    Setting("compiled", parallelize={"compile": True}),
)


def environment(here: Here) -> Lines:
    """Versions, and the device as the library sees it."""
    yield {"torch": torch.__version__, "python": platform.python_version(), "shardwise": sw.__version__}
    if here.is_gpu:
        found = torch.cuda.get_device_properties(0)
        yield {"gpu": found.name, "bytes": found.total_memory, "nccl": torch.cuda.nccl.version()}
        one = torch.ones(8, device=here.device)
        dist.all_reduce(one)  # a real message of NCCL, of the only rank
        yield {"backend": dist.get_backend(), "ok": bool((one == 1).all())}
    yield {"cluster": sw.Cluster.local(1).name, "usable_bytes": sw.Cluster.local(1).device.usable_bytes}


def equal(here: Here) -> Lines:
    """Losses, and gradients of the first step, beside plain PyTorch in float32: small models, every kind of plan."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for setting in SETTINGS:
        torch.manual_seed(0)
        model, inputs = MODELS[setting.model](True)
        inputs = {k: v.to(here.device, torch.float32 if v.is_floating_point() else v.dtype) for k, v in inputs.items()}
        alone = model.to(here.device, torch.float32).train()
        plan = sw.plan(copy.deepcopy(alone), inputs, 1, mesh=sw.Mesh(dp=1), **setting.plan)
        par = sw.parallelize(
            copy.deepcopy(alone), plan, device=here.device, **{"compile": False, **setting.parallelize}
        )
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (alone, par)]
        losses, worst = [], 0.0
        for step in range(STEPS):
            expected = alone(**inputs).loss
            expected.backward()
            found = par.step(**inputs)
            losses.append((found.item(), expected.item()))
            if not step:
                gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
                own = {name: p.grad for name, p in par.named_parameters()}
                worst = max(_distance(own[name], gradient) for name, gradient in gradients.items())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ok = worst <= GRADIENT_TOLERANCE and all(abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in losses)
        yield {"setting": setting.name, "model": setting.model, "ok": ok, "losses": losses, "worst_gradient": worst}
        here.free()


def _distance(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def peaks(here: Here) -> Lines:
    """Bytes at the peak of a step beside the prediction, and seconds beside the simulated ones."""
    for name in ("gpt2", "llama"):
        torch.manual_seed(0)
        model, inputs = MODELS[name](here.tiny)
        model = model.to(here.device, torch.bfloat16).train()
        inputs = {key: value.to(here.device) for key, value in inputs.items()}
        plan = sw.plan(model, inputs, sw.Cluster.local(1), recompute="none").plan
        par = sw.parallelize(model, plan, compile=False, device=here.device)
        step = training_step(lambda par=par, inputs=inputs: par.step(**inputs), par, here.device)
        step()
        here.free()
        seconds, predicted = here.seconds(step), plan.predicted
        assert predicted is not None, "it was planned for a cluster"
        yield {"model": name, "seconds": seconds, "predicted_seconds": predicted.simulated_seconds}
        yield {"model": name, "peak_bytes": here.peak_bytes, "predicted_peak_bytes": predicted.peak_bytes}
        del model, par, step


def head_loss(here: Here) -> Lines:
    """A head with its cross entropy as one operator beside both: seconds, bytes at the peak, the distance of losses."""
    vocab, width, tokens = (512, 32, 64) if here.tiny else (131_072, 4096, 8192)
    for fused in (False, True):
        here.free()
        torch.manual_seed(0)
        dtype = torch.float32 if here.tiny else torch.bfloat16
        head = nn.Linear(width, vocab, bias=False).to(here.device, dtype)
        hidden = torch.randn(tokens, width, device=here.device, dtype=dtype)
        labels = torch.randint(vocab, (tokens,), device=here.device)
        with _heads_fused_from(0 if fused else sys.maxsize):
            par = sw.parallelize(
                head, sw.plan(head, (hidden, labels), 1, mesh=sw.Mesh(dp=1), loss=F.cross_entropy),
                loss=F.cross_entropy, compile=False, device=here.device,
            )  # fmt: skip
            loss = par.step(hidden, labels).item()
            seconds = here.seconds(partial(par.step, hidden, labels))
        peak = here.peak_bytes
        del head, hidden, labels, par  # before the next round counts its own
        yield {"fused": fused, "loss": loss, "seconds": seconds, "peak_bytes": peak}


@contextlib.contextmanager
def _heads_fused_from(logits: int) -> Iterator[None]:
    from shardwise.graph import head_loss

    head_loss.FEWEST_LOGITS = logits
    try:
        yield
    finally:
        head_loss.FEWEST_LOGITS = FEWEST_LOGITS


def float8(here: Here) -> Lines:
    """Two layers in bfloat16 and in float8: seconds of forward and backward, and the loss."""
    width, tokens = (32, 64) if here.tiny else (8192, 16384)
    for products in (None, *PRODUCTS):
        here.free()
        torch.manual_seed(0)
        layers = (nn.Linear(a, b, bias=False) for a, b in ((width, 4 * width), (4 * width, width)))
        module = nn.Sequential(*layers).to(here.device, torch.bfloat16)
        x = torch.randn(tokens, width, device=here.device, dtype=torch.bfloat16)
        batch, precision = (x, x), sw.Precision(products=products)
        settings = {"mesh": sw.Mesh(dp=1), "loss": F.mse_loss, "precision": precision}
        par = sw.parallelize(
            module, sw.plan(module, batch, 1, **settings), loss=F.mse_loss, compile=not here.tiny, device=here.device
        )
        loss = par.step(*batch).item()
        seconds = here.seconds(partial(par.step, *batch))
        peak = here.peak_bytes
        del module, x, batch, par  # before the next round counts its own
        yield {"products": products or "bfloat16", "loss": loss, "seconds": seconds, "peak_bytes": peak}


def fused_products(here: Here) -> Lines:
    """What dividing products costs that run beside messages (``row_chunks``): whole, in two chunks, in eight parts as
    the fused operators have them, and by such an operator in a group of this rank alone, which copies and meets but
    sends nothing. What overlaps is for several GPUs to say."""
    rows, width, outputs = (64, 16, 24) if here.tiny else (8192, 4096, 1536)
    left = torch.randn(rows, width, device=here.device, dtype=torch.bfloat16)
    right = torch.randn(width, outputs, device=here.device, dtype=torch.bfloat16)

    def divided(parts: int) -> list[Tensor]:
        return [part @ right for part in left.chunk(parts)]

    line: dict[str, Any] = {f"parts_{parts}": here.seconds(partial(divided, parts)) for parts in (1, 2, 8)}
    if here.is_gpu:
        call = torch.ops.symm_mem.fused_all_gather_matmul
        try:
            (made,) = call(left, [right], 0, dist.group.WORLD.group_name)[1]
            line["ok"] = bool(torch.allclose(made, left @ right))
            line["operator"] = here.seconds(partial(call, left, [right], 0, dist.group.WORLD.group_name))
        except (RuntimeError, AttributeError) as error:
            line["operator_failed"] = str(error)[:500]
    yield {"rows": rows, "width": width, "outputs": outputs, **line}


def copies(here: Here) -> Lines:
    """Bytes per second between the host and the device, from pageable and from pinned memory."""
    num_bytes = 2**20 if here.tiny else 2**30
    for pinned in (False, True):
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned and here.is_gpu)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=here.device)
        to_device = here.seconds(lambda h=host, t=there: t.copy_(h, non_blocking=True))
        to_host = here.seconds(lambda h=host, t=there: h.copy_(t, non_blocking=True))
        yield {"pinned": pinned, "to_device": num_bytes / to_device, "to_host": num_bytes / to_host}
    yield {"assumed": sw.Cluster.local(1).device.host_bandwidth}


def waits(here: Here) -> Lines:
    """How often the host waits for the GPU in a step, update included: torch says so itself."""
    for name in ("gpt2", "llama", "vit"):
        torch.manual_seed(0)
        model, inputs = MODELS[name](True)
        model, inputs = model.to(here.device).train(), {key: value.to(here.device) for key, value in inputs.items()}
        par = sw.parallelize(model, sw.plan(model, inputs, 1, mesh=sw.Mesh(dp=1)), compile=False, device=here.device)
        optimizer = torch.optim.AdamW(par.parameters(), fused=True)

        def step(par: sw.Parallel = par, optimizer: Any = optimizer, inputs: Any = inputs) -> None:
            par.step(**inputs)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(STEPS):  # the first captures, and makes the states of the optimizer
            step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if here.is_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            step()
            if here.is_gpu:
                torch.cuda.set_sync_debug_mode("default")
        found = [
            f"{Path(one.filename).name}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message)
        ]
        yield {"model": name, "ok": not found, "waits": found}


def graphs(here: Here) -> Lines:
    """Steps that the host limits: eager, compiled, and with CUDA graphs, which must have the losses of the compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def small(tiny: bool) -> tuple[nn.Module, dict[str, Tensor]]:
        ids = torch.randint(50257, (1, 128))
        config = GPT2Config(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
        return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}

    models = {name: MODELS[name] for name in ("gpt2", "llama")} | ({} if here.tiny else {"gpt2, 1 x 128 tokens": small})
    ways = (False, True, "graphs") if here.is_gpu else (False,)  # a CPU has no graphs
    for name, build in models.items():
        losses: dict[Any, list[float]] = {}
        seconds: dict[str, float] = {}
        for way in ways:
            here.free()
            torch.manual_seed(0)
            model, inputs = build(True)
            model, inputs = model.to(here.device).train(), {key: x.to(here.device) for key, x in inputs.items()}
            plan = sw.plan(model, inputs, 1, mesh=sw.Mesh(dp=1))
            par = sw.parallelize(model, plan, compile=way, device=here.device)
            step = training_step(lambda par=par, inputs=inputs: par.step(**inputs), par, here.device)
            losses[way] = [step().item() for _ in range(STEPS)]
            seconds[{False: "eager", True: "compiled"}.get(way, "graphs")] = here.seconds(step)
            peak = here.peak_bytes
            del model, par, step
        ok = losses[ways[-1]] == losses.get(True, losses[False])
        yield {"model": name, "ok": ok, "losses": losses[ways[-1]], "seconds": seconds, "peak_bytes": peak}


def late(here: Here) -> Lines:
    """Four ranks on this one device whose messages are late (``late_ranks.py``): races would change the losses."""
    script, size = Path(__file__).with_name("late_ranks.py"), 2 if here.tiny else 4
    cases = ["--cases", "tensor parallel, ZeRO 3"] if here.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), "--size", str(size), "--store", f"{folder}/store"]
        command += ["--device", here.kind, *cases]
        others = [
            subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.DEVNULL) for rank in range(1, size)
        ]
        try:
            done = subprocess.run([*command, "--rank", "0"], capture_output=True, text=True, check=False)
        finally:
            for other in others:
                other.kill()
                other.wait()
    yield from map(json.loads, done.stdout.splitlines())
    if done.returncode:
        yield {"ok": False, "failed": done.stderr[-1000:]}


def rank_programs(here: Here) -> Lines:
    """The program of one rank of plans for 8 and 64 devices, without messages, beside its prediction."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.destroy_process_group()  # one rank alone is no rank of a job
    for axes, cluster in (({"dp": 2, "tp": 4}, "h100-1x8"), ({"dp": 8, "tp": 8}, "h100-8x8")):
        width, heads, length, vocab = (64, 8, 32, 512) if here.tiny else (4096, 32, 8192, 128_256)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=4, num_attention_heads=heads,
            num_key_value_heads=8, vocab_size=vocab, max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
            ids = torch.zeros(axes["dp"], length, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        mesh, zero = sw.Mesh(**axes), {"strategies": SPLIT, "zero": 3}
        plan = sw.plan(model, batch, sw.Cluster.load(cluster), mesh=mesh, **zero).plan
        for compiled in (False, True) if not here.tiny else (False,):
            here.free()
            rank = plan.num_ranks // 2
            found = run_alone(model, batch, plan, rank, device=here.device, compile=compiled, steps=STEPS)
            (seconds, predicted), (peak, expected) = found.step_seconds, found.peak_bytes
            yield {"devices": plan.num_ranks, "compiled": compiled, "seconds": seconds, "predicted_seconds": predicted}
            yield {"devices": plan.num_ranks, "peak_bytes": peak, "predicted_peak_bytes": expected}
            yield {"largest_differences": [(row.part, row.name, row.measured, row.predicted) for row in found.rows[:5]]}


def steps(here: Here) -> Lines:
    """Steps of transformers models beside plain PyTorch's, eager and compiled (``gpu_steps.py``)."""
    script = Path(__file__).with_name("gpu_steps.py")
    for name in ("gpt2", "llama", "vit", "mixtral"):
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "steps.json"
            size = ["--tiny", "--device", "cpu", "--rounds", "2"] if here.tiny else ["--rounds", "20"]
            command = [sys.executable, str(script), "--models", name, "--json", str(kept), *size]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                yield {"model": name, "failed": done.stderr[-1000:]}
                continue
            (seconds,) = json.loads(kept.read_text())["seconds"].values()
            yield {"model": name, "medians": {who: sorted(all_)[len(all_) // 2] for who, all_ in seconds.items()}}


PARTS: Mapping[str, tuple[Callable[[Here], Lines], int]] = {  # with limits in seconds
    "environment": (environment, 60),
    "equal": (equal, 120),
    "peaks": (peaks, 90),
    "head_loss": (head_loss, 60),
    "float8": (float8, 60),
    "fused_products": (fused_products, 30),
    "copies": (copies, 30),
    "waits": (waits, 60),
    "graphs": (graphs, 120),
    "late": (late, 120),
    "rank_programs": (rank_programs, 120),
    "steps": (steps, 300),
}


def run_part(name: str, here: Here) -> None:
    """Print the lines of a part, in this process."""
    warnings.simplefilter("ignore")
    sw.init_ranks()
    for line in PARTS[name][0](here):
        print(MARK + json.dumps({"part": name, **line}), flush=True)


def run_parts(names: list[str], dry: bool, seconds: float) -> Lines:
    """Yield the lines of parts, each in a process of its own, and how each ended."""
    began = time.monotonic()
    for name in names:
        start = time.monotonic()
        limit = min(PARTS[name][1] * (4 if dry else 1), seconds - (start - began))
        if limit <= 0:
            yield {"part": name, "ended": "skipped: no time is left"}
            continue
        command = [sys.executable, __file__, "--part", name, *(["--dry"] if dry else [])]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                out, errors = process.communicate(timeout=limit)
                ended = "well" if not process.returncode else f"with exit code {process.returncode}: {errors[-2000:]}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                out, errors = process.communicate()
                ended = f"at its limit of {limit:.0f} s: {errors[-2000:]}"
        yield from (json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK))
        yield {"part": name, "ended": ended, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=600.0, help="of all parts")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the lines")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no GPU: --dry runs every part on the CPU")
    if options.part:
        run_part(options.part, Here(options.dry, "cpu" if options.dry else "cuda"))
        return
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.json.open("w")) if options.json else None
        failed = False
        for line in run_parts(options.only, options.dry, options.seconds):
            print(json.dumps(line), flush=True)
            if file is not None:
                print(json.dumps(line), file=file, flush=True)
            failed |= line.get("ended", "well") != "well" or line.get("ok") is False
    sys.exit(failed)


if __name__ == "__main__":
    main()
