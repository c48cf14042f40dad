"""The networks that steps are timed on, with one batch of random numbers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from eigenoise import models

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A network and a batch.

    Attributes:
        name: short name, as in the published tables.
        title: description.
        make: builds the network.
        x: inputs ``(b, ...)``.
        y: targets.
        num_data: N that methods are told.
        loss: mean over the batch.
        classification: whether the targets are classes.
        steps: number of plain steps that are timed at once.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    num_data: int
    loss: Loss
    classification: bool
    steps: int = 1


def _regression() -> Case:
    title = "MLP 13-50-1, batch 10"
    x, y = torch.randn(10, 13), torch.randn(10, 1)
    return Case("a", title, lambda: models.MLP(13, [50], 1), x, y, 455, functional.mse_loss, False, steps=20)


def _mlp() -> Case:
    title = "MLP 784-400-400-10, batch 128"
    return _classes("b", title, lambda: models.MLP(784, [400, 400], 10), torch.randn(128, 784), 10)


def _vgg(batch_norm: bool = False) -> Case:
    name, norm = ("c+bn", "with batch norm") if batch_norm else ("c", "without batch norm")
    title = f"half-width VGG16 {norm}, 3×32×32, batch 128"
    images = torch.randn(128, 3, 32, 32)
    return _classes(name, title, lambda: models.VGG16(width=0.5, batch_norm=batch_norm), images, 2)


class Autocast(nn.Module):
    """A convolutional network in bfloat16 autocast and channels_last, as it trains fastest."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits in float32."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.network(x.contiguous(memory_format=torch.channels_last)).float()


def _vgg_in_bfloat16() -> Case:
    title = "half-width VGG16 without batch norm in bfloat16 autocast and channels_last, 3×32×32, batch 128"
    images = torch.randn(128, 3, 32, 32)
    return _classes("c+bf16", title, lambda: Autocast(models.VGG16(width=0.5, batch_norm=False)), images, 2)


def _transformer() -> Case:
    title = "transformer encoder, 4 layers of width 256, 16 sequences of 64"
    sequences = torch.randn(16, 64, 256)
    return _classes("d", title, lambda: models.TransformerEncoder(width=256, depth=4), sequences, 1)


def _classes(name: str, title: str, make: Callable[[], nn.Module], x: Tensor, steps: int) -> Case:
    """A case with ten classes."""
    y = torch.randint(10, (len(x),))
    return Case(name, title, make, x, y, 50_000, functional.cross_entropy, True, steps)


CASES: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        "a": _regression,
        "b": _mlp,
        "c": _vgg,
        "c+bn": lambda: _vgg(batch_norm=True),
        "c+bf16": _vgg_in_bfloat16,
        "d": _transformer,
    }
)
