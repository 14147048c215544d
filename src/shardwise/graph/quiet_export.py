"""Silencing of torch.export: only its errors reach the user."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx.config

_STACKS = "do_not_emit_stack_traces"
_NOISY_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence logs of errors that export also raises, and warnings about what shardwise handles. Export without a stack
    per node, which takes time; ``user_lines`` records the relevant line. A torch without this setting still collects
    them."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    disabled = [logger.disabled for logger in loggers]
    config: Any = torch.fx.config
    before = getattr(config, _STACKS, False)
    setattr(config, _STACKS, True)
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            warnings.filterwarnings("ignore", message=r".*(attribute|assigned) .*export.*")
            warnings.filterwarnings("error", message=r".*Disabling autocast.*")  # CUDA's, where there is no CUDA
            yield
    finally:
        for logger, was in zip(loggers, disabled, strict=True):
            logger.disabled = was
        setattr(config, _STACKS, before)
