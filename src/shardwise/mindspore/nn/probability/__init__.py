"""Probability distributions."""

from shardwise.mindspore.nn.probability import distribution

__all__ = ["distribution"]
