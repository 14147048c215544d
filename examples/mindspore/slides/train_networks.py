"""Trains ReID, DLRM, Wide&Deep and a Transformer, split as a search finds it.

    shardwise run -n 8 train_networks.py
    shardwise run -n 8 train_networks.py transformer --search dynamic_programming

For one device, change ``AUTO_PARALLEL`` in the marked line to ``STAND_ALONE``: the losses are the same.
"""

import argparse

import shardwise.mindspore as ms
from shardwise.mindspore import nn
from shardwise.mindspore.communication import init
from shardwise.mindspore.train import LossMonitor, Model

from networks import NETWORKS  # isort: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(NETWORKS)}; by default all of them")
parser.add_argument("--search", default="recursive_programming")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--rows", type=int, default=16, help="of the whole batch")
options = parser.parse_args()

mode = ms.ParallelMode.AUTO_PARALLEL  # <- STAND_ALONE: one device
ms.set_auto_parallel_context(parallel_mode=mode, search_mode=options.search, full_batch=True)
init()

networks = {}
for name in options.names or NETWORKS:
    ms.set_seed(1)
    print(name)
    net = networks[name] = NETWORKS[name]()
    dataset = [net.batch(options.rows, seed=0)] * options.steps
    model = Model(net, optimizer=nn.Momentum(net.trainable_params(), 0.02, 0.5))
    model.train(1, dataset, callbacks=LossMonitor())
