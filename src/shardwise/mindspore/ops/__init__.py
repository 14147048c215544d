"""Operators: primitives (objects), functions, and communication."""

from shardwise.mindspore.ops.clip import clip_by_global_norm, clip_by_value
from shardwise.mindspore.ops.communication import AllGather, AllReduce, AlltoAll, Broadcast, ReduceOp, ReduceScatter
from shardwise.mindspore.ops.functional import depend, grad, stop_gradient, value_and_grad
from shardwise.mindspore.ops.operations import MatMul, ReLU
from shardwise.mindspore.ops.primitive import Primitive
