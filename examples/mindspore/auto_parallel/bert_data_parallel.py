"""Data parallelism as document 004 writes it for BERT's pre-training: every rank has the whole model and a part of the
batch; gradients are reduced, clipped, checked and unscaled by hand.

    shardwise run -n 4 bert_data_parallel.py                    the document's order
    shardwise run -n 4 bert_data_parallel.py --order correct    clip what has been reduced and unscaled

Errata: an argument is spelled ``masked_lm_weghts`` in one place of the document; it is ``masked_lm_weights`` here. The
document clips before it reduces and unscales, so what it bounds is the norm of a rank's own, scaled gradients: with a
loss scale of 1024 every step is clipped, and by another factor on every rank. ``train_step`` keeps that order;
``train_step_correct`` clips last, and then four ranks train exactly as one process does with the whole batch.

The document shows the step only. Its model, optimizer, loss scaler and data are in bert.py and below.
"""

import argparse

from shardwise.mindspore.parallel._utils import _get_device_num, _get_gradients_mean

import shardwise.mindspore as ms
from shardwise.mindspore import nn, ops
from shardwise.mindspore.amp import DynamicLossScaler, all_finite, init_register
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.ops import clip_by_global_norm
from shardwise.mindspore.ops.communication import counting

from bert import BertConfig, BertForPreTraining, BertLoss, random_batch  # isort: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--order", choices=("document", "correct"), default="document")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--rows", type=int, default=8, help="of the whole batch")
parser.add_argument("--layers", type=int, default=2)
options = parser.parse_args()

init()
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
ms.set_seed(1)

config = BertConfig(num_layers=options.layers)
network = BertLoss(BertForPreTraining(config)).to(ms.float64)
optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
loss_scaler = DynamicLossScaler(scale_value=1024, scale_factor=2, scale_window=2)


def forward(*batch):
    total_loss, masked_lm_loss, next_sentence_loss = network(*batch)
    return loss_scaler.scale(total_loss), masked_lm_loss, next_sentence_loss


grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

# 6. Pretrain
mean = _get_gradients_mean()
degree = _get_device_num()
grad_reducer = nn.DistributedGradReducer(optimizer.parameters, mean, degree)


def train_step(
    input_ids, input_mask, masked_lm_ids, masked_lm_positions, masked_lm_weights, next_sentence_label, segment_ids
):
    status = init_register()
    input_ids = ops.depend(input_ids, status)
    (total_loss, masked_lm_loss, next_sentence_loss), grads = grad_fn(
        input_ids, input_mask, segment_ids, masked_lm_ids, masked_lm_positions, masked_lm_weights, next_sentence_label
    )
    grads = clip_by_global_norm(grads, clip_norm=1.0)
    # the all-reduce that gives every rank the same gradients
    grads = grad_reducer(grads)
    status = all_finite(grads, status)
    if status:
        total_loss = loss_scaler.unscale(total_loss)
        grads = loss_scaler.unscale(grads)
        total_loss = ops.depend(total_loss, optimizer(grads))
    total_loss = ops.depend(total_loss, loss_scaler.adjust(status))
    return total_loss, masked_lm_loss, next_sentence_loss, status


def train_step_correct(
    input_ids, input_mask, masked_lm_ids, masked_lm_positions, masked_lm_weights, next_sentence_label, segment_ids
):
    (total_loss, masked_lm_loss, next_sentence_loss), grads = grad_fn(
        input_ids, input_mask, segment_ids, masked_lm_ids, masked_lm_positions, masked_lm_weights, next_sentence_label
    )
    grads = grad_reducer(grads)
    status = all_finite(grads)
    if status:
        total_loss = loss_scaler.unscale(total_loss)
        grads = loss_scaler.unscale(grads)
        grads = clip_by_global_norm(grads, clip_norm=1.0)
        optimizer(grads)
    loss_scaler.adjust(status)
    return total_loss, masked_lm_loss, next_sentence_loss, status


rank, ranks = get_rank(), get_group_size()
step = train_step if options.order == "document" else train_step_correct
losses, collectives = [], []
for number in range(options.steps):
    batch = [part.chunk(ranks)[rank] for part in random_batch(config, options.rows, seed=number)]
    with counting() as record:
        total_loss, masked_lm_loss, next_sentence_loss, status = step(*batch)
    losses.append(float(total_loss))
    collectives.append([(exchange.kind, exchange.num_bytes) for exchange in record])
    print(
        f"step: {number + 1}, loss is {losses[-1]} (masked words {float(masked_lm_loss):.4f}, next sentence "
        f"{float(next_sentence_loss):.4f}), finite: {bool(status)}, loss scale: {float(loss_scaler.scale_value):g}, "
        f"exchanged: {collectives[-1]}"
    )
