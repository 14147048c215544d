"""A checkpoint of experts goes from four owners to two, to one process, and back, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.expert_models import WIDTH, Batched, Einsum, Mixture, Modules, Stack
from runtime.training import check_close, state_of, train


def batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))}


def go_on(kind: type[Mixture], source: Path | None, target: Path, steps: int, **settings: Any) -> list[float]:
    """More steps from a checkpoint, and one of their own; on a rank, or (without settings) in one process."""
    module: nn.Module = kind().double()
    if settings:
        mesh = sw.Mesh(ep=dist.get_world_size())
        how: dict[str, Any] = {"mesh": mesh, "strategies": {"": "e@ep"}, "search": "sharding_propagation", **settings}
        plan = sw.plan(module, batch(0), mesh.num_devices, **how)
        assert any(c.kind == "row_exchange" for c in plan.collectives()), plan
        module = sw.parallelize(module, plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    begun = 0 if source is None else sw.load_checkpoint(source, module, optimizer).step
    losses = train(module, map(batch, range(begun, begun + steps)), optimizer).losses
    sw.save_checkpoint(target, module, optimizer, step=begun + steps)
    return losses


def on_ranks(kind: type[Mixture], source: Path | None, target: Path, steps: int, zero: int | None) -> list[float]:
    return go_on(kind, source, target, steps, zero=zero)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Batched, Modules])
def test_checkpoints_go_from_four_owners_to_two_and_to_one_process_and_back(
    kind: type[Mixture], run_ranks: RunRanks, tmp_path: Path
) -> None:
    four, two, one, again = (tmp_path / name for name in ("four", "two", "one", "again"))
    losses = [run_ranks(on_ranks, 4, kind, None, four, 3, None), run_ranks(on_ranks, 2, kind, four, two, 2, 1)]
    losses += [[go_on(kind, two, one, 1)], run_ranks(on_ranks, 4, kind, one, again, 2, None)]
    alone, loaded = kind().double(), kind().double()
    wanted = train(alone, map(batch, range(8)), torch.optim.AdamW(alone.parameters(), lr=1e-2)).losses
    for ranks in losses:
        own, wanted = wanted[: len(ranks[0])], wanted[len(ranks[0]) :]
        assert all(found == pytest.approx(own, rel=1e-11) for found in ranks)
    sw.load_checkpoint(again, loaded)
    # Sums in another order, through steps of AdamW, which divides gradients by their size.
    check_close(state_of(loaded), state_of(alone), rtol=1e-9, atol=1e-11, what="four owners again")


def with_columns_split(kinds: list[type[Mixture]]) -> dict[str, float]:
    """The largest error of a step in which two tensors of rows, with the biases of their experts, travel together."""
    mesh, errors = sw.Mesh(ep=2, tp=2), {}
    for kind in kinds:
        alone, module = Stack(kind).double(), Stack(kind).double()
        alone.load_state_dict(module.state_dict())
        par = sw.parallelize(
            module, sw.plan(module, batch(0), 4, mesh=mesh, strategies={"layers.*.experts": "e@ep n@tp"})
        )
        loss = alone(**batch(0))
        loss.backward()
        off = [par.step(**batch(0)) - loss]
        off += [sw.full_tensor(p.grad) - alone.get_parameter(name).grad for name, p in par.named_parameters()]
        errors[kind.__name__] = max(float(error.detach().abs().max()) for error in off)
    return errors


def test_rows_and_biases_of_experts_with_split_columns_travel(run_ranks: RunRanks) -> None:
    for errors in run_ranks(with_columns_split, 4, [Batched, Einsum, Modules]):
        assert len(errors) == 3
        assert max(errors.values()) < 1e-14, errors
