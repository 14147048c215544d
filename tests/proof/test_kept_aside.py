"""Kinds of models whose right plans a plain comparison calls wrong: their norms make last bits visible, or their
gradients are near zero. Right plans of them are equal, and every kind of mistake is found in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from museum.faults import NothingToBreak, cotangent, exchange, gradient, kernel, loaded
