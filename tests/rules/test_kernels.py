"""Our own local operators: they need no data to be planned, and indices split in several ways agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.graph.custom_operators import global_indices
from shardwise.rules import local_kernels
from shardwise.rules.arguments import block_offset, broadcast_shape
from shardwise.rules.rule import Piece

CALLS = [
    (
        local_kernels.EMBEDDING_ROWS,
        (torch.zeros(2, 3), torch.zeros(4, 5, dtype=torch.int64), -1, [4], [2], [2]),
        (4, 5, 3),
    ),
    (local_kernels.GATHER_ROWS, (torch.zeros(2, 3), 0, torch.zeros(1, 3, dtype=torch.int64), [4], [2], [2]), (1, 3)),
    (local_kernels.INDEX_SELECT_ROWS, (torch.zeros(2, 3), 0, torch.zeros(5, dtype=torch.int64), [4], [2], [2]), (5, 3)),
    (
        local_kernels.INDEX_ROWS,
        (torch.zeros(2, 3), [torch.zeros(5, dtype=torch.int64)], [0], [1], [4], [2], [2]),
        (5, 3),
    ),
    (
        local_kernels.SCATTER_ROWS,
        (torch.zeros(2, 3), 0, torch.zeros(5, 3, dtype=torch.int64), None, 1.0, "sum", True, False, [4], [2], [2]),
        (2, 3),
    ),
    (local_kernels.SCATTERED_SUM, (torch.zeros(5, 3), 0, torch.zeros(5, dtype=torch.int64), [4], [2], [2]), (2, 3)),
    (
        local_kernels.INDEX_PUT_ROWS,
        (torch.zeros(2, 3), [torch.zeros(5, dtype=torch.int64)], torch.zeros(3), True, [0], [1], [4], [2], [2]),
        (2, 3),
    ),
    (local_kernels.ONE_HOT_CLASSES, (torch.zeros(5, dtype=torch.int64), [4], [2], [2]), (5, 2)),
    (local_kernels.CUMULATED, (torch.zeros(2, 3), 0, torch.float32, [5], [1], [4], [4], [2], [2]), (4, 3)),
    (local_kernels.TRIANGLE, (torch.zeros(2, 3), 0, True, [4], [2], [2], [3], [0], [3]), (2, 3)),
    (local_kernels.EYE_BLOCK, ([4], [2], [2], [3], [0], [3], torch.float32, None), (2, 3)),
    (local_kernels.RANGE_BLOCK, (0, 1, [2, 3], [0, 1], [2, 2], torch.int64, None), (4,)),
    (local_kernels.LINSPACE_BLOCK, (0.0, 1.0, 6, [2, 3], [0, 1], [2, 2], torch.float32, None), (4,)),
]


@pytest.mark.parametrize(("kernel", "args", "shape"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_kernels_work_on_fake_and_meta_tensors(kernel: object, args: tuple, shape: tuple[int, ...]) -> None:
    def on(value: object, device: str) -> object:
        if isinstance(value, list):
            return [on(item, device) for item in value]
        return value.to(device) if isinstance(value, torch.Tensor) else value

    assert tuple(kernel(*(on(a, "meta") for a in args)).shape) == shape
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fakes = [
            [mode.from_tensor(i) if isinstance(i, torch.Tensor) else i for i in a] if isinstance(a, list) else a
            for a in fakes
        ]
        assert tuple(kernel(*fakes).shape) == shape


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Piece, ...]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 5))
        offset = draw(st.integers(0, size - 1))
        found.append(Piece(size, offset, draw(st.integers(1, size - offset))))
    return tuple(found)


@settings(deadline=None, derandomize=True)
@given(pieces())
def test_local_and_global_indices_are_inverse(atoms: tuple[Piece, ...]) -> None:
    sizes, offsets, lengths = ([getattr(p, name) for p in atoms] for name in ("size", "offset", "length"))
    mine = global_indices(sizes, offsets, lengths, device=torch.device("cpu")).flatten()
    everything = torch.arange(torch.tensor(sizes).prod().item())
    local, held = local_kernels.local_index(everything, sizes, offsets, lengths)
    assert everything[held].tolist() == mine.tolist()
    assert local[held].tolist() == list(range(len(mine)))
    assert not local[~held].any()
    start = block_offset(atoms)
    contiguous = mine.tolist() == list(range(int(mine[0]), int(mine[0]) + len(mine)))
    assert (start is not None) == contiguous
    assert start is None or start == mine[0]


def test_shapes_broadcast_as_in_torch() -> None:
    for shapes in (((2, 1), (3,)), ((), (4,)), ((1,), (1, 1)), ((0, 1), (3,)), ((5, 1, 3), (2, 1))):
        assert broadcast_shape(*shapes) == tuple(torch.broadcast_shapes(*shapes))


LOOKUPS = [
    lambda rows, index, piece: local_kernels.EMBEDDING_ROWS(rows, index, -1, *piece),
    lambda rows, index, piece: local_kernels.GATHER_ROWS(rows, 0, index.reshape(1, 1).expand(1, 2), *piece),
    lambda rows, index, piece: local_kernels.INDEX_SELECT_ROWS(rows, 0, index, *piece),
    lambda rows, index, piece: local_kernels.INDEX_ROWS(rows, [index], [0], [len(piece[0])], *piece),
    lambda rows, index, piece: local_kernels.SCATTER_ROWS(rows, 0, index, None, 1.0, "", True, True, *piece),
    lambda rows, index, piece: local_kernels.SCATTERED_SUM(torch.ones(1, 2), 0, index, *piece),
    lambda rows, index, piece: local_kernels.INDEX_PUT_ROWS(
        rows, [index], torch.zeros(2), True, [0], [len(piece[0])], *piece
    ),
    lambda rows, index, piece: local_kernels.ONE_HOT_CLASSES(index, *piece),
]


@pytest.mark.parametrize("invalid", [6, 7, -7, -100])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_an_index_out_of_range_fails_on_every_part_as_on_one_device(lookup: Callable, invalid: int) -> None:
    rows, index = torch.arange(12.0).reshape(6, 2), torch.tensor([invalid])
    for offset in (0, 3):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            lookup(rows[offset : offset + 3], index, ([6], [offset], [3]))
    atoms = ([2, 3], [0, 1], [2, 2])  # rows 1, 2, 4 and 5
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        lookup(rows[[1, 2, 4, 5]], index, atoms)
