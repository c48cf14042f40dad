"""The paper's VGG networks for 32×32 images, with one linear layer after the last pooling."""

from __future__ import annotations

import functools

from torch import nn

from eigenoise import checks
from eigenoise.models.chain import Chain

CONVOLUTIONS_PER_BLOCK = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(Chain):
    """Five blocks of 3×3 convolutions with 64, 128, 256, 512 and 512 channels, each followed by max pooling.

    Args:
        depth: number of layers: 11, 13, 16 or 19.
        width: factor on the number of channels; the paper uses 0.5.
        batch_norm: whether each convolution has batch normalisation instead of a bias.
        in_channels: channels of an image.
        classes: number of classes.
    """

    def __init__(
        self, depth: int, *, width: float = 0.5, batch_norm: bool = False, in_channels: int = 3, classes: int = 10
    ):
        if depth not in CONVOLUTIONS_PER_BLOCK:
            raise ValueError(f"depth must be one of {', '.join(map(str, CONVOLUTIONS_PER_BLOCK))}, got {depth!r}")
        checks.number("width", width, open_low=True)
        channels = checks.integer("in_channels", in_channels)
        layers: list[nn.Module] = []
        for block, count in enumerate(CONVOLUTIONS_PER_BLOCK[depth]):
            size = max(1, round(width * min(64 << block, 512)))
            for _ in range(count):
                layers.append(nn.Conv2d(channels, size, 3, padding=1, bias=not batch_norm))
                layers += [nn.BatchNorm2d(size), nn.ReLU(inplace=True)] if batch_norm else [nn.ReLU(inplace=True)]
                channels = size
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels, checks.integer("classes", classes)))
        for module in self:
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


VGG11, VGG13, VGG16, VGG19 = (functools.partial(VGG, depth) for depth in CONVOLUTIONS_PER_BLOCK)
