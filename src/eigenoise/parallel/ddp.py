"""Models that are wrapped in ``DistributedDataParallel``, or in what an optimiser of whole layers cannot follow."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from eigenoise.parallel.ranks import Ranks


class Inside(Protocol):
    """Knows whether a training block is running."""

    inside: bool


def original_module(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` wraps, or the model itself."""
    wrapped = getattr(model, "_orig_mod", None)
    return wrapped if isinstance(wrapped, nn.Module) else model


def unwrapped(model: nn.Module) -> tuple[nn.Module, Ranks | None]:
    """The model itself, and the processes that share it if it is wrapped in ``DistributedDataParallel``.

    Raises:
        ValueError: if its weights are divided between processes, or it is wrapped in a way that cannot be followed.
    """
    model = original_module(model)
    if isinstance(model, DistributedDataParallel):
        if model.static_graph:
            raise ValueError(
                "DistributedDataParallel(static_graph=True) expects the same backward pass at every step, but "
                "statistics take one more at some: leave static_graph out"
            )
        group = model.process_group
        return model.module, (Ranks(group) if dist.get_world_size(group) > 1 else None)
    if not isinstance(model, nn.Module):  # the optimiser's own check says so
        return model, None
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "a part of the model is wrapped in DistributedDataParallel, or the wrapped one is wrapped once more, as by "
            "torch.compile: give the optimiser the DistributedDataParallel itself, around the whole model"
        )
    sharded = [name for name, param in model.named_parameters() if hasattr(param, "device_mesh")]
    if sharded or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            f"the model's weights{f', such as {sharded[0]!r},' if sharded else ''} are divided between processes "
            "(fully_shard, FSDP or tensor parallel), but a posterior needs whole matrices: wrap the model in "
            "DistributedDataParallel instead"
        )
    return model, None


def refuse_join(model: nn.Module) -> None:
    """Raise RuntimeError within torch's ``Join``, whose processes that have run out of batches make no steps."""
    config = getattr(model, "_join_config", None)
    if config is not None and config.enable:
        raise RuntimeError(
            "uneven inputs with Join are not supported, as all processes must make each step: give each the same "
            "number of batches, for instance with DistributedSampler(drop_last=True)"
        )


class _WrappingCheck:
    """A hook before a model's forward pass, until the first one of a training block."""

    def __init__(self, blocks: Inside):
        self.blocks = blocks
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not (self.blocks.inside and torch.is_grad_enabled()):
            return
        if self.handle is not None:
            self.handle.remove()
        if DistributedDataParallel._active_ddp_module is not None:
            raise RuntimeError(
                "the model runs inside DistributedDataParallel, but its optimiser was given the model alone and would "
                "let processes drift apart: give it the wrapped model"
            )

    def __reduce__(self) -> Any:
        return _ignore_hook, ()  # a copy of the model has no optimiser


def _ignore_hook() -> Any:
    return _ignored


def _ignored(module: nn.Module, inputs: Any) -> None:
    """What becomes of the hook in a copy."""


def refuse_wrapping_later(model: nn.Module, blocks: Inside) -> None:
    """Make the first training pass of a bare ``model`` an error if it happens inside ``DistributedDataParallel``."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        check = _WrappingCheck(blocks)
        check.handle = model.register_forward_pre_hook(check)
