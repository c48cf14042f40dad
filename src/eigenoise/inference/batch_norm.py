"""Batch norm under weight noise.

Its running averages mix the outputs of many weight samples, some of them many steps old. They fit neither the mean nor
any one sample, so they are recomputed before a test, with the weights that are tested.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

NUM_BATCHES = 8  # that averages are recomputed from for each weight sample
RUNNING = "running"


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The modules of ``model`` that keep running averages, by name."""
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, _BatchNorm) and m.track_running_stats}


def inputs_of(name: str, batches: Any) -> list[Tensor]:
    """The inputs of batches that are tensors, or tuples that begin with one.

    Raises:
        TypeError: if they are anything else.
        ValueError: if there are none.
    """
    remedy = (
        "pass a tensor (torch.as_tensor(x)) or an iterable of batches such as a DataLoader; a model of several inputs "
        "needs a wrapper that takes one tensor"
    )
    if isinstance(batches, Tensor):
        return [batches]
    if isinstance(batches, (str, bytes, dict)) or not isinstance(batches, Iterable):
        raise TypeError(f"{name} must be a tensor or an iterable of batches, got {type(batches).__name__}; {remedy}")
    inputs = [batch[0] if isinstance(batch, (tuple, list)) and batch else batch for batch in batches]
    for batch in inputs:
        if not isinstance(batch, Tensor):
            raise TypeError(
                f"{name} must hold batches that are tensors or begin with one, got {type(batch).__name__}; {remedy}"
            )
    if not inputs:
        raise ValueError(f"{name} must hold at least one batch, got none")
    return inputs


@dataclass(frozen=True)
class SampleAverages:
    """Batch norm's averages for each of the first k weight samples of a posterior.

    Attributes:
        buffers: ``(k, ...)`` by name in the model.
    """

    buffers: dict[str, Tensor]

    @property
    def samples(self) -> int:
        """K."""
        return len(next(iter(self.buffers.values())))

    @staticmethod
    def generator() -> torch.Generator:
        """A source of the noise of those samples."""
        return torch.Generator().manual_seed(0)

    def check(self, samples: int, generator: torch.Generator | None) -> None:
        """Raise ValueError if they are not those of ``samples`` samples from ``generator``."""
        if samples > self.samples or generator is not None:
            got = f"{samples} samples" if generator is None else "a generator of your own"
            raise ValueError(
                f"this posterior keeps batch norm's averages for its first {self.samples} samples, got {got}: pass "
                "batch_norm= as well, or call settle_batch_norm with more samples"
            )

    def write(self, model: nn.Module, sample: int) -> None:
        """Put the averages of one sample into the model."""
        own = dict(model.named_buffers())
        for name, values in self.buffers.items():
            own[name].copy_(values[sample])


@contextmanager
def settling(model: nn.Module, batch_norm: Any, sampled: bool = True) -> Iterator[Callable[[], None]]:
    """Gives a function that recomputes batch norm's averages with the current weights; they are restored at the end.

    Args:
        model: the model.
        batch_norm: batches to recompute from, of which the first few are used; ``"running"`` to use the running
            averages as they are; None for that with a warning, if there are any and weights are sampled.
        sampled: whether weights are.
    """
    norms = batch_norms(model)
    if batch_norm is None and norms and sampled:
        warnings.warn(
            "the model has batch norm, whose running averages mix weight samples: pass batch_norm=train_loader to "
            f"recompute them for each sample, or batch_norm={RUNNING!r} to use them as they are",
            RuntimeWarning,
            stacklevel=4,
        )
    if not norms or batch_norm is None or (isinstance(batch_norm, str) and batch_norm == RUNNING):
        yield lambda: None
        return
    whole = isinstance(batch_norm, (Tensor, str, dict)) or not isinstance(batch_norm, Iterable)
    batches = inputs_of("batch_norm", batch_norm if whole else itertools.islice(batch_norm, NUM_BATCHES))
    device = next(model.parameters()).device
    batches = [batch.to(device) for batch in batches]
    before = {name: {key: b.clone() for key, b in norm.named_buffers()} for name, norm in norms.items()}
    try:
        yield lambda: settle_batch_norm(model, batches)
    finally:
        with torch.no_grad():
            for name, norm in norms.items():
                for key, buffer in norm.named_buffers():
                    buffer.copy_(before[name][key])


@torch.no_grad()
def settle_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the running averages of every batch norm to their means over ``batches``, with the current weights.

    A model without batch norm is not run. Training mode and momenta are left as they were, and so are the averages if
    something goes wrong.

    Raises:
        ValueError: if there are no batches.
    """
    norms = [*batch_norms(model).values()]
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
