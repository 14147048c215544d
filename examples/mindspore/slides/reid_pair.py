"""ReID on the slides: from data to model parallelism. One all-gather joins the rows of Y = XW between the products.

    shardwise run -n 4 reid_pair.py

Errata: ``set_strategy`` is printed as called on the class, with a set of lists, which Python can not make:
``ops.MatMul.set_strategy({[4, 1], [1, 1]})``. It is called on an operator here, with a tuple of lists.
"""

import shardwise.mindspore.nn as nn
from shardwise.mindspore import ops

from pairs import run  # isort: skip


class DenseMatMulNet(nn.Cell):
    def __init__(self):
        super(DenseMatMulNet, self).__init__()
        self.matmul1 = ops.MatMul().set_strategy(([4, 1], [1, 1]))
        self.matmul2 = ops.MatMul().set_strategy(([1, 1], [1, 4]))

    def construct(self, x, w, v):
        y = self.matmul1(x, w)
        z = self.matmul2(y, v)
        return z


error, forward, backward = run(DenseMatMulNet)
