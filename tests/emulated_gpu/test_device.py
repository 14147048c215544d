"""What the emulated GPU itself refuses, counts and finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.gloo_ranks import RunRanks


def races_of(work: Callable[[], Any]) -> list[str]:
    from emulated_gpu.device import record

    record.clear()
    work()
    return [race.partition(" [")[0] for race in record.races]


def waits_of(work: Callable[[], Any]) -> list[str]:
    from emulated_gpu.device import record

    record.clear()
    work()
    return [wait.partition(" [")[0] for wait in record.waits.elements()]


def memory() -> None:
    on_gpu = torch.empty(3, device="cuda")
    assert on_gpu.device == torch.device("cuda", dist.get_rank())
    assert on_gpu.isnan().all().item(), "fresh memory"
    with pytest.raises(RuntimeError, match="same device"):
        on_gpu + torch.ones(3)
    assert (on_gpu.zero_() + torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0], "a number of the host is an argument"


def streams() -> None:
    side = torch.cuda.Stream()
    values = torch.ones(4, device="cuda")

    def product(waits: bool) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = values * 2
            event = side.record_event()
        if waits:
            torch.cuda.current_stream().wait_event(event)
        doubled.record_stream(torch.cuda.current_stream())
        return doubled + 1

    def freed(recorded: bool) -> None:
        made = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made * 2
        if recorded:
            made.record_stream(side)

    assert races_of(lambda: product(True)) == []
    (race,) = races_of(lambda: product(False))
    assert race.startswith("aten::add.out on stream 0 reads what aten::mul.out on stream ")
    assert races_of(lambda: freed(True)) == []
    (race,) = races_of(lambda: freed(False))
    assert "is freed while aten::mul.out on stream" in race


def pinned_memory() -> None:
    on_host = torch.empty(4, pin_memory=True)
    values = torch.arange(4.0, device="cuda")
    assert waits_of(lambda: on_host.copy_(values, non_blocking=True)) == []
    assert on_host.isnan().all(), "the copy has not arrived as far as the host knows"
    torch.cuda.current_stream().record_event().synchronize()
    assert on_host.tolist() == [0.0, 1.0, 2.0, 3.0]

    def overwrite(synchronizes: bool) -> None:
        values.copy_(on_host, non_blocking=True)
        if synchronizes:
            torch.cuda.synchronize()
        on_host.add_(1)
        torch.cuda.synchronize()

    assert races_of(lambda: overwrite(True)) == []
    (race,) = races_of(lambda: overwrite(False))
    assert race.startswith("the host wrote pinned memory")


def waits() -> None:
    values = torch.ones(4, device="cuda")
    assert waits_of(lambda: values.sum() * 2) == []
    assert waits_of(lambda: values.sum().item()) == ["item"]
    assert waits_of(lambda: values.cpu()) == ["copy device to host (pageable)"]
    assert waits_of(lambda: torch.tensor([1.0], device="cuda")) == ["copy host to device (pageable)"]
    assert waits_of(lambda: values.nonzero()) == ["aten::nonzero"]
    assert waits_of(torch.cuda.synchronize) == ["device"]


def messages() -> None:
    rank = dist.get_rank()
    values = torch.full((3,), float(rank + 1), device="cuda")
    gathered = torch.empty(6, device="cuda")
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until torch 2.13

    def add(waits: bool) -> None:
        work = gather(gathered, values, async_op=True)
        if waits:
            work.wait()
        gathered + 1
        work.wait()

    assert races_of(lambda: add(True)) == []
    (race,) = races_of(lambda: add(False))
    assert race.startswith("aten::add.out on stream 0 reads what all_gather on stream 10")
    assert gathered.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    dist.all_reduce(values)
    assert values.tolist() == [3.0, 3.0, 3.0]
    received = torch.empty(2 * (1 + rank), device="cuda")  # every rank sends one row to rank 0 and two to rank 1
    dist.all_to_all_single(received, torch.arange(3.0, device="cuda"), [1 + rank] * 2, [1, 2])
    assert received.tolist() == ([1.0, 2.0, 1.0, 2.0] if rank else [0.0, 0.0])
    for wrong, error in (
        (torch.ones(2), "No backend type associated with device type cpu"),
        (torch.ones(2, dtype=torch.int16, device="cuda"), "Unconvertible NCCL type"),
        (torch.ones(2, 3, device="cuda").t(), "must be contiguous"),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=error):
            dist.all_reduce(wrong)


def graphs() -> None:
    from emulated_gpu.device import gpu

    def captured(work: Callable[[], Any], mode: str = "thread_local") -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            made = work()
        return graph, made

    values = torch.ones(4, device="cuda")

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        values.add_(1)
        doubled = values * 2
        return doubled + 1, doubled[:2].clone()

    graph, (result, part) = captured(work)
    assert values.tolist() == [1.0] * 4, "a capture runs nothing"
    assert result.isnan().all()
    before = sum(gpu.launches().values())
    for step in (2.0, 3.0):
        graph.replay()
        assert (values.tolist(), result.tolist(), part.tolist()) == ([step] * 4, [2 * step + 1] * 4, [2 * step] * 2)
    assert gpu.launches()["graph"] == 2
    side, message = torch.cuda.Stream(), torch.ones(2, device="cuda")

    def elsewhere(joins: bool) -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            made = values * 2
        if joins:
            main.wait_stream(side)
        return made

    graph, made = captured(lambda: elsewhere(True))
    graph.replay()
    assert made.tolist() == [6.0] * 4
    for wrong, error in (
        (lambda: values.sum().item(), "not permitted when stream is capturing"),
        (lambda: values.nonzero(), "not permitted when stream is capturing"),
        (lambda: dist.all_reduce(message), "captures no messages"),
        (lambda: elsewhere(False), "unjoined work"),
    ):
        with pytest.raises(RuntimeError, match=error):
            captured(wrong)
        torch.cuda.current_stream()
        gpu.exchange_stream(0)  # torch leaves the stream of a capture that fails at its end
    assert values.tolist() == [3.0] * 4, "captures that fail run nothing either"
    assert before, "kernels beside graphs are counted one by one"


def run_all() -> None:
    for part in (memory, streams, pinned_memory, waits, messages, graphs):
        part()


def test_the_emulated_gpu_refuses_counts_and_finds(run_gpu_ranks: RunRanks) -> None:
    run_gpu_ranks(run_all, 2)
