"""Lowerings: programs that replace an operator when one of its ``lowered`` factors is split.

A softmax over a split dim is not a softmax of each part. It is: the maximum (combined by maximum), subtract,
exponentiate, the sum (combined by addition), divide. Written as a plain function over whole tensors, every operator
in it has a rule in which the dim is parallel, or reduced with a stated kind; tracing the function and splitting its
operators is all that is needed. Each function is called like the operator it replaces and gives the same result and
gradients.

A maximum that is only subtracted for stability is taken of ``x.detach()``: no gradient flows through it, so
combining parts by maximum needs no backward.
"""
