"""A recogniser of speech: convolution, a bidirectional LSTM, and labels of which nobody says when they are spoken
(rows A35, C1)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, context, nn
from shardwise.mindspore import dtype as mstype
from shardwise.mindspore.communication import init
from shardwise.mindspore.ops import operations as P

STEPS, BANDS, CLASSES, ROWS = 20, 12, 6, 4


class DeepSpeech(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.SequentialCell(
            nn.Conv2d(1, 4, (5, 3), (2, 1), pad_mode="pad", padding=(2, 2, 1, 1)), nn.Hardtanh(0, 20)
        )
        self.rnn = nn.LSTM(input_size=24, hidden_size=8, bidirectional=True)
        self.fc = nn.Dense(16, CLASSES, has_bias=False)
        self.reshape, self.transpose = P.Reshape(), P.Transpose()

    def construct(self, x):
        x = self.conv(x)
        n, channels, bands, steps = x.shape
        x = self.transpose(self.reshape(x, (n, channels * bands, steps)), (2, 0, 1))
        return self.fc(self.rnn(x)[0])


class NetWithLossClass(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.loss = network, P.CTCLoss(ctc_merge_repeated=True)
        self.mean, self.cast = P.ReduceMean(keep_dims=False), P.Cast()

    def construct(self, inputs, input_length, label_indices, label_values):
        loss = self.loss(self.network(inputs), label_indices, label_values, self.cast(input_length, mstype.int32))
        return self.mean(loss[0])


def main(mode=None):
    init()
    ms.set_seed(1)
    if mode is not None:
        context.set_auto_parallel_context(parallel_mode=mode, full_batch=True)
    numbers = np.random.RandomState(0)
    spoken = Tensor(numbers.randn(ROWS, 1, BANDS, STEPS).astype(np.float32))
    lengths = Tensor(np.full(ROWS, STEPS, np.int32))
    labels = Tensor(numbers.randint(0, CLASSES - 1, ROWS * 3).astype(np.int32))  # the last class is the blank
    places = Tensor(np.array([[row, place] for row in range(ROWS) for place in range(3)], np.int64))
    net = NetWithLossClass(DeepSpeech())
    rates = nn.dynamic_lr.cosine_decay_lr(0.001, 0.02, 8, 4, 2)
    step = nn.TrainOneStepCell(net, nn.Adam(net.trainable_params(), learning_rate=rates, loss_scale=16.0), sens=16.0)
    step.set_train()
    losses = [float(step(spoken, lengths, places, labels)) for _ in range(4)]
    print("losses:", losses)
    return losses


if __name__ == "__main__":
    main()
