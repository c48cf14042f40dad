"""Models compiled by ``torch.compile``: their layers can be watched only while they run eagerly."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def run_eagerly() -> AbstractContextManager:
    """Within the block compiled functions run as they were written; nothing to do if nothing was compiled."""
    if "torch._dynamo" not in sys.modules:  # importing the compiler takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def original_module(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` wraps, or the model itself."""
    wrapped = getattr(model, "_orig_mod", None)
    return wrapped if isinstance(wrapped, nn.Module) else model
