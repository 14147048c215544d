"""Joining the ranks, and groups of them (``import shardwise.mindspore.communication as D``)."""

from shardwise.mindspore.communication import management
from shardwise.mindspore.communication.management import *

__all__ = management.__all__
