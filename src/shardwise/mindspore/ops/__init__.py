"""Operators: primitives (objects), functions, and communication."""

from shardwise.mindspore.ops.functional import depend, grad, stop_gradient, value_and_grad
from shardwise.mindspore.ops.operations import MatMul, ReLU
from shardwise.mindspore.ops.primitive import Primitive
