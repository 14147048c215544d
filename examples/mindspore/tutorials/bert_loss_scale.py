"""BERT's pre-training step with loss scaling: a training cell made from nn.TrainOneStepWithLossScaleCell (row B24)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, Tensor, nn
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.ops import composite as C
from shardwise.mindspore.ops import functional as F
from shardwise.mindspore.ops import operations as P

GRADIENT_CLIP_VALUE = 1.0
grad_scale = C.MultitypeFuncGraph("grad_scale")
clip_grad = C.MultitypeFuncGraph("clip_grad")


@grad_scale.register("Tensor", "Tensor")
def tensor_grad_scale(scale, grad):
    return grad * P.Reciprocal()(scale)


@clip_grad.register("Number", "Tensor")
def _clip_grad(clip_value, grad):
    return nn.ClipByNorm()(grad, F.cast(F.tuple_to_array((clip_value,)), F.dtype(grad)))


class Bert(nn.Cell):
    """A small encoder with a masked language model's loss."""

    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.norm, self.head = nn.LayerNorm((width,)), nn.Dense(width, vocab)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, input_ids, masked_lm_ids):
        hidden = self.norm(self.layer(self.embedding(input_ids)))
        logits = self.head(hidden)
        return self.loss(logits.reshape((-1, logits.shape[-1])), masked_lm_ids.reshape((-1,)))


class BertTrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):
    def __init__(self, network, optimizer, scale_update_cell=None):
        super().__init__(network, optimizer, scale_update_cell)
        self.cast = P.Cast()
        self.loss_scale = None
        self.loss_scaling_manager = scale_update_cell
        if scale_update_cell:
            self.loss_scale = Parameter(Tensor(scale_update_cell.get_loss_scale(), dtype=ms.float32), name="loss_scale")

    def construct(self, input_ids, masked_lm_ids, sens=None):
        weights = self.weights
        loss = self.network(input_ids, masked_lm_ids)
        scaling_sens = self.loss_scale if sens is None else sens
        status, scaling_sens = self.start_overflow_check(loss, scaling_sens)
        grads = self.grad(self.network, weights)(input_ids, masked_lm_ids, self.cast(scaling_sens, ms.float32))
        grads = self.grad_reducer(grads)
        grads = self.hyper_map(F.partial(grad_scale, scaling_sens), grads)
        grads = self.hyper_map(F.partial(clip_grad, GRADIENT_CLIP_VALUE), grads)
        cond = self.get_overflow_status(status, grads)
        overflow = self.loss_scaling_manager(self.loss_scale, cond)
        if not overflow:
            self.optimizer(grads)
        return loss, cond, scaling_sens


def main(steps=4):
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(2)
    net = Bert()
    lr = nn.WarmUpLR(0.05, 2)
    optimizer = nn.AdamWeightDecay(net.trainable_params(), lr, weight_decay=0.01)
    update_cell = nn.DynamicLossScaleUpdateCell(loss_scale_value=2**10, scale_factor=2, scale_window=2)
    train_step = BertTrainOneStepWithLossScaleCell(net, optimizer, update_cell)
    train_step.set_train(True)
    numbers, losses, scales = np.random.RandomState(0), [], []
    for _ in range(steps):
        ids = numbers.randint(0, 32, (8, 6)).astype(np.int32)
        rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        loss, _, scale = train_step(Tensor(ids[rows]), Tensor(ids[rows]))
        losses.append(float(loss.asnumpy()))
        scales.append(float(scale.asnumpy()))
    return losses, scales, net


if __name__ == "__main__":
    print(main())
