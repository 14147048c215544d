"""The softmax cross entropy over split classes that the slides write by hand, beside the same by ``shardwise``.

    shardwise run -n 4 distributed_softmax.py

A small ReID: features come from a data-parallel layer, and every rank has a part of the classes. By hand that takes the
collectives and the backward of ``HandWritten``; here it takes one strategy, and both follow. The losses and gradients
must be equal before the two are timed, step by step in turn.

Errata: the slide computes the maximum over all classes and does not subtract it, so that large logits overflow; it is
subtracted here. ``eps`` is undefined there, 1e-30 here, which bounds a row's loss at 69. What the slide leaves out
("...") is written from its formulas: the gathered features, and the gradient of the logits. The slide divides gradients
by the batch of one rank: those are the gradients of the sum of the ranks' mean losses, ``ranks`` times those of the
mean over all rows.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import autograd

import shardwise.mindspore as ms
from shardwise.mindspore import nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init

from issued import issued  # isort: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--classes", type=int, default=4096)
parser.add_argument("--features", type=int, default=128)
parser.add_argument("--rows", type=int, default=64, help="of the whole batch")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--scale", type=float, default=16.0, help="of the cosines that are the logits")
options = parser.parse_args()

init()
rank, ranks = get_rank(), get_group_size()
eps = 1e-30


class HandWritten(autograd.Function):
    """The slide's forward and backward. ``x``: this rank's rows of features; the label: one-hot, of this rank's
    classes."""

    @staticmethod
    def forward(ctx, x, metric_fc_weights, local_label):
        per_batch_size = x.shape[0]
        total_features = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(total_features, x.contiguous())
        with torch.enable_grad():
            total_features_r = torch.cat(total_features).requires_grad_()
            metric_fc_weights = metric_fc_weights.detach().requires_grad_()
            norm_total_features = F.normalize(total_features_r)
            w = F.normalize(metric_fc_weights)
            local_logit = options.scale * F.linear(norm_total_features, w)

        # SoftmaxCrossEntropy
        logit = local_logit.detach()
        local_logit_max, _ = torch.max(logit, dim=-1, keepdim=True)
        # get global logit max
        dist.all_reduce(local_logit_max, op=dist.ReduceOp.MAX)

        local_exp = torch.exp(logit - local_logit_max)
        local_exp_sum = torch.sum(local_exp, dim=-1)
        # get global exp sum
        dist.all_reduce(local_exp_sum, op=dist.ReduceOp.SUM)

        global_exp_sum = local_exp_sum[:, None]
        local_softmax_result = local_exp / global_exp_sum

        local_loss = torch.sum((-1 * torch.log(local_softmax_result + eps) * local_label), dim=-1)
        # get global loss
        dist.all_reduce(local_loss, op=dist.ReduceOp.SUM)
        local_loss = torch.mean(local_loss)

        grad_of_logit = local_softmax_result - local_label
        grad_of_weights = (
            autograd.grad(local_logit, metric_fc_weights, retain_graph=True, grad_outputs=grad_of_logit)[0]
            / per_batch_size
        )
        grad_of_x = autograd.grad(local_logit, total_features_r, grad_outputs=grad_of_logit)[0] / per_batch_size

        dist.all_reduce(grad_of_x, op=dist.ReduceOp.SUM)

        local_grad_of_x = grad_of_x[rank * per_batch_size : (rank + 1) * per_batch_size]
        ctx.save_for_backward(local_grad_of_x, grad_of_weights)
        return local_loss

    @staticmethod
    def backward(ctx, grad_out1):
        local_grad_of_x, weight_grad = ctx.saved_tensors
        return local_grad_of_x * grad_out1, weight_grad * grad_out1, None


class ReID(nn.Cell):
    """The same, as one would write it for one device: a strategy splits the classes, and the rest follows from it."""

    def __init__(self, backbone, fc):
        super().__init__()
        self.backbone, self.fc = ms.Parameter(backbone, "backbone"), ms.Parameter(fc, "fc")
        self.features = ops.MatMul().shard(((ranks, 1), (1, 1)))
        self.logits = ops.MatMul(transpose_b=True).shard(((1, 1), (ranks, 1)))

    def construct(self, images, labels):
        features = F.normalize(self.features(images, self.backbone))
        logits = options.scale * self.logits(features, F.normalize(self.fc))
        return F.cross_entropy(logits, labels, reduction="none").mean()


numbers = torch.Generator().manual_seed(0)
images, backbone, fc = (
    torch.randn(*shape, generator=numbers, dtype=torch.float64)
    for shape in (
        (options.rows, options.features),
        (options.features, options.features),
        (options.classes, options.features),
    )
)
labels = torch.randint(options.classes, (options.rows,), generator=numbers)
own_images, own_labels = images.chunk(ranks)[rank], labels.chunk(ranks)[rank]

own_backbone, own_fc = backbone.clone().requires_grad_(), fc.chunk(ranks)[rank].clone().requires_grad_()
own_one_hot = F.one_hot(labels, options.classes).to(fc.dtype).chunk(ranks, 1)[rank]


def step_by_hand():
    own_backbone.grad = own_fc.grad = None
    loss = HandWritten.apply(own_images @ own_backbone, own_fc, own_one_hot)
    loss.backward()
    dist.all_reduce(own_backbone.grad, op=dist.ReduceOp.SUM)  # the backbone's data parallelism
    return loss.detach(), own_backbone.grad / ranks, own_fc.grad / ranks


ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode="sharding_propagation")
net = ReID(backbone, fc).set_train()


def step_by_shardwise():
    net.backbone.grad = net.fc.grad = None
    loss = net(own_images, own_labels)
    loss.backward()
    return loss.detach(), net.backbone.grad, net.fc.grad


with issued() as sent_by_hand:
    by_hand = step_by_hand()
for _ in range(2):  # planned and compiled; then the ranks agree on the parameters that they were given
    step_by_shardwise()
with issued() as sent_by_shardwise:
    ours = step_by_shardwise()
errors = [float((own - other).abs().max()) for own, other in zip(by_hand, ours, strict=True)]
seconds = {step_by_hand: [], step_by_shardwise: []}
for _ in range(options.steps):
    for step, taken in seconds.items():
        dist.barrier()
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
ratio = median(ours / hand for hand, ours in zip(*seconds.values(), strict=True)) if options.steps else float("nan")
if rank == 0:
    print(f"loss by hand {float(by_hand[0])}, by shardwise {float(ours[0])}")
    print(f"largest differences: loss {errors[0]:.1e}, backbone's gradient {errors[1]:.1e}, classes' {errors[2]:.1e}")
    print(f"sent by hand: {', '.join(map(str, sent_by_hand))}")
    print(f"sent by shardwise: {', '.join(map(str, sent_by_shardwise))}")
    if options.steps:
        milliseconds = [f"{1000 * median(taken):.2f} ms" for taken in seconds.values()]
        print(f"step by hand {milliseconds[0]}, by shardwise {milliseconds[1]}: ratio {ratio:.2f}")
