"""Initialisation of ranks and of groups of ranks (``import shardwise.mindspore.communication as D``)."""

from shardwise.mindspore.communication import management
from shardwise.mindspore.communication.management import *

__all__ = management.__all__
