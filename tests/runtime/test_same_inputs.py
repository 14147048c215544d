"""Ranks that each pass the whole batch and do not pass the same one; on real gloo ranks."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from runtime.staged_model import Staged, staged_batch
from shardwise.errors import ShardwiseError
from shardwise.graph.trees import flatten_call
from shardwise.layouts.placement import Placement
from shardwise.runtime import signatures
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.host_copies import CopyInFlight
from shardwise.runtime.signatures import SameInputs

Change = Callable[[list[torch.Tensor]], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.down = nn.Embedding(11, 6), nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.down(self.embed(tokens).mean(1) * weights[:, None].nan_to_num(1.0)).tanh()


def batch(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens, labels = (torch.randint(n, s, generator=generator) for n, s in ((11, (8, 3)), (4, (8,))))
    weights = torch.rand(8, dtype=torch.float64, generator=generator)
    weights[6] = torch.nan  # the same on all ranks
    return [tokens, weights, labels]


def _one_element(x: list[torch.Tensor]) -> None:
    x[1][7] = torch.nextafter(x[1][7], torch.tensor(9.0, dtype=torch.float64))


def _a_token(x: list[torch.Tensor]) -> None:
    x[0][0, 0] = (x[0][0, 0] + 1) % 11


def _a_label(x: list[torch.Tensor]) -> None:
    x[2][3] = (x[2][3] + 1) % 4


def _two_signs(x: list[torch.Tensor]) -> None:
    x[1][2:4] *= -1


def _two_samples_swapped(x: list[torch.Tensor]) -> None:
    for part in x:
        part[[0, 5]] = part[[5, 0]]


def _a_nan(x: list[torch.Tensor]) -> None:
    x[1][0] = torch.nan


CHANGES: dict[str, tuple[Change, str]] = {
    "one element by one bit": (_one_element, "args[1]"),
    "a token": (_a_token, "args[0]"),
    "a label": (_a_label, "args[2]"),
    "two signs": (_two_signs, "args[1]"),
    "two samples": (_two_samples_swapped, "args[0]"),
    "nan": (_a_nan, "args[1]"),
}
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"},
    "tensor parallel": {"mesh": sw.Mesh(tp=2), "strategies": {"down": "n@tp"}},
    "accumulation": {"mesh": sw.Mesh(dp=2), "mode": "data_parallel", "micro_batch": 4},
}


def told(par: Any, optimizer: torch.optim.Optimizer, change: Change | None, how: str = "step") -> str:
    """What the third step says, where the second had a batch that was changed on rank 1."""
    for number in range(4):
        inputs = batch(number)
        if number == 1 and change is not None and dist.get_rank() == 1:
            change(inputs)
        optimizer.zero_grad()
        try:
            if how == "step":
                par.step(*inputs)
            else:
                par.loss_of(*inputs).backward()
        except ShardwiseError as error:
            assert number == 2, "the step after the one that was wrong"
            return str(error)
        optimizer.step()
    return ""


def split(kind: str) -> Any:
    torch.manual_seed(0)
    net, loss = Net().double(), nn.functional.cross_entropy
    return sw.parallelize(net, sw.plan(net, tuple(batch(0)), 2, loss=loss, **PLANS[kind]), loss=loss)


def all_changes(kind: str) -> list[str]:
    par = split(kind)
    optimizer = torch.optim.AdamW(par.parameters())
    said = [told(par, optimizer, change) for change, _ in CHANGES.values()]
    said.append(told(par, optimizer, None))
    said.append(told(par, optimizer, _a_label, "loss_of"))
    par.eval()
    said.append(told(par, optimizer, _a_label))
    said.append(told(copy.deepcopy(par).train(), optimizer, _a_label))
    return said


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.sampled(1)
def test_another_batch_on_one_rank_is_named_at_the_next_step(run_ranks: RunRanks, kind: str) -> None:
    expected = [*(name for _, name in CHANGES.values()), "", *["args[2]"] * 3]
    for said in run_ranks(all_changes, 2, kind):
        assert len(said) == len(expected)
        for text, name in zip(said, expected, strict=True):
            assert bool(text) == bool(name)
            if name:
                assert re.match(rf"in call \d+ rank 0 passed another {re.escape(name)} than rank 1; every rank", text)
                assert 'inputs="local"' in text


def in_stages(micro_batch: int | None) -> list[str]:
    """What each step says where one rank's ids differ in the third, and in the sixth the labels of the ranks of the
    first stage, which does not read them."""
    torch.manual_seed(0)
    net = Staged().double()
    plan = sw.plan(net, staged_batch(8), 4, stages=2, mesh=sw.Mesh(dp=2), micro_batch=micro_batch)
    par, said = sw.parallelize(net, plan), []
    for number in range(9):
        ids, labels = staged_batch(8, number)
        if (number, dist.get_rank()) == (2, 3):
            ids[7, 4] = 20 - ids[7, 4] - 1
        if (number, dist.get_rank()) in ((5, 0), (5, 1)):
            labels[0, 4] = (labels[0, 4] + 1) % 20
        said.append(message(lambda ids=ids, labels=labels: par.step(ids, labels)).split(";")[0])
    return said


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.sampled(1)
def test_ranks_of_all_stages_are_compared(run_ranks: RunRanks, micro_batch: int | None) -> None:
    expected = [""] * 9
    expected[3] = "in call 3 ranks 0, 1, 2 passed another args[0] than rank 3"
    expected[6] = "in call 6 ranks 0, 1 passed another args[1] than ranks 2, 3"
    assert run_ranks(in_stages, 4, micro_batch) == [expected] * 4


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, *, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        total = self.linear(x).sum()
        for part in parts.values():
            total = total + (part.abs() if part.is_complex() else part).to(x.dtype).nan_to_num(1.0).sum()
        return total


def odd_parts(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    values = torch.rand(4, 7, generator=generator)
    values[1, 1] = torch.nan
    return {
        "bool": values > 0.5,
        "bytes": (values * 200).to(torch.uint8),
        "short": values.bfloat16()[:, 1:4],
        "turned": values.t(),
        "expanded": values[:, :1].expand(4, 5),
        "complex": torch.complex(values, 1 - values).conj(),
        "flags": torch.zeros(4, 0),
        "huge": torch.full((4,), -(2**63), dtype=torch.int64),
        "half": values.half()[1:, 6:],
    }


def odd(_: None) -> list[str]:
    """Per input what is said after one element of it differed on rank 2."""
    torch.manual_seed(0)
    net = Odd()
    x = torch.rand(4, 3)
    plan = sw.plan(net, (x,), 3, kwargs={"parts": odd_parts(0)}, mesh=sw.Mesh(dp=3), mode="data_parallel")
    par, said = sw.parallelize(net, plan), []
    for name in odd_parts(0):
        for number in range(3):
            parts = odd_parts(number)
            if dist.get_rank() == 2 and number == 1 and parts[name].numel():
                changed = parts[name].resolve_conj().contiguous()
                changed.view(-1).view(torch.uint8)[-1] ^= 1  # one bit
                parts[name] = changed
            try:
                par.step(x, parts=parts)
            except ShardwiseError as error:
                said.append(str(error).split(";")[0])
                break
        else:
            said.append("")
    return said


def from_a_file(_: None) -> str:
    """What a module says that is stored and loaded between the call and the next."""
    par = split("data parallel")
    optimizer = torch.optim.AdamW(par.parameters())
    par.step(*batch(0))
    file = io.BytesIO()
    torch.save(par, file)
    file.seek(0)
    return told(torch.load(file, weights_only=False), optimizer, _a_label)


def test_a_module_out_of_a_file_is_compared(run_ranks: RunRanks) -> None:
    for said in run_ranks(from_a_file, 2, None):
        assert "rank 0 passed another args[2] than rank 1" in said


def test_every_kind_of_memory_is_compared(run_ranks: RunRanks) -> None:
    for said in run_ranks(odd, 3, None):
        for name, text in zip(odd_parts(0), said, strict=True):
            wanted = "" if name == "flags" else f"another kwargs['parts']['{name}'] than rank 2"
            assert wanted in text, (name, text)
            assert bool(text) == bool(wanted)


class Landed:
    """Stands for an event of a GPU's copy to the host: what it copies is there when it was waited for."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source, self.target = source.clone(), target
        target.fill_(-1)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.target.copy_(self.source)


def behind_kernels(_: None) -> list[str]:
    """What calls say whose digests come from a device, where the inputs of the third differ."""

    def start_copy(source: torch.Tensor, target: torch.Tensor) -> CopyInFlight:
        return CopyInFlight(source, cast(Any, Landed(source, target)))

    ranks = Communicator(Placement.whole(sw.Mesh(dp=2)))
    same = SameInputs(ranks, Communicator(ranks.place, backend="gloo"), torch.device("cpu"))
    said = []
    with mock.patch.object(signatures, "start_copy", start_copy):
        for number in range(7):
            ranks.calls += 1
            flat, spec = flatten_call((torch.tensor([number, number == 2 and dist.get_rank()]), 1.0), {})
            said.append(message(lambda flat=flat, spec=spec: same.begin(flat, spec)).split(";")[0])
    return said


def test_inputs_on_a_gpu_are_named_two_calls_later_without_waiting(run_ranks: RunRanks) -> None:
    expected = ["", "", "", "", "in call 3 rank 0 passed another args[0] than rank 1", "", ""]
    assert run_ranks(behind_kernels, 2, None) == [expected] * 2
