"""Reading and writing by index, and order."""

from __future__ import annotations

import torch

from rules.samples.calls import bits, call, ids, plain, unsplit, x
from shardwise.rules.local_kernels import SCATTERED_SUM

aten = torch.ops.aten

INDEXING = [
    call(aten.embedding.default, x(5, 3), ids(5, 2, 4)),
    call(aten.embedding.default, x(6, 3), torch.tensor([0, 2, 2, 5]), 2),
    call(aten.embedding.default, x(5, 3), ids(5, 4), -1, True),
    call(aten.gather.default, x(3, 5), 1, ids(5, 3, 4)),
    call(aten.gather.default, x(4, 5, 2), 1, ids(5, 3, 2, 2)),
    unsplit(aten.gather.default, x(4), 0, ids(4)),
    call(aten.index_select.default, x(3, 5, 2), 1, ids(5, 4)),
    call(aten.index.Tensor, x(3, 5), [None, ids(5, 2, 3)]),
    call(aten.index.Tensor, x(5, 3), [ids(5, 4) - 5]),
    call(aten.index.Tensor, x(2, 4, 3), [None, ids(4, 3, 1), ids(3, 1, 2)]),
    call(aten.index.Tensor, x(4, 2, 3), [ids(4, 3), None, ids(3, 3)]),
    call(aten.index.Tensor, x(4, 2, 3, 5), [ids(4, 3, 1), None, ids(3, 2) - 3]),
    call(aten.one_hot.default, ids(5, 2, 3), 5),
    call(aten.scatter.src, x(3, 5), 1, torch.tensor([[0, 1], [4, 2], [3, 3]])[:, :1], x(3, 1)),
    call(aten.scatter.src, x(3, 5), 1, torch.tensor([[0, 1], [4, 2], [3, 2]]), plain(x(3, 3))),
    call(aten.scatter.value, x(3, 5), 1, ids(5, 3, 2), 0.0),
    call(aten.scatter.value, x(3, 5), 1, ids(5, 3, 2), 2.5),
    call(aten.scatter.reduce, plain(x(3, 5)), 1, ids(5, 3, 2), plain(x(3, 2)), reduce="add"),
    call(aten.scatter.value_reduce, plain(x(3, 5)), 1, ids(5, 3, 2), 2.0, reduce="multiply"),
    call(aten.scatter_add.default, x(3, 5), 1, ids(5, 3, 2), x(3, 2)),
    call(aten.scatter_add.default, x(2, 3, 4), 0, ids(2, 5, 3, 4), x(5, 3, 4)),
    call(aten.scatter_add.default, x(3, 5), 0, ids(3, 4, 2), plain(x(6, 2))),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "sum"),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "sum", include_self=False),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "prod"),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "mean"),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "amax", include_self=False),
    call(aten.scatter_reduce.two, ids(9, 3, 5), 1, ids(5, 3, 4), ids(9, 3, 4), "amin"),
    call(aten.index_add.default, x(3, 5), 1, ids(5, 4), x(3, 4)),
    call(aten.index_add.default, x(5, 2), 0, ids(5, 3), x(3, 2), alpha=0.5),
    call(aten.index_add.default, x(5), 0, ids(5, 7), x(7)),
    call(aten.index_reduce.default, x(3, 5), 1, ids(5, 4), x(3, 4), "prod"),
    call(aten.index_reduce.default, x(3, 5, 2), 1, ids(5, 4), x(3, 4, 2), "mean", include_self=False),
    call(aten.index_reduce.default, x(3, 5), -1, ids(5, 4), x(3, 4), "amax"),
    call(aten.index_copy.default, x(3, 5), 1, torch.tensor([4, 0]), x(3, 2)),
    call(aten.index_fill.int_Scalar, x(3, 5), 1, torch.tensor([4, 0]), 0.5),
    call(aten.index_fill.int_Tensor, x(3, 5), 1, torch.tensor([4, 0]), x()),
    call(aten.index_put.default, x(3, 5), [None, torch.tensor([4, 0])], x(3, 2)),
    call(aten.index_fill.int_Scalar, x(5), 0, torch.tensor([-1, 0]), 0.5),
    call(aten.index_put.default, x(5, 3), [ids(5, 4)], x(3), True),
    call(aten.index_put.default, x(5, 3, 4), [None, ids(3, 2, 3) - 3, ids(4, 2, 1)], x(5, 2, 3), True),
    call(aten.index_put.default, x(4, 3, 2), [ids(4, 3), None, ids(2, 3)], x(3, 3), True),
    call(aten.index_put.default, x(5), [torch.tensor(-2)], x()),
    call(aten.index_put.default, x(3, 4), [bits(3, 4)], x()),
    call(aten.index_put.default, x(3, 4, 2), [None, torch.arange(4) % 2 == 1], x(1, 2), True),
    call(aten.masked_scatter.default, x(3, 4), torch.arange(12).reshape(3, 4) % 3 == 1, x(5)),
    call(aten.masked_scatter.default, x(2, 3, 4), torch.arange(3).reshape(3, 1) > 0, x(4, 5)),
    call(SCATTERED_SUM, x(3, 4), 1, ids(6, 4), [6], [0], [6]),
    call(SCATTERED_SUM, x(3, 4), 0, ids(5, 3, 4), [5], [0], [5]),
    call(aten.index_put.default, x(5, 3, 2), [torch.tensor([4, 0]), torch.tensor([1, 2])], x(2, 2)),
]
