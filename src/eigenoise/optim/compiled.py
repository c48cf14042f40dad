"""Models compiled by ``torch.compile``: their layers can be watched only while they run eagerly."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def run_eagerly() -> AbstractContextManager:
    """Within the block compiled functions run as they were written; nothing to do if nothing was compiled."""
    if "torch._dynamo" not in sys.modules:  # importing the compiler takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
