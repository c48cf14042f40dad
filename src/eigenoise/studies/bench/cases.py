"""The networks that steps are timed on, with one batch of random numbers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eigenoise import models

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A network and a batch.

    Attributes:
        name: a letter or two, as in the published tables.
        title: what it is.
        make: builds the network.
        x: inputs ``(b, ...)``.
        y: targets.
        num_data: N, as if there were so many examples.
        loss: mean over the batch.
        classification: whether the targets are classes.
        options: for our natural-gradient methods, beside statistics every 10 and a basis every 200 steps.
        steps: of a plain kind that are timed at once.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    num_data: int
    loss: Loss
    classification: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1


def _regression() -> Case:
    x, y = torch.randn(10, 13), torch.randn(10, 1)
    title = "MLP 13-50-1, batch 10"
    return Case("a", title, lambda: models.MLP(13, [50], 1), x, y, 455, functional.mse_loss, False, steps=20)


def _classes(name: str, title: str, make: Callable[[], nn.Module], x: Tensor, **more: Any) -> Case:
    y = torch.randint(10, (len(x),))
    return Case(name, title, make, x, y, 50_000, functional.cross_entropy, True, **more)


def _mlp() -> Case:
    title = "MLP 784-400-400-10, batch 128"
    return _classes("b", title, lambda: models.MLP(784, [400, 400], 10), torch.randn(128, 784), steps=10)


def _vgg(batch_norm: bool = False) -> Case:
    name, title = ("c+bn", "with batch norm") if batch_norm else ("c", "without batch norm")
    return _classes(
        name,
        f"half-width VGG16 {title}, 3×32×32, batch 128",
        lambda: models.VGG16(width=0.5, batch_norm=batch_norm),
        torch.randn(128, 3, 32, 32),
        options={"stats_fraction": 1 / 8},
        steps=2,
    )


def _transformer() -> Case:
    return _classes(
        "d",
        "transformer encoder, 4 layers of width 256, 16 sequences of 64",
        lambda: models.TransformerEncoder(width=256, depth=4),
        torch.randn(16, 64, 256),
        options={"stats_fraction": 1 / 4},
    )


CASES: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {"a": _regression, "b": _mlp, "c": _vgg, "c+bn": lambda: _vgg(batch_norm=True), "d": _transformer}
)
