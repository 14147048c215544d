"""A Transformer on the slides: data and model parallelism together. Y = XW stays where it is; the second product sums
over a split dim, so that an all-reduce in groups of two ranks follows it.

    shardwise run -n 4 transformer_pair.py

Errata: ``set_strategy`` is printed as called on the class (``ops.MatMul.set_strategy``); here it is called on an
operator.
"""

import shardwise.mindspore.nn as nn
from shardwise.mindspore import ops

from pairs import run  # isort: skip


class DenseMatMulNet(nn.Cell):
    def __init__(self):
        super(DenseMatMulNet, self).__init__()
        self.matmul1 = ops.MatMul().set_strategy([[2, 1], [1, 2]])
        self.matmul2 = ops.MatMul().set_strategy([[2, 2], [2, 1]])

    def construct(self, x, w, v):
        y = self.matmul1(x, w)
        z = self.matmul2(y, v)
        return z


error, forward, backward = run(DenseMatMulNet)
