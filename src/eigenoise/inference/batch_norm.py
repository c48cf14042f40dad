"""Batch norm under weight noise.

Its running averages mix the outputs of many weight samples, some of them many steps old. They fit neither the mean nor
any one sample, so they are recomputed before a test, with the weights that are tested.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def settle_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the running averages of every batch norm to their means over ``batches``, with the current weights.

    A model without batch norm is not run. Training mode and momenta are left as they were, and so are the averages if
    something goes wrong.

    Raises:
        ValueError: if there are no batches.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    modes, momenta = [module.training for module in model.modules()], [norm.momentum for norm in norms]
    before = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
    for module in model.modules():
        module.training = isinstance(module, _BatchNorm)
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # all batches count alike
    try:
        count = 0
        for x in batches:
            model(x)
            count += 1
        if not count:
            raise ValueError("batches must hold at least one")
    except BaseException:
        for norm, buffers in zip(norms, before, strict=True):
            for own, old in zip(norm.buffers(), buffers, strict=True):
                own.copy_(old)
        raise
    finally:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
