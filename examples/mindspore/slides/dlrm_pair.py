"""DLRM on the slides: from model to data parallelism. One all-to-all turns columns of Y = XW into rows.

    shardwise run -n 4 dlrm_pair.py

Errata: ``set_strategy`` is printed as called on the class (``ops.MatMul.set_strategy``); here it is called on an
operator.
"""

import shardwise.mindspore.nn as nn
from shardwise.mindspore import ops

from pairs import run  # isort: skip


class DenseMatMulNet(nn.Cell):
    def __init__(self):
        super(DenseMatMulNet, self).__init__()
        self.matmul1 = ops.MatMul().set_strategy([[1, 1], [1, 4]])
        self.matmul2 = ops.MatMul().set_strategy([[4, 1], [1, 1]])

    def construct(self, x, w, v):
        y = self.matmul1(x, w)
        z = self.matmul2(y, v)
        return z


error, forward, backward = run(DenseMatMulNet)
