"""Z = XWV on four devices, from documents 002 and 004: X is split by rows, V by columns, and one all-gather, which
nobody wrote, joins Y = XW between the products.

    shardwise run -n 4 dense_matmul_net.py

Errata: both documents call ``shard`` on the class (``ops.MatMul.shard``), 004 without the outer tuple
(``shard((4, 1), (1, 1))``), which would be the strategies of the inputs and of the outputs; 002 names another class in
``super``; 004 writes the mode "semi_autoparallel". The documents define the network only; the matrices and the call are
added, with whole matrices on every device (``full_batch``).
"""

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.nn as nn
from shardwise.mindspore import ops
from shardwise.mindspore.communication import init

ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4)


class DenseMatMulNet(nn.Cell):
    def __init__(self):
        super(DenseMatMulNet, self).__init__()
        # only shard has to be called to split an operator:
        # matmul1 takes two inputs; dim 0 of the first is cut in four, dim 1 is not, the second not at all
        self.matmul1 = ops.MatMul().shard(((4, 1), (1, 1)))
        # matmul2: dim 1 of the second input is cut in four
        self.matmul2 = ops.MatMul().shard(((1, 1), (1, 4)))

    def construct(self, x, w, v):
        y = self.matmul1(x, w)
        z = self.matmul2(y, v)
        return z


ms.set_auto_parallel_context(full_batch=True)
init()
x, w, v = (ms.Tensor(np.random.RandomState(0).rand(*shape)) for shape in ((8, 12), (12, 16), (16, 8)))
z = DenseMatMulNet()(x, w, v)
error = float((z - x @ w @ v).abs().max())
print(f"Z has shape {tuple(z.shape)}; largest difference from one device: {error:.1e}")
